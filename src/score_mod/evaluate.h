// Evaluates one element, node by node: in float64 for the reference, and in float for tests of the loops over tiles.
#pragma once

#include <span>
#include <vector>

#include "score_mod/arithmetic.h"
#include "score_mod/graph.h"
#include "score_mod/position.h"
#include "score_mod/values.h"

namespace tandem::score_mod {

template <class Real>
class Evaluator {
 public:
  // The graph must outlive the evaluator and may grow.
  Evaluator(const Graph& graph, std::span<const NodeId> outputs);

  // values: the values of the names that the graph was parsed with.
  void run(Real score, const Position& position, const Values& values);

  // The value of an output in the last run.
  const Value<Real>& operator[](NodeId output) const { return results_[static_cast<size_t>(output)]; }

 private:
  Value<Real> leaf(const Node& node, Real score, const Position& position, const Values& values) const;

  const Graph& graph_;
  std::vector<NodeId> order_;
  std::vector<Value<Real>> results_;  // by node
};

extern template class Evaluator<float>;
extern template class Evaluator<double>;

}  // namespace tandem::score_mod
