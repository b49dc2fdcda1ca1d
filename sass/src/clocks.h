// The time at which each warp of a block issues each instruction, on one SM or on the two SMs of a pair.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sass/src/latencies.h"
#include "sass/src/trace.h"

namespace tandem::machine_code {

// The reason why an instruction was not issued earlier.
enum class Delay : uint8_t {
  order,     // the previous instruction and its stall count
  turn,      // other warps of the event's scheduler issued
  unit,      // the event's unit was busy
  latency,   // an operand was outstanding: memory or exponential unit
  products,  // the tensor core
  copies,    // copies into shared memory
  barrier,   // another warp's arrival
  fences,    // fences, and additions to global memory
};
inline constexpr size_t kDelays = 8;
std::string_view name_of(Delay delay);

// The event that another event waited for: an event of a warp, or a product.
struct Cause {
  Delay delay = Delay::order;
  int warp = -1;
  size_t event = 0;
  int product = -1;
};

struct Issue {
  double time = 0;
  double ready = 0;  // earliest time at which the warp could issue this event
  Cause cause;       // why the instruction was not ready earlier
  Delay busy{};      // further delay by a unit, the product queue or warps
  int product = -1;  // the last product in that queue
};

struct Product {
  int warp = 0;
  size_t event = 0;
  int multiprocessor = 0;
  double issue = 0, start = 0, finish = 0, flops = 0;
  int before = -1;  // previous product in the queue of the same tensor core
};

// A charge, and the event that it belongs to.
struct ChargedEvent {
  int warp = 0;
  size_t event = 0;
  Charge charge{};
  double clocks = 0;
};

// The release of a semaphore after additions to global memory.
struct Publication {
  int warp = 0;
  double begin = 0, end = 0;  // issue of the first addition; the release is complete
};

struct Simulation {
  Simulation(std::vector<WarpTrace> traces = {}) : warps(std::move(traces)) {}

  std::vector<WarpTrace> warps;
  std::vector<std::vector<Issue>> issues;  // per warp: its events up to the end of the run
  std::vector<Product> products;
  std::vector<ChargedEvent> charged;
  std::vector<Publication> published;
  int recurring = 0;   // assumed arrivals from the fifth turn of a loop on
  int assumed = 0;     // missing arrivals that were assumed when all warps waited
  int unknown = 0;     // waits at unknown addresses, assumed to be over
  int unanswered = 0;  // waits in loops for arrivals of no warp of the run

  double time_of_turn(size_t warp, size_t turn) const;  // issue of its first instruction; -1: not reached
};

// offset: clocks between the second turns of computing warps that share a scheduler. The offset decides if the warps
// stay in step.
Simulation simulate(const Kernel& kernel, std::vector<WarpTrace> warps, const Rates& rates, const Latencies& latencies,
                    double offset = 0);

// ---- Statistics of a step ----

struct RoleClocks {
  Role role{};
  int block = 0, warps = 0;
  double issued = 0;                     // instructions of a warp per step
  std::array<double, kDelays> delays{};  // clocks of a warp by cause; the sum is the step
};

struct Link {
  std::string what;   // "softmax: exponential unit"
  double clocks = 0;  // part of a step
};

// A charge in a step of a role, summed over the instructions of a warp.
struct ChargeOfRole {
  Role role{};
  Charge charge{};
  double times = 0, clocks = 0;
};

// The way of dq to memory, if the warps that stage and add dq wait for no other warp. hand_over: clocks from the first
// addition of a step until its semaphore is released; 0: the code releases none.
struct DqPath {
  double step = 0, hand_over = 0;
};

struct Clocks {
  double step = 0;          // clocks between two turns of the computing warps
  double flops = 0;         // products of one SM per step
  double tensor_share = 0;  // fraction of the step in which the tensor core works
  double prologue = 0;      // clocks from the start until their first step
  std::vector<RoleClocks> roles;
  std::vector<Link> chain;  // critical path of the step, largest part first
  std::vector<ChargeOfRole> charges;
};

Clocks clocks_of(const Simulation& run, const Kernel& kernel);

// Runs only the warps that stage and add dq. The result is empty if no warp adds dq.
std::optional<DqPath> dq_path_of(const Kernel& kernel, const std::vector<WarpTrace>& warps, const Rates& rates,
                                 const Latencies& latencies);

}  // namespace tandem::machine_code
