// The bias of a rank's call and its gradient: (1, heads or 1, the rank's queries, positions of keys in a document).
//
// A step reads the rows of its queries and the columns of its keys. Each element of the gradient belongs to at most one
// step, so that steps write their parts of the gradient directly. A sum over heads is the only sum.
#pragma once

#include "context_parallel/plan.h"
#include "context_parallel/rows.h"
#include "context_parallel/shard_call.h"

namespace tandem::context_parallel {

// The part of a step whose first query is row `q_row` of the shard. An absent view stays absent.
BiasView bias_part(const BiasView& bias, const ContextStep& step, int64_t q_row);

// The rows of a bias, of which each has a column for each key.
View rows_of(const BiasView& bias);
RowShape shape_of(const BiasView& bias);
// Returns the bias with these rows.
BiasView bias_over(const View& rows, const RowShape& shape);

// The gradient of a bias. With chunks and a bias of all heads each step has one gradient a head. These are summed in
// the order of the heads, as the execution by heads sums them.
class BiasGradient {
 public:
  explicit BiasGradient(const ShardCall& call) : call_(call), to_(call.problem.dbias) {}

  Status clear();  // columns without a step are 0
  // Sets the output dbias of a step's problem. After the call of the engine, add() adds it to the gradient.
  Status bind(const ContextStep& step, int64_t q_row, Problem* p);
  Status add(const ContextStep& step, int64_t q_row);

 private:
  bool sums_heads() const;

  const ShardCall& call_;
  BiasView to_;
  RowBuffer heads_;  // the present step
};

// Adds the gradients of all heads of `parts`, in order, to a sum of one head.
Status add_heads(const RowEngine& engine, const View& parts, const View& sum, const RowShape& shape);

}  // namespace tandem::context_parallel
