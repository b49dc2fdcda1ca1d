// Every tuned constant of a plan, of all architectures. A test passes other values, so that small problems take the
// paths that only large problems take otherwise.
#pragma once

#include "plan/sm100/tuning.h"
#include "plan/sm90/tuning.h"

namespace tandem::plan {

struct Tuning {
  Sm90Tuning sm90;
  Sm100Tuning sm100;
};
inline constexpr Tuning kTuning;

}  // namespace tandem::plan
