// When each warp of a block issues what it executes: a multiprocessor, or the two of a pair, event by event.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "sass/src/latencies.h"
#include "sass/src/trace.h"

namespace tandem::machine_code {

// Why an instruction was not issued earlier.
enum class Delay : uint8_t {
  order,     // the instruction before it, and the stall count behind that
  turn,      // other warps of its scheduler issued
  unit,      // its unit was busy
  latency,   // what it needs was still on its way: a register from memory, a result of the exponential unit
  products,  // the tensor core
  copies,    // copies into shared memory
  barrier,   // another warp's arrival
};
inline constexpr size_t kDelays = 7;
std::string_view name_of(Delay delay);

// What an event waited for: an event of a warp, or a product.
struct Cause {
  Delay delay = Delay::order;
  int warp = -1;
  size_t event = 0;
  int product = -1;
};

struct Issue {
  double time = 0;
  double ready = 0;  // when the warp could have issued it
  Cause cause;       // of that
  Delay busy{};      // what kept it from then on: a unit, the products' queue, or other warps
  int product = -1;  // the last one of that queue
};

struct Product {
  int warp = 0;
  size_t event = 0;
  int multiprocessor = 0;
  double issue = 0, start = 0, finish = 0, flops = 0;
  int before = -1;  // in the queue of the same tensor core
};

struct Simulation {
  std::vector<WarpTrace> warps;
  std::vector<std::vector<Issue>> issues;  // of each warp's events, as far as the run went
  std::vector<Product> products;
  int assumed = 0;  // arrivals that nobody was seen to make, taken for granted when all waited
  int unknown = 0;  // waits at addresses that are not known, taken as over

  double time_of_turn(size_t warp, size_t turn) const;  // its first instruction's issue; -1: not reached
};

// apart: clocks between the second turns of warps that compute and share a scheduler: whether they stay in step.
Simulation simulate(const Kernel& kernel, std::vector<WarpTrace> warps, const Rates& rates, const Latencies& latencies,
                    double apart = 0);

// ---- What a run says of a step ----

struct RoleClocks {
  Role role{};
  int block = 0, warps = 0;
  double issued = 0;                     // instructions of a warp in a step
  std::array<double, kDelays> delays{};  // clocks of a warp in a step, by what it waited for; their sum is the step
};

struct Link {
  std::string what;   // "softmax: exponential unit"
  double clocks = 0;  // of a step
};

struct Clocks {
  double step = 0;          // clocks from one turn of the warps that compute to the next
  double flops = 0;         // of products in a step, of one multiprocessor
  double tensor_share = 0;  // of the step in which the tensor core works
  double prologue = 0;      // from the start until those warps' first step
  std::vector<RoleClocks> roles;
  std::vector<Link> chain;  // the chain of waits that the step consists of, the largest part first
};

Clocks clocks_of(const Simulation& run, const Kernel& kernel);

}  // namespace tandem::machine_code
