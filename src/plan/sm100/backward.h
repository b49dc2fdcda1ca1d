// The choice of a Blackwell backward kernel.
#pragma once

#include "config/sm100_backward.h"
#include "plan/sm100/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

Sm100BackwardConfig select_sm100_backward(const Problem& p, const Sm100Tuning& tuning);

}  // namespace tandem::plan
