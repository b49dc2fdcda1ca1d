// The choice of a Hopper forward kernel.
#pragma once

#include "config/sm90_forward.h"
#include "plan/forward_time.h"
#include "plan/sm90/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

ForwardTimes forward_times_of(const Sm90ForwardConfig& config);

// pack_gqa: query heads whose rows share a tile.
Sm90ForwardConfig select_sm90_forward(const Problem& p, int pack_gqa, const Sm90Tuning& tuning);

}  // namespace tandem::plan
