#include "score_mod/program.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "score_mod/print.h"

namespace tandem::score_mod {
namespace {

// Limits: registers of a thread for each of its rows, and words of shared memory for each row and key of an iteration.
constexpr size_t kMaxHeldOfScores = 4, kMaxHeldOfMasks = 2;

constexpr size_t kMaxKept = 256;  // expressions; beyond that, some are parsed again

Gradient gradient_of(Mod& mod) {
  if (mod.signature.result == Signature::Result::mask) return {.score = mod.graph.real(0), .captured = {}};
  return differentiate(mod.graph, mod.result);
}

// Expressions and names have no zero bytes, because the parser refuses them.
std::string key_of(std::string_view text, const Signature& signature) {
  std::string key(text);
  const auto add = [&key](char kind, const std::vector<Name>& names) {
    for (const Name& name : names) {
      key += {'\0', kind, static_cast<char>('a' + static_cast<int>(name.type)), static_cast<char>('a' + name.rank),
              static_cast<char>('a' + static_cast<int>(name.element))};
      key += name.name;
    }
  };
  key += {'\0', signature.result == Signature::Result::mask ? 'm' : 's'};
  add('s', signature.scalars);
  add('t', signature.tensors);
  return key;
}

class Kept {
 public:
  std::shared_ptr<const Program> find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = programs_.find(key);
    return found == programs_.end() ? nullptr : found->second;
  }
  void add(const std::string& key, std::shared_ptr<const Program> program) {
    const std::lock_guard lock(mutex_);
    if (programs_.size() >= kMaxKept) programs_.clear();
    programs_.insert_or_assign(key, std::move(program));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Program>> programs_;
};

// The cache is never destroyed, because other threads may call until the process ends.
Kept& kept() {
  static Kept& all = *new Kept;
  return all;
}

// Bits of a graph's node: the score and the parts of its position that the node depends on.
enum Follows : uint8_t { kQuery = 1, kKey = 2, kDistance = 4, kScore = 8 };

std::vector<uint8_t> follows(const Graph& graph) {
  const auto is_input = [&graph](NodeId id, Input input) {
    return graph[id].op == Op::input && graph[id].index == static_cast<int>(input);
  };
  std::vector<uint8_t> bits(static_cast<size_t>(graph.size()));
  for (NodeId id = 0; id < graph.size(); ++id) {
    const Node& node = graph[id];
    uint8_t all = is_input(id, Input::q)       ? kQuery
                  : is_input(id, Input::k)     ? kKey
                  : is_input(id, Input::score) ? kScore
                                               : 0;
    for (int i = 0; i < node.operand_count(); ++i) {
      all = static_cast<uint8_t>(all | bits[static_cast<size_t>(node.operands[static_cast<size_t>(i)])]);
    }
    const NodeId a = node.operands[0], b = node.operands[1];
    const bool distance = node.op == Op::subtract && ((is_input(a, Input::q) && is_input(b, Input::k)) ||
                                                      (is_input(a, Input::k) && is_input(b, Input::q)));
    bits[static_cast<size_t>(id)] = distance ? uint8_t{kDistance} : all;
  }
  return bits;
}

std::vector<Capture> captures_of(const Graph& graph, const Gradient& gradient) {
  std::vector<Capture> captures;
  const std::vector<uint8_t> positions = follows(graph);
  for (const Derivative& derivative : gradient.captured) {
    const Node& read = graph[derivative.with_respect_to];
    if (read.op != Op::gather) continue;
    Capture capture{.tensor = read.index, .rank = read.operand_count(), .derivative = derivative.value};
    int all = 0;
    for (size_t i = 0; i < kMaxRank; ++i) {
      capture.indices[i] = read.operands[i];
      if (read.operands[i] != kNoNode) all |= positions[static_cast<size_t>(read.operands[i])];
    }
    capture.line = all == 0 ? Line::tile : all == kDistance ? Line::diagonal : all == kKey ? Line::column : Line::row;
    captures.push_back(capture);
  }
  return captures;
}

std::vector<NodeId> outputs_of(const std::vector<Capture>& captures) {
  std::vector<NodeId> outputs;
  for (const Capture& capture : captures) {
    outputs.push_back(capture.derivative);
    outputs.insert(outputs.end(), capture.indices, capture.indices + capture.rank);
  }
  return outputs;
}

// Prints captures.add() for each capture. member: suffix of a node's variable.
std::string print_adds(const std::vector<Capture>& captures, const char* member) {
  std::string text;
  int number = 0;
  for (const Capture& capture : captures) {
    text += str_cat("  captures.template add<", number++, ", ", capture.tensor, ">(v", capture.derivative, member,
                    ", mod_cell(names.tensors[", capture.tensor, "]");
    for (int i = 0; i < capture.rank; ++i) text += str_cat(", v", capture.indices[i], member);
    text += "));\n";
  }
  return text;
}

// Prints the captures of one line.
std::string captures_along(const Mod& mod, std::vector<Capture> captures, Line line) {
  std::erase_if(captures, [line](const Capture& capture) { return capture.line != line; });
  return print_values(mod, outputs_of(captures)) + print_adds(captures, "");
}

std::vector<NodeId> indices_of(const std::vector<Capture>& captures) {
  std::vector<NodeId> indices;
  for (const Capture& capture : captures)
    indices.insert(indices.end(), capture.indices, capture.indices + capture.rank);
  return indices;
}

bool captured_per_tile(const Graph& graph, const std::vector<Capture>& captures) {
  const std::vector<NodeId> indices = indices_of(captures);
  const auto is_of_positions = [&graph](NodeId id) {
    const Node& node = graph[id];
    return node.op != Op::gather && (node.op != Op::input || node.index != static_cast<int>(Input::score));
  };
  const std::vector<NodeId> needed = graph.needed_by(indices);
  return !captures.empty() && std::all_of(needed.begin(), needed.end(), is_of_positions) &&
         std::all_of(captures.begin(), captures.end(), [&graph](const Capture& capture) {
           const Node& derivative = graph[capture.derivative];
           return derivative.op == Op::constant && std::isfinite(derivative.value);
         });
}

// Returns true if each derivative is the score or a finite constant, and therefore finite for every finite score.
bool captured_per_score(const Graph& graph, const std::vector<Capture>& captures) {
  constexpr size_t kMax = 2;  // sums that fit in a thread's registers
  return !captures.empty() && captures.size() <= kMax &&
         std::all_of(captures.begin(), captures.end(), [&graph](const Capture& capture) {
           const Node& derivative = graph[capture.derivative];
           const bool is_score = derivative.op == Op::input && derivative.index == static_cast<int>(Input::score);
           const bool is_constant = derivative.op == Op::constant && std::isfinite(derivative.value);
           return capture.line == Line::tile && (is_score || is_constant);
         });
}

// Prints the ranges of a tile's indices. Each must be a single number.
std::string tile_function_of(const Mod& mod, const std::vector<Capture>& captures) {
  if (!captured_per_tile(mod.graph, captures)) return "";
  std::string points;
  for (const NodeId index : indices_of(captures)) points += str_cat("  if (!is_point(v", index, ")) return false;\n");
  return str_cat(
      "template <auto T, class Captures>\nTANDEM_DEVICE bool tile_captures(const RangePlace& at, const ModNames& "
      "names, const Captures& captures) {\n",
      print_range_values(mod, outputs_of(captures)), points, print_adds(captures, ".low"), "  return true;\n}\n");
}

// The function is printed even if the expression reads none of the tensors with gradients. The gradients of the tensors
// are then zeros.
std::string capture_functions_of(const Mod& mod, const std::vector<Capture>& captures) {
  std::string counts, bodies;
  for (const auto& [line, name] : {std::pair{Line::row, "row"}, std::pair{Line::column, "column"},
                                   std::pair{Line::diagonal, "diagonal"}, std::pair{Line::tile, "tile"}}) {
    const auto count =
        std::count_if(captures.begin(), captures.end(), [line](const Capture& c) { return c.line == line; });
    if (count == 0) continue;
    counts += str_cat("  if (line == CaptureLine::", name, ") return ", count, ";\n");
    bodies +=
        str_cat("  if constexpr (line == CaptureLine::", name, ") {\n", captures_along(mod, captures, line), "  }\n");
  }
  return str_cat("template <auto T>\nconstexpr int captures_along(CaptureLine line) {\n", counts, "  return 0;\n}\n",
                 "template <auto T, CaptureLine line, class Captures>\nTANDEM_DEVICE void score_captures(float score, "
                 "const ModPlace& at, const ModNames& names, const Captures& captures) {\n",
                 bodies, "}\n");
}

// Prints the elements that a mask reads for a key with any query, or for a query with any key.
std::string touches_of(const Mod& mod, Follows what) {
  const std::vector<uint8_t> positions = follows(mod.graph);
  std::vector<NodeId> indices;
  std::string lines;
  for (const NodeId id : mod.graph.needed_by({&mod.result, 1})) {
    const Node& node = mod.graph[id];
    if (node.op != Op::gather || positions[static_cast<size_t>(id)] != what) continue;
    indices.insert(indices.end(), node.operands.begin(), node.operands.begin() + node.operand_count());
    lines += print_touch(mod, id);
  }
  return print_values(mod, indices) + lines;
}

constexpr const char* kTemplate = "template <auto T>\n";
constexpr const char* kPlace = "const ModPlace& at, const ModNames& names) {\n";

// Prints a struct of the values that a row or a key holds, and the function that computes them.
std::string holder_of(const Mod& mod, const char* name, const char* maker, const std::vector<NodeId>& held) {
  std::string members, values;
  for (const NodeId id : held) {
    members += str_cat("  ", mod.graph[id].type == Type::real ? "float" : "int", " v", id, ";\n");
    values += str_cat(values.empty() ? "v" : ", v", id);
  }
  return str_cat(kTemplate, "struct ", name, " {\n", members, "};\n", kTemplate, "TANDEM_DEVICE ", name, "<T> ", maker,
                 "(", kPlace, print_values(mod, held), "  return {", values, "};\n}\n");
}

// Prints the new score and its derivative, from the values of a row and the remaining operations.
std::string score_functions_of(const Mod& mod, NodeId slope) {
  const Held held{.rows = held_by_rows(mod, mod.result, kMaxHeldOfScores), .keys = {}};
  const std::vector<uint8_t> positions = follows(mod.graph);
  const bool of_heads = std::all_of(held.rows.begin(), held.rows.end(),
                                    [&positions](NodeId id) { return positions[static_cast<size_t>(id)] == 0; });
  const auto function = [&](const char* name, NodeId result) {
    return str_cat(kTemplate, "TANDEM_DEVICE float ", name, "(float score, const ScoreRow<T>& row, ", kPlace,
                   print(mod, result, held), "}\n");
  };
  return str_cat(holder_of(mod, "ScoreRow", "score_row", held.rows), kTemplate,
                 "constexpr bool rows_are_alike() { return ", of_heads ? "true" : "false", "; }\n",
                 function("score_mod", mod.result), function("score_slope", slope));
}
std::string mask_functions_of(const Mod& mod) {
  const Held held{.rows = held_by_rows(mod, mod.result, kMaxHeldOfMasks),
                  .keys = held_by_keys(mod, mod.result, kMaxHeldOfMasks)};
  return str_cat(holder_of(mod, "MaskRow", "mask_row", held.rows), holder_of(mod, "MaskKey", "mask_key", held.keys),
                 kTemplate, "constexpr int mask_operations() { return ", operations_of_mask(mod, held), "; }\n",
                 kTemplate, "TANDEM_DEVICE bool mask_mod(const MaskRow<T>& row, const MaskKey<T>& key, ", kPlace,
                 print(mod, mod.result, held), "}\n");
}

std::string functions_of(const Mod& mod, NodeId slope, const std::vector<Capture>& captures) {
  if (mod.signature.result == Signature::Result::mask) {
    const auto touch = [&mod](const char* name, Follows what) {
      return str_cat("template <auto T>\nTANDEM_DEVICE void ", name, "(const ModPlace& at, const ModNames& names) {\n",
                     touches_of(mod, what), "}\n");
    };
    return mask_functions_of(mod) + touch("mask_touch_queries", kQuery);
  }
  return score_functions_of(mod, slope) + capture_functions_of(mod, captures);
}

std::string ranges_of(const Mod& mod, const std::vector<Capture>& captures) {
  if (mod.signature.result != Signature::Result::mask) return tile_function_of(mod, captures);
  return str_cat(
      "template <auto T>\nTANDEM_DEVICE IntRange mask_range(const RangePlace& at, const ModNames& names) {\n",
      print_ranges(mod, mod.result), "}\n");
}

// FNV-1a.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash != 0 ? hash : 1;
}

}  // namespace

Program::Program(Mod read)
    : mod(std::move(read)),
      gradient(gradient_of(mod)),
      captures(captures_of(mod.graph, gradient)),
      capturing(outputs_of(captures)),
      captured_per_tile(score_mod::captured_per_tile(mod.graph, captures)),
      captured_per_score(score_mod::captured_per_score(mod.graph, captures)),
      result_tiles(mod.graph, {mod.result}),
      slope_tiles(mod.graph, {gradient.score}),
      capture_tiles(mod.graph, capturing),
      cuda(functions_of(mod, gradient.score, captures)),
      cuda_hash(hash_of(cuda)),
      cuda_ranges(ranges_of(mod, captures)),
      light(is_light(mod, mod.result)) {}

Status read_program(std::string_view text, const Signature& signature, std::shared_ptr<const Program>* program) {
  const std::string key = key_of(text, signature);
  if ((*program = kept().find(key)) != nullptr) return {};
  Mod mod;
  TANDEM_TRY(parse(text, signature, &mod));
  *program = std::make_shared<const Program>(std::move(mod));
  kept().add(key, *program);
  return {};
}

}  // namespace tandem::score_mod
