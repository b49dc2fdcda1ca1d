// Evaluates a mask_mod for all queries and keys of a block by interval arithmetic (kernels/config/mod_range.h): true,
// false, or unknown.
#pragma once

#include <span>
#include <vector>

#include "config/mod_range.h"
#include "score_mod/graph.h"
#include "score_mod/position.h"
#include "score_mod/values.h"

namespace tandem::score_mod {

using PositionRange = PositionOf<IntRange>;

class RangeEvaluator {
 public:
  // Both arguments must outlive the evaluator. The caller has checked values.
  RangeEvaluator(const Graph& graph, std::span<const NodeId> outputs, const Values& values);

  void run(const PositionRange& position);

  // The range of an output in the last run: integers() for an output of type int or bool, reals() for a float.
  IntRange integers(NodeId output) const { return results_[static_cast<size_t>(output)].integer; }
  FloatRange reals(NodeId output) const { return results_[static_cast<size_t>(output)].real; }

 private:
  struct NodeRange {
    IntRange integer = kAnyInt;
    FloatRange real = kAnyFloat;
  };
  NodeRange leaf(const Node& node, const PositionRange& position) const;
  NodeRange gather(const Node& node) const;
  NodeRange apply(const Node& node) const;

  const Graph& graph_;
  const Values& values_;
  std::vector<NodeId> order_;
  std::vector<NodeRange> results_;  // by node
};

}  // namespace tandem::score_mod
