// What the virtual GPU has against a kernel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::vgpu {

// In the order of docs/virtual-gpu.md, which has for each a minimal kernel that breaks it.
enum class Rule : uint8_t {
  // Memory.
  data_race,            // two accesses, one a write, nothing orders them
  missing_proxy_fence,  // written by ordinary stores, read by the async proxy, no fence.proxy.async between
  missing_wait,         // touches what an asynchronous operation may still read or write: no wait covers it
  out_of_bounds,
  misaligned,
  uninitialised,  // reads memory that nothing has written
  wrong_space,    // an address outside every window
  // Registers and warps.
  pending_register,   // a register of a matrix product under way is read or written
  pending_load,       // tcgen05.ld's result is read before its wait (a warning: ptxas orders it)
  divergent_aligned,  // .aligned or warpgroup-wide, but not all of its threads are there
  register_budget,    // setmaxnreg beyond what the block has
  uneven_registers,   // setmaxnreg that the warps of a warpgroup do not all execute (a warning: each has its own)
  // Barriers.
  wrong_parity,     // waits for a phase that passed two completions ago, or was never begun
  over_arrival,     // more arrivals than the phase expects, or bytes beyond the counter
  invalid_barrier,  // no mbarrier here: never initialised, invalidated, overwritten
  barrier_count,    // named barrier: counts differ, or are no multiple of 32
  deadlock,
  // Asynchronous operations.
  missing_wgmma_fence,
  invalid_descriptor,  // fields out of range, layouts that the instruction does not have
  invalid_shape,       // shape, type or size that the instruction does not have on this target
  invalid_tensor_map,
  uncommitted,   // work that no commit or wait ever covered
  live_at_exit,  // the thread or block ended with operations under way, or its peers still use its memory
  // Tensor memory.
  tmem_unallocated,
  tmem_quadrant,  // a warp outside its 32 lanes
  tmem_leak,
  mixed_cta_group,
  missing_tcgen05_fence,  // a warning
  // The launch.
  device_limit,  // shared memory, registers, threads, cluster beyond the device's
  trap,
  count
};
std::string_view name_of(Rule rule);    // "data-race"
std::string_view advice_of(Rule rule);  // one sentence on what to do
bool is_warning(Rule rule);

// Who did something, as precisely as it is known.
struct Party {
  int32_t cta = -1;  // linear in the grid
  int32_t warp = -1, lane = -1;
  int32_t instruction = -1;  // of the program; its source line and name are looked up for the report
  std::string what;          // "wgmma reads", "thread writes"
};

struct Finding {
  Rule rule = Rule::trap;
  Party party;
  Party other;          // instruction -1: nobody
  std::string subject;  // the address by symbol: "shared k[2] + 0x1200 (0x14a00)", "barrier q_full, phase 3"
  std::string message;  // one sentence: what happened
};

}  // namespace tandem::vgpu
