// The common part of the lower bounds of forward and backward: rates of units, and amounts of work.
#pragma once

#include <string>
#include <vector>

#include "plan/explain.h"
#include "plan/forward.h"

namespace tandem::plan {

inline constexpr double kSharedPerClock = 128;     // per SM
inline constexpr double kElement = 2, kFloat = 4;  // bytes

// Returns a text such as "3 stages of queries and 2 of dout in shared memory, ".
std::string explain_stages(int q_stages, int dout_stages);

// Rows and keys of all sequences; visible pairs of all heads.
struct TileWork {
  double rows, keys, pairs;
};
TileWork work_of(const Problem& problem);

const char* what_binds(const Floor& floor);

std::vector<std::string> forward_reasons(const Problem& problem, const Plan& plan, const gpu::Properties& device);
std::vector<std::string> backward_reasons(const Problem& problem, const Plan& plan, const gpu::Properties& device);

}  // namespace tandem::plan
