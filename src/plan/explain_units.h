// The common part of the lower bounds of forward and backward: rates of units, and amounts of work.
#pragma once

#include <string>
#include <vector>

#include "plan/explain.h"
#include "plan/forward.h"

namespace tandem::plan {

inline constexpr double kSharedPerClock = 128;  // per SM
inline constexpr double kElement = 2;           // bytes
// Twice the rate from compute capability 10.3 (B300) on.
inline double exp_per_clock(const gpu::Properties& device) {
  return device.compute_major == 10 && device.compute_minor >= 3 ? 32 : 16;
}
inline double flops_per_clock(const gpu::Properties& device) { return device.compute_major == 10 ? 8192 : 4096; }

// Rows of all sequences, keys of all sequences; visible pairs of all heads.
struct TileWork {
  double rows, keys, pairs;
};
TileWork work_of(const Problem& problem);

const char* what_binds(const Floor& floor);

std::vector<std::string> forward_reasons(const Problem& problem, const Plan& plan, const gpu::Properties& device);
std::vector<std::string> backward_reasons(const Problem& problem, const Plan& plan, const gpu::Properties& device);

}  // namespace tandem::plan
