// Division and rounding of sizes.
#pragma once

#include <cstdint>

namespace tandem::plan {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

}  // namespace tandem::plan
