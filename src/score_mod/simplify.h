// Simplifies operations without changing a result in any precision, including NaN, infinities and signs of zero. For
// example, x + 0 is not x (-0), x * 0 is not 0 (NaN), and x - x is not 0 for floats.
#pragma once

#include "score_mod/graph.h"

namespace tandem::score_mod {

class Simplifier {
 public:
  explicit Simplifier(Graph& graph) : graph_(graph) {}

  // Returns an existing node of equal value, or kNoNode. The function may reorder the operands of the node in the
  // latter case.
  NodeId simplify(Node& node);

 private:
  NodeId fold(const Node& node);
  void order_operands(Node& node) const;

  // The rules for the operations of each name. kNoNode: no rule applies.
  NodeId one_operand(const Node& node);
  NodeId two_operands(const Node& node);
  NodeId with_itself(const Node& node);
  NodeId real_by_constant(const Node& node, double constant);
  NodeId integer_by_constant(const Node& node, int32_t constant);
  NodeId boolean_by_constant(const Node& node, bool constant);
  NodeId select(const Node& node);

  // Returns true if the node is an op with the operand part.
  bool joins(NodeId id, Op op, NodeId part) const;
  const Node& at(NodeId id) const { return graph_[id]; }
  NodeId flip(NodeId id) { return graph_.make(Op::flip, id); }

  Graph& graph_;
};

}  // namespace tandem::score_mod
