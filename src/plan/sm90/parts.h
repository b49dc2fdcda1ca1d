// The parts that a Hopper backward divides its sums into.
#pragma once

#include "config/sm90_backward.h"
#include "plan/sm90/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// m_splits: CTAs that share an n_block's iterations. dq_splits: separate sums of dq.
// unsplit_tiles: the first n_blocks, to which m_splits does not apply.
struct RsParts {
  int64_t m_splits = 1, dq_splits = 1, unsplit_tiles = 0;
  int64_t part_n_blocks = 0, head_parts = 1;  // DiagonalParts; 0: others
  bool wraps = false;                         // WrappedIterations
};

// Replaces the parts by DiagonalParts if their predicted time is less.
void consider_diagonal_parts(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning,
                             RsParts* parts);

// Returns the parts with the least predicted time, without spt.
RsParts choose_rs_parts(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning);

// Returns true if n_blocks may begin at different iterations.
bool may_wrap(const Problem& p, const Sm90BackwardConfig& config);

// Returns true if a causal mask hides few keys, because there are many more keys than queries.
bool has_many_full_n_blocks(const Problem& p);

}  // namespace tandem::plan
