// Reverse-mode differentiation of a score_mod. The derivatives with respect to the score, each float scalar and each
// gather of a float tensor become nodes of the same graph.
//
// Kinks and ties follow torch: abs has derivative 0 at 0, and equal operands of min and max get half each. clamp passes
// the gradient within its bounds, bounds included. Rounding has derivative 0, and modulo has -(a // b) for its divisor.
// A branch that is not taken contributes nothing, even if its derivative is infinite or NaN.
#pragma once

#include <vector>

#include "score_mod/graph.h"

namespace tandem::score_mod {

struct Derivative {
  NodeId with_respect_to = kNoNode;  // a scalar or a gather
  NodeId value = kNoNode;
};

struct Gradient {
  NodeId score = kNoNode;            // the constant 0 if the result does not depend on the score
  std::vector<Derivative> captured;  // in the order of the nodes; equal gathers share one
};

// result: a node of type float.
Gradient differentiate(Graph& graph, NodeId result);

}  // namespace tandem::score_mod
