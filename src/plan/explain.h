// Describes a plan: the reason for each choice, and a lower bound of the time of any kernel. Only `tandem explain` uses
// this code.
#pragma once

#include <string>
#include <vector>

#include "gpu/device.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace tandem::plan {

// Returns the number of query-key pairs of one head that a dense problem computes under causal masks and windows.
double visible_pairs(int64_t seqlen_q, int64_t seqlen_k, int64_t diagonal, int64_t window_left, int64_t window_right);

// The minimum work of each unit of the device, spread over all SMs.
struct Floor {
  double pairs = 0, flops = 0;
  // Clocks of an SM at the rates of its architecture: ArchPlanner::flops_per_clock(), exp_per_clock().
  double mma_clocks = 0, exp_clocks = 0, shared_clocks = 0;
  double l2_bytes = 0, hbm_bytes = 0;
  const char* binds = "";  // the unit with the most clocks: "tensor core", ...
  bool at_bounds = false;  // lengths known only on the device count as their bounds
};
Floor forward_floor(const Problem& problem, const Plan& plan, const gpu::Properties& device);
Floor backward_floor(const Problem& problem, const Plan& plan, const gpu::Properties& device);
// Returns the lower bound for the problem's pass.
Floor floor_of(const Problem& problem, const Plan& plan, const gpu::Properties& device);

// Returns short sentences, one per choice of the problem's pass, such as "tile: ...".
std::vector<std::string> reasons(const Problem& problem, const Plan& plan, const gpu::Properties& device);

// Returns the launches on the stream in order, such as "delta: 64 blocks of 256 threads".
std::vector<std::string> launches(const Plan& plan);

}  // namespace tandem::plan
