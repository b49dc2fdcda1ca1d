#include "mods/program.h"

#include <mutex>
#include <string>
#include <unordered_map>

#include "base/text.h"
#include "mods/print.h"

namespace tandem::mods {
namespace {

constexpr size_t kMostKept = 256;  // texts; a process that has more of them reads some again

Gradient gradient_of(Mod& mod) {
  if (mod.signature.result == Signature::Result::mask) return {.score = mod.graph.real(0), .captured = {}};
  return differentiate(mod.graph, mod.result);
}

// Texts and names have no zero bytes in them: those are refused.
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
    if (programs_.size() >= kMostKept) programs_.clear();
    programs_.insert_or_assign(key, std::move(program));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Program>> programs_;
};

// Never destroyed: threads of the process may call until its end.
Kept& kept() {
  static Kept& all = *new Kept;
  return all;
}

std::vector<Capture> captures_of(const Graph& graph, const Gradient& gradient) {
  std::vector<Capture> captures;
  for (const Derivative& derivative : gradient.captured) {
    const Node& read = graph[derivative.with_respect_to];
    if (read.op != Op::gather) continue;
    Capture capture{.tensor = read.index, .rank = read.operand_count(), .derivative = derivative.value};
    for (size_t i = 0; i < kMaxRank; ++i) capture.indices[i] = read.operands[i];
    captures.push_back(capture);
  }
  return captures;
}

std::string functions_of(const Mod& mod, NodeId slope) {
  const auto function = [&mod](const char* head, NodeId result) {
    return str_cat("template <auto T>\nTANDEM_DEVICE ", head, "const ModPlace& at, const ModNames& names) {\n",
                   print(mod, result), "}\n");
  };
  if (mod.signature.result == Signature::Result::mask) return function("bool mask_mod(", mod.result);
  return function("float score_mod(float score, ", mod.result) + function("float score_slope(float score, ", slope);
}

// FNV-1a.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash != 0 ? hash : 1;
}

std::vector<NodeId> outputs_of(const std::vector<Capture>& captures) {
  std::vector<NodeId> outputs;
  for (const Capture& capture : captures) {
    outputs.push_back(capture.derivative);
    outputs.insert(outputs.end(), capture.indices, capture.indices + capture.rank);
  }
  return outputs;
}

}  // namespace

Program::Program(Mod read)
    : mod(std::move(read)),
      gradient(gradient_of(mod)),
      captures(captures_of(mod.graph, gradient)),
      capturing(outputs_of(captures)),
      result_tiles(mod.graph, {mod.result}),
      slope_tiles(mod.graph, {gradient.score}),
      capture_tiles(mod.graph, capturing),
      cuda(functions_of(mod, gradient.score)),
      cuda_hash(hash_of(cuda)) {}

Status read_program(std::string_view text, const Signature& signature, std::shared_ptr<const Program>* program) {
  const std::string key = key_of(text, signature);
  if ((*program = kept().find(key)) != nullptr) return {};
  Mod mod;
  TANDEM_TRY(parse(text, signature, &mod));
  *program = std::make_shared<const Program>(std::move(mod));
  kept().add(key, *program);
  return {};
}

}  // namespace tandem::mods
