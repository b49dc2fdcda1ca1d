// What an operation is known to give before it is computed. Only what changes no result in any precision, NaN,
// infinities and signs of zero included: x + 0 is not x (of -0), x * 0 is not 0 (of NaN), x - x of floats is not 0.
#pragma once

#include "score_mod/graph.h"

namespace tandem::score_mod {

class Simplifier {
 public:
  explicit Simplifier(Graph& graph) : graph_(graph) {}

  // A node that gives the same as this one would; kNoNode: none is known, and the node may have had its operands put
  // into the order in which equal nodes are found.
  NodeId simplify(Node& node);

 private:
  NodeId fold(const Node& node);
  void order_operands(Node& node) const;

  // Each for the operations of its name; kNoNode where it has no rule.
  NodeId one_operand(const Node& node);
  NodeId two_operands(const Node& node);
  NodeId with_itself(const Node& node);
  NodeId real_by_constant(const Node& node, double constant);
  NodeId integer_by_constant(const Node& node, int32_t constant);
  NodeId boolean_by_constant(const Node& node, bool constant);
  NodeId select(const Node& node);

  // The node is an op of which part is an operand.
  bool joins(NodeId id, Op op, NodeId part) const;
  const Node& at(NodeId id) const { return graph_[id]; }
  NodeId flip(NodeId id) { return graph_.make(Op::flip, id); }

  Graph& graph_;
};

}  // namespace tandem::score_mod
