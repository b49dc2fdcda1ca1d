// The choice of a Hopper backward kernel.
#pragma once

#include "plan/backward_schedule.h"
#include "plan/sm90/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// Sets the kernel, m_splits and, for a kernel with ds_gmem, the chunk.
void select_sm90_backward(const Problem& p, const Sm90BackwardTuning& tuning, BackwardSchedule* schedule);
// Sets the members that follow from the chunk.
void set_sm90_ds_chunks(const Problem& p, BackwardSchedule* schedule);

}  // namespace tandem::plan
