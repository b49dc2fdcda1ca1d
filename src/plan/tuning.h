// Every tuned constant of a plan, of all architectures. A test passes other values, so that small problems take the
// paths that only large problems take otherwise.
#pragma once

#include "base/env.h"
#include "plan/sm100/tuning.h"
#include "plan/sm90/tuning.h"

namespace tandem::plan {

struct Tuning {
  Sm90Tuning sm90;
  Sm100Tuning sm100;
};
inline constexpr Tuning kTuning;

// Returns kTuning with the switches of TANDEM_SM100, which check(env) has accepted.
inline Tuning tuning_of(const Env& env) {
  Tuning tuning;
  const auto has = [&](std::string_view word) { return lists(env.sm100, word); };
  tuning.sm100.switches = {.two_cta = !has("no_two_cta"),
                           .clc = !has("no_clc"),
                           .clc_b300 = has("clc") && !has("no_clc"),
                           .overlap_launches = !has("no_overlap"),
                           .exact_n = has("exact_n"),
                           .wait_products = has("wait_products")};
  return tuning;
}

}  // namespace tandem::plan
