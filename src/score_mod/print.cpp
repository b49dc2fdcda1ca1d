#include "score_mod/print.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <vector>

#include "base/text.h"

namespace tandem::score_mod {
namespace {

std::string hexadecimal(uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08" PRIx32, bits);
  return text;
}

// Prints a constant by its bits, so that no decimal number is rounded.
std::string constant(const Node& node) {
  if (node.type == Type::real) {
    return str_cat("mod_float(", hexadecimal(std::bit_cast<uint32_t>(static_cast<float>(node.value))), ")");
  }
  return str_cat("static_cast<int>(", hexadecimal(static_cast<uint32_t>(static_cast<int32_t>(node.value))), ")");
}

const char* name_of(Element element) {
  constexpr const char* names[kElements] = {"f64", "f32", "bf16", "f16", "i64", "i32", "boolean"};
  return names[static_cast<int>(element)];
}

std::string read(const std::string& function, const Mod& mod, size_t tensor) {
  return str_cat(function, "<ModElement::", name_of(mod.signature.tensors[tensor].element), ">(names.tensors[", tensor,
                 "]");
}

std::string leaf(const char* prefix, const Mod& mod, const Node& node) {
  const auto index = static_cast<size_t>(node.index);
  switch (node.op) {
    case Op::constant: return constant(node);
    case Op::input: {
      const auto input = static_cast<Input>(node.index);
      return input == Input::score ? "score" : str_cat("at.", score_mod::name_of(input));
    }
    case Op::scalar: {
      const std::string bits = str_cat("names.scalars[", index, "]");
      return node.type == Type::real ? str_cat("mod_float(", bits, ")") : bits;
    }
    default: return read(str_cat(prefix, "gather"), mod, index);
  }
}

// Marks the nodes that depend on any of these inputs.
template <class Follows>
std::vector<bool> following(const Graph& graph, const Follows& follows) {
  std::vector<bool> all(static_cast<size_t>(graph.size()));
  for (NodeId id = 0; id < graph.size(); ++id) {
    const Node& node = graph[id];
    bool any = node.op == Op::input && follows(static_cast<Input>(node.index));
    for (int i = 0; i < node.operand_count(); ++i) {
      any = any || all[static_cast<size_t>(node.operands[static_cast<size_t>(i)])];
    }
    all[static_cast<size_t>(id)] = any;
  }
  return all;
}
// Returns true for inputs that may differ between the scores of a row (of_score), or between the rows of a head (q).
bool of_score(Input input) { return input == Input::score || input == Input::k; }
bool of_row_or_score(Input input) { return of_score(input) || input == Input::q; }
bool of_score_or_row(Input input) { return input == Input::score || input == Input::q; }
bool of_key(Input input) { return input == Input::k; }

// Returns true for loads and operations of more than two instructions.
bool is_costly(Op op) {
  return op == Op::gather || (op >= Op::exp && op <= Op::sqrt) || op == Op::divide || op == Op::floor_divide ||
         op == Op::modulo;
}

bool contains(const std::vector<NodeId>& nodes, NodeId id) {
  return std::find(nodes.begin(), nodes.end(), id) != nodes.end();
}

std::vector<NodeId> all_of(const Held& held) {
  std::vector<NodeId> all = held.rows;
  all.insert(all.end(), held.keys.begin(), held.keys.end());
  return all;
}

// Returns the costly nodes that do not vary, and that the result or a varying node needs.
std::vector<NodeId> held_where(const Mod& mod, NodeId result, const std::vector<bool>& varies,
                               const std::vector<bool>& excluded, size_t most) {
  std::vector<bool> costs(static_cast<size_t>(mod.graph.size()));
  std::vector<NodeId> held;
  const auto hold = [&](NodeId id) {
    const auto at = static_cast<size_t>(id);
    const bool ours = !varies[at] && costs[at] && (excluded.empty() || !excluded[at]);
    if (ours && !contains(held, id) && held.size() < most) held.push_back(id);
  };
  for (const NodeId id : mod.graph.needed_by({&result, 1})) {
    const Node& node = mod.graph[id];
    bool any = is_costly(node.op);
    for (int i = 0; i < node.operand_count(); ++i) {
      const NodeId operand = node.operands[static_cast<size_t>(i)];
      any = any || costs[static_cast<size_t>(operand)];
      if (varies[static_cast<size_t>(id)]) hold(operand);
    }
    costs[static_cast<size_t>(id)] = any;
  }
  hold(result);
  return held;
}

std::string line_of(const Node& node, NodeId id, const std::string& value) {
  return str_cat("  const ", node.type == Type::real ? "float" : "int", " v", id, " = ", value, ";\n");
}

std::string function_of(const char* prefix, const Mod& mod, const Node& node) {
  // ~ of a bool is `not`.
  if (node.op == Op::flip && mod.graph[node.operands[0]].type == Type::boolean) return str_cat(prefix, "not(");
  return str_cat(prefix, score_mod::name_of(node.op), "(");
}

// Prints the operands after the name of a function. A leaf that is not a call has none.
std::string operands_of_call(const Node& node, bool is_leaf) {
  std::string text;
  const int count = node.operand_count();
  for (int i = 0; i < count; ++i) {
    text += str_cat(is_leaf || i > 0 ? ", v" : "v", node.operands[static_cast<size_t>(i)]);
  }
  return text + (!is_leaf || node.op == Op::gather ? ")" : "");
}

}  // namespace

std::string print_values(const Mod& mod, std::span<const NodeId> results, const Held& held) {
  constexpr const char* kPrefix = "mod_";
  const std::vector<bool> varies = following(mod.graph, of_row_or_score);
  const std::vector<NodeId> all_held = all_of(held);
  std::string text;
  for (const NodeId id : mod.graph.needed_by(results, all_held)) {
    const Node& node = mod.graph[id];
    if (contains(all_held, id)) {
      text += line_of(node, id, str_cat(contains(held.rows, id) ? "row.v" : "key.v", id));
      continue;
    }
    const bool is_leaf = operands_of(node.op) == 0;
    std::string function = is_leaf ? leaf(kPrefix, mod, node) : function_of(kPrefix, mod, node);
    if (node.op == Op::divide && !varies[static_cast<size_t>(node.operands[1])]) function = "mod_divide_by(";
    text += line_of(node, id, function + operands_of_call(node, is_leaf));
  }
  return text;
}

std::string print(const Mod& mod, NodeId result, const Held& held) {
  return str_cat(print_values(mod, {&result, 1}, held), "  return v", result, ";\n");
}

std::vector<NodeId> held_by_rows(const Mod& mod, NodeId result, size_t most) {
  return held_where(mod, result, following(mod.graph, of_score), {}, most);
}

std::vector<NodeId> held_by_keys(const Mod& mod, NodeId result, size_t most) {
  std::vector<bool> other = following(mod.graph, of_key);
  other.flip();  // a value that all keys share belongs to the rows
  return held_where(mod, result, following(mod.graph, of_score_or_row), other, most);
}

bool is_light(const Mod& mod, NodeId result) {
  constexpr int kMax = 24;
  const std::vector<bool> varies = following(mod.graph, of_score);
  int operations = 0;
  for (const NodeId id : mod.graph.needed_by({&result, 1})) {
    const Op op = mod.graph[id].op;
    if (!varies[static_cast<size_t>(id)] || op == Op::input) continue;
    if (op == Op::gather || ++operations > kMax) return false;
  }
  return true;
}

int operations_of_mask(const Mod& mod, const Held& held) {
  const std::vector<NodeId> known = all_of(held);
  int operations = 0;
  for (const NodeId id : mod.graph.needed_by({&mod.result, 1}, known)) {
    const Op op = mod.graph[id].op;
    if (contains(known, id) || op == Op::constant || op == Op::input || op == Op::scalar) continue;
    operations += is_costly(op) ? kCostlyOperations : 1;
  }
  return operations;
}

std::string print_touch(const Mod& mod, NodeId gather) {
  const Node& node = mod.graph[gather];
  return str_cat("  ", read("mod_touch", mod, static_cast<size_t>(node.index)), operands_of_call(node, true), ";\n");
}

std::string print_range_values(const Mod& mod, std::span<const NodeId> results) {
  constexpr const char* kPrefix = "range_";
  std::string text;
  for (const NodeId id : mod.graph.needed_by(results)) {
    const Node& node = mod.graph[id];
    const bool is_leaf = operands_of(node.op) == 0;
    std::string value =
        str_cat(is_leaf ? leaf(kPrefix, mod, node) : function_of(kPrefix, mod, node), operands_of_call(node, is_leaf));
    if (node.op == Op::constant || node.op == Op::scalar) value = str_cat("range_of(", value, ")");
    text += str_cat("  const ", node.type == Type::real ? "FloatRange" : "IntRange", " v", id, " = ", value, ";\n");
  }
  return text;
}

std::string print_ranges(const Mod& mod, NodeId result) {
  return str_cat(print_range_values(mod, {&result, 1}), "  return v", result, ";\n");
}

}  // namespace tandem::score_mod
