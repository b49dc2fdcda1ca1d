// The heads of each rank when ranks exchange tokens for heads (all-to-all).
#pragma once

#include <cstdint>

#include "base/fixed_vector.h"

namespace tandem::context_parallel {

// The query heads [q_begin, q_end) and their key heads [k_begin, k_end): a valid call with grouped heads.
struct HeadRun {
  int64_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
};

// Returns the heads of a rank as the fewest calls. Query heads are divided evenly, up to one head. Ranks that divide
// the group of a key head all hold this key head, so that there may be more ranks than key heads. heads_q is a multiple
// of heads_k; ranks beyond heads_q have no heads.
FixedVector<HeadRun, 3> head_runs(int64_t heads_q, int64_t heads_k, int32_t ranks, int32_t rank);

}  // namespace tandem::context_parallel
