// The kernels that forwards of a server can choose.
#pragma once

#include <vector>

#include "base/status.h"
#include "gpu/device.h"
#include "plan/plan.h"
#include "plan/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// Returns ok, or the reason why the forwards of a server cannot have these options: a bias or block lists have lengths.
Status check_serving(const Problem& problem);

// Returns each kernel once that make_plan() chooses for a forward with these options and at most these lengths: batch,
// seqlen_q, total_q and seqlen_k. The function plans a grid of lengths, which takes less than a second.
std::vector<PlannedKernel> serving_kernels(const Problem& most, const gpu::Properties& device,
                                           const Tuning& tuning = kTuning);

}  // namespace tandem::plan
