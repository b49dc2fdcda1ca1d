// The choice of a Blackwell backward kernel.
#pragma once

#include "plan/backward_schedule.h"
#include "plan/sm100/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

Sm100BackwardConfig select_sm100_backward(const Problem& p, const Sm100Tuning& tuning);

// Sets the chunk of dS and the members that follow from it, for a kernel with ds_gmem.
void set_sm100_ds_chunks(const Problem& p, const Sm100BackwardTuning& tuning, BackwardSchedule* schedule);

}  // namespace tandem::plan
