// A plan in words and figures: why it is so, and the least that any kernel would take. For `tandem explain`; no part of
// a call.
#pragma once

#include <string>
#include <vector>

#include "gpu/device.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace tandem::plan {

// Query-key pairs of one head that a dense problem computes: those that causal and window show.
double visible_pairs(int64_t seqlen_q, int64_t seqlen_k, int64_t diagonal, int64_t window_left, int64_t window_right);

// What each unit of the device has to do at least, spread over all SMs.
struct Floor {
  double pairs = 0, flops = 0;
  // A clock of an SM does 4096 FLOP (Blackwell: 8192), 16 exponentials, 128 bytes of shared memory.
  double mma_clocks = 0, exp_clocks = 0, shared_clocks = 0;
  double l2_bytes = 0, hbm_bytes = 0;
  const char* binds = "";  // the unit with the most clocks: "tensor core", "exponential", "shared memory"
  bool at_bounds = false;  // packed and used lengths, which only the device knows, are taken at their bounds
};
Floor forward_floor(const Problem& problem, const Plan& plan, const gpu::Properties& device);
Floor backward_floor(const Problem& problem, const Plan& plan, const gpu::Properties& device);
Floor floor_of(const Problem& problem, const Plan& plan, const gpu::Properties& device);  // of the problem's pass

// Short sentences, one per choice, of the problem's pass: "tile: ...".
std::vector<std::string> reasons(const Problem& problem, const Plan& plan, const gpu::Properties& device);

// What is put on the stream, in this order: "delta: 64 blocks of 256 threads".
std::vector<std::string> launches(const Plan& plan);

}  // namespace tandem::plan
