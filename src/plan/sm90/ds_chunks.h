// The division of dS into chunks, of which one is in memory at a time, in a Hopper backward with ds_gmem.
#pragma once

#include <cstdint>

#include "config/sm90_backward.h"
#include "plan/sm90/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// A chunk has `heads` query heads, counted over the batch, with all of their n_blocks, or `n_blocks` of one head.
struct DsChunks {
  int64_t heads = 0;  // 0: no division keeps dS within its budget
  int64_t n_blocks = 0;
  int64_t row_n_blocks = 0;  // n_blocks that a row of dS has space for
  int64_t bytes = 0;         // bytes of one chunk
  int64_t tile_heads = 1;    // query heads of a group that one tile iterates over
  bool pack_triangle = false;

  int64_t count(int64_t all_heads, int64_t all_n_blocks) const;
};

DsChunks choose_ds_chunks(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning);

// Returns the maximum number of partial sums of dq that one m_block has over these n_blocks. With a window the sums
// begin at its first n_block.
int64_t count_dq_accums(int64_t n_blocks, int64_t row_n_blocks, const Sm90BackwardConfig& config);

// Returns the CTAs of the kernel that computes dq of one chunk.
int64_t count_dq_ctas(const DsChunks& chunks, int64_t m_blocks, const Sm90BackwardConfig& config);

}  // namespace tandem::plan
