// Reverse-mode differentiation of a score modification: the derivative with respect to the score, to each float scalar
// and to each gather of a float tensor, as further nodes of the same graph.
//
// Kinks and ties have torch's derivatives: abs' is 0 at 0; of equal operands min and max give half to each; clamp gives
// all to its operand within its bounds, bounds included; what rounds has none; modulo's with respect to its divisor is
// -(a // b). What a branch that is not taken would give, infinite or NaN, reaches no derivative.
#pragma once

#include <vector>

#include "score_mod/graph.h"

namespace tandem::score_mod {

struct Derivative {
  NodeId with_respect_to = kNoNode;  // a scalar or a gather
  NodeId value = kNoNode;
};

struct Gradient {
  NodeId score = kNoNode;            // always there: the constant 0 where the result does not depend on the score
  std::vector<Derivative> captured;  // in the order of the nodes; of equal gathers there is one
};

// result: a float.
Gradient differentiate(Graph& graph, NodeId result);

}  // namespace tandem::score_mod
