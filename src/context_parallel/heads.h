// The heads of each rank when ranks exchange tokens for heads (all-to-all).
#pragma once

#include <cstdint>

#include "base/fixed_vector.h"
#include "context_parallel/plan.h"
#include "problem/problem.h"

namespace tandem::context_parallel {

// The query heads [q_begin, q_end) and their key heads [k_begin, k_end): a valid call with grouped heads.
struct HeadRun {
  int64_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
};

// Returns the heads of a rank as the fewest calls. Query heads are divided evenly, up to one head. Ranks that divide
// the group of a key head all hold this key head, so that there may be more ranks than key heads. heads_q is a multiple
// of heads_k; ranks beyond heads_q have no heads.
FixedVector<HeadRun, 3> head_runs(int64_t heads_q, int64_t heads_k, int32_t ranks, int32_t rank);

// The heads that a rank computes, as calls with grouped heads.
struct HeadShare {
  FixedVector<HeadRun, 3> runs;

  int64_t q_begin() const { return !runs.empty() ? runs[0].q_begin : 0; }
  int64_t k_begin() const { return !runs.empty() ? runs[0].k_begin : 0; }
  int64_t q_heads() const { return !runs.empty() ? runs[runs.size() - 1].q_end - q_begin() : 0; }
  int64_t k_heads() const { return !runs.empty() ? runs[runs.size() - 1].k_end - k_begin() : 0; }
};

// With chunks a rank has whole groups, because dk and dv sum over the heads of a group inside the engine.
HeadShare share_of(const ContextPlan& plan, int64_t heads_q, int64_t heads_k, int32_t rank);

// Returns a problem with some of its heads, except the sink.
Problem heads_of(Problem p, const HeadRun& run);

}  // namespace tandem::context_parallel
