// An expression as a graph. Each node is an operation on earlier nodes. No two nodes are equal, so that repeated
// subexpressions are computed once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "score_mod/op.h"

namespace tandem::score_mod {

using NodeId = int32_t;
inline constexpr NodeId kNoNode = -1;

struct Node {
  Op op = Op::constant;
  Type type = Type::real;
  int16_t index = 0;
  std::array<NodeId, kMaxRank> operands = {kNoNode, kNoNode, kNoNode, kNoNode};
  double value = 0;  // exact for every int; a bool is 0 or 1

  int operand_count() const {
    int n = 0;
    while (n < kMaxRank && operands[static_cast<size_t>(n)] != kNoNode) ++n;
    return n;
  }
};

class Graph {
 public:
  NodeId constant(Type type, double value);
  NodeId real(double value) { return constant(Type::real, value); }
  NodeId boolean(bool value) { return constant(Type::boolean, value); }
  NodeId input(Input input);
  NodeId scalar(int index, Type type);
  NodeId gather(int tensor, Type type, std::span<const NodeId> indices);

  // Operands must have the types that the operation accepts. The result may be an older node that is equal for all
  // values of the operands (simplify.h).
  NodeId make(Op op, NodeId a, NodeId b = kNoNode, NodeId c = kNoNode);
  NodeId convert(NodeId a, Type type);  // to_real, to_int, or a != 0

  const Node& operator[](NodeId id) const { return nodes_[static_cast<size_t>(id)]; }
  int size() const { return static_cast<int>(nodes_.size()); }

  bool is_constant(NodeId id, double value) const {  // zeros of both signs are equal
    return (*this)[id].op == Op::constant && (*this)[id].value == value;
  }
  bool is_constant(NodeId id) const { return (*this)[id].op == Op::constant; }

  // The nodes that the outputs need, each after its operands. Operands of known nodes are omitted.
  std::vector<NodeId> needed_by(std::span<const NodeId> outputs, std::span<const NodeId> known = {}) const;

 private:
  friend class Simplifier;
  NodeId intern(const Node& node);  // the existing equal node, or a new node

  struct Hash {
    size_t operator()(const Node& node) const;
  };
  struct Equal {
    bool operator()(const Node& a, const Node& b) const;
  };
  std::vector<Node> nodes_;
  std::unordered_map<Node, NodeId, Hash, Equal> ids_;
};

}  // namespace tandem::score_mod
