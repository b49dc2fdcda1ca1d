// The division of dS into chunks, of which one is in memory at a time, in a Hopper backward with ds_gmem.
#pragma once

#include <cstdint>

#include "config/sm90_backward.h"
#include "plan/backward_schedule.h"
#include "plan/sm90/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// The division of dS; `heads` is 0 if none keeps dS within its budget.
ChunkSizes choose_ds_chunk(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning);

// Returns the maximum number of partial sums of dq that one m_block has over these n_blocks. With a window the sums
// begin at its first n_block.
int64_t count_dq_accums(int64_t n_blocks, const ChunkSizes& chunk, const Sm90BackwardConfig& config);

// CTAs of the kernel that computes dq of one chunk.
int64_t count_dq_ctas(const ChunkSizes& chunk, int64_t m_blocks, const Sm90BackwardConfig& config);

}  // namespace tandem::plan
