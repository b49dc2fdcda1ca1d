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

// Returns true if threads copy the problem's pages, because TMA is slow for small pages. TMA serves pages with a bias,
// whose copies occupy loading warps, and tiles of more warpgroups, which have too few registers.
bool gathers_pages(const Problem& p, const Sm90ForwardConfig& t);

}  // namespace tandem::plan
