// The observer for traces: it records one block of a launch, or the blocks of a cluster.
//
// Steps are counted, not measured: an instruction of a warp is one step, and a wait ends at the step of its event.
// Units process copies and products in order, at the rates of Costs. Rows show concurrency and waits, not durations on
// a chip.
#pragma once

#include <memory>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/observer/observer.h"
#include "vgpu/src/trace/timeline.h"

namespace tandem::vgpu {

// Costs in steps, about as many as clocks of a Hopper.
struct Costs {
  int64_t copy_bytes = 64;     // a step
  int64_t tensor_bytes = 512;  // bytes of tensor memory, loaded or stored, a step
  int64_t copy_latency = 500;  // until waiters see a copy
  int64_t products = 2048;     // multiplications and additions of matrix products, a step
  int64_t local_latency = 30;  // steps of tensor memory loads and stores, and of cp.async
};

class Recorder : public Observer {
 public:
  // block: the first recorded block, linear in the grid.
  static std::unique_ptr<Recorder> create(const LaunchDescription& launch, int32_t block, const Costs& costs = {},
                                          int32_t blocks = 1);
  // Call this function after the launch has ended, while its program lives.
  virtual Timeline timeline() const = 0;
};

}  // namespace tandem::vgpu
