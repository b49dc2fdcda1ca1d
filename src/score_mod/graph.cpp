#include "score_mod/graph.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "score_mod/simplify.h"

namespace tandem::score_mod {
namespace {

struct OpEntry {
  const char* name;
  int operands;
};

constexpr OpEntry kEntries[] = {
    {"constant", 0},     {"input", 0},      {"scalar", 0},      {"gather", 0},   {"negate", 1},     {"abs", 1},
    {"sign", 1},         {"flip", 1},       {"floor", 1},       {"ceil", 1},     {"trunc", 1},      {"round", 1},
    {"exp", 1},          {"exp2", 1},       {"expm1", 1},       {"log", 1},      {"log2", 1},       {"log1p", 1},
    {"sin", 1},          {"cos", 1},        {"erf", 1},         {"tanh", 1},     {"sigmoid", 1},    {"sqrt", 1},
    {"to_real", 1},      {"to_int", 1},     {"add", 2},         {"subtract", 2}, {"multiply", 2},   {"divide", 2},
    {"floor_divide", 2}, {"modulo", 2},     {"min", 2},         {"max", 2},      {"bit_and", 2},    {"bit_or", 2},
    {"bit_xor", 2},      {"shift_left", 2}, {"shift_right", 2}, {"less", 2},     {"less_equal", 2}, {"equal", 2},
    {"not_equal", 2},    {"select", 3},     {"clamp", 3}};
static_assert(std::size(kEntries) == kOps);

Type result_type(Op op, Type operand, Type second) {
  switch (op) {
    case Op::less:
    case Op::less_equal:
    case Op::equal:
    case Op::not_equal: return Type::boolean;
    case Op::to_int: return Type::integer;
    case Op::to_real: return Type::real;
    case Op::select: return second;
    default: return operand;
  }
}

}  // namespace

const char* name_of(Type type) {
  switch (type) {
    case Type::boolean: return "bool";
    case Type::integer: return "int";
    case Type::real: return "float";
  }
  return "unknown";
}

const char* name_of(Input input) {
  constexpr const char* names[kInputs] = {"score", "batch", "head", "q", "k", "seqlen_q", "seqlen_k"};
  return names[static_cast<int>(input)];
}

const char* name_of(Op op) { return kEntries[static_cast<int>(op)].name; }
int operands_of(Op op) { return kEntries[static_cast<int>(op)].operands; }

size_t Graph::Hash::operator()(const Node& node) const {
  uint64_t hash =
      static_cast<uint64_t>(node.op) << 24 | static_cast<uint64_t>(node.type) << 16 | static_cast<uint16_t>(node.index);
  const auto mix = [&hash](uint64_t word) { hash = (std::rotl(hash, 23) ^ word) * 0x9E3779B97F4A7C15u; };
  for (const NodeId operand : node.operands) mix(static_cast<uint32_t>(operand));
  mix(std::bit_cast<uint64_t>(node.value));
  return static_cast<size_t>(hash ^ hash >> 32);
}

bool Graph::Equal::operator()(const Node& a, const Node& b) const {
  // Values are compared by their bits, so that 0 differs from -0 and a NaN equals itself.
  return a.op == b.op && a.type == b.type && a.index == b.index && a.operands == b.operands &&
         std::bit_cast<uint64_t>(a.value) == std::bit_cast<uint64_t>(b.value);
}

NodeId Graph::intern(const Node& node) {
  const auto [at, is_new] = ids_.try_emplace(node, static_cast<NodeId>(nodes_.size()));
  if (is_new) nodes_.push_back(node);
  return at->second;
}

NodeId Graph::constant(Type type, double value) { return intern({.op = Op::constant, .type = type, .value = value}); }

NodeId Graph::input(Input input) {
  return intern({.op = Op::input, .type = type_of(input), .index = static_cast<int16_t>(input)});
}

NodeId Graph::scalar(int index, Type type) {
  return intern({.op = Op::scalar, .type = type, .index = static_cast<int16_t>(index)});
}

NodeId Graph::gather(int tensor, Type type, std::span<const NodeId> indices) {
  Node node{.op = Op::gather, .type = type, .index = static_cast<int16_t>(tensor)};
  std::copy(indices.begin(), indices.end(), node.operands.begin());
  return intern(node);
}

NodeId Graph::make(Op op, NodeId a, NodeId b, NodeId c) {
  Node node{.op = op, .operands = {a, b, c, kNoNode}};
  node.type = result_type(op, (*this)[a].type, b == kNoNode ? Type::real : (*this)[b].type);
  const NodeId known = Simplifier(*this).simplify(node);
  return known != kNoNode ? known : intern(node);
}

NodeId Graph::convert(NodeId a, Type type) {
  const Type from = (*this)[a].type;
  if (from == type) return a;
  if (type == Type::real) return make(Op::to_real, a);
  return type == Type::integer ? make(Op::to_int, a) : make(Op::not_equal, a, constant(from, 0));
}

std::vector<NodeId> Graph::needed_by(std::span<const NodeId> outputs, std::span<const NodeId> known) const {
  std::vector<bool> needed(nodes_.size());
  for (const NodeId output : outputs) needed[static_cast<size_t>(output)] = true;
  std::vector<NodeId> nodes;
  for (NodeId id = size() - 1; id >= 0; --id) {
    if (!needed[static_cast<size_t>(id)]) continue;
    nodes.push_back(id);
    if (std::find(known.begin(), known.end(), id) != known.end()) continue;
    for (const NodeId operand : (*this)[id].operands) {
      if (operand != kNoNode) needed[static_cast<size_t>(operand)] = true;
    }
  }
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

}  // namespace tandem::score_mod
