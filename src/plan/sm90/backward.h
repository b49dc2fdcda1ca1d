// The choice of a Hopper backward kernel.
#pragma once

#include "plan/backward_schedule.h"
#include "plan/sm90/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// Sets the kernel and m_splits.
void select_sm90_backward(const Problem& p, const Sm90BackwardTuning& tuning, BackwardSchedule* schedule);
void set_sm90_ds_chunks(const Problem& p, const Sm90BackwardTuning& tuning, BackwardSchedule* schedule);

}  // namespace tandem::plan
