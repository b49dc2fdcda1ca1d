// What a mask gives for all queries and keys of a block, by interval arithmetic (kernels/config/mod_range.h): true,
// false, or not known.
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
  // Both must outlive it. values have been checked.
  RangeEvaluator(const Graph& graph, std::span<const NodeId> outputs, const Values& values);

  void run(const PositionRange& position);

  // Of the run before: the range of an output that is an int or a bool, or that is a float.
  IntRange integers(NodeId output) const { return results_[static_cast<size_t>(output)].integer; }
  FloatRange reals(NodeId output) const { return results_[static_cast<size_t>(output)].real; }

 private:
  struct Range {
    IntRange integer = kAnyInt;
    FloatRange real = kAnyFloat;
  };
  Range leaf(const Node& node, const PositionRange& position) const;
  Range gather(const Node& node) const;
  Range apply(const Node& node) const;

  const Graph& graph_;
  const Values& values_;
  std::vector<NodeId> order_;
  std::vector<Range> results_;  // by node
};

}  // namespace tandem::score_mod
