// What the virtual GPU has against a kernel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::vgpu {

// In the order of vgpu/docs/virtual-gpu.md, which has for each a minimal kernel that breaks it.
enum class Rule : uint8_t {
  // Memory.
  data_race,            // two accesses, one a write, nothing orders them
  relaxed_hand_over,    // ordered, but by relaxed operations only, within a block's shared memory
  narrow_release,       // ordered, but by an arrival at another block that releases to its own block only
  missing_proxy_fence,  // ordinary stores, or loads of what it overwrites, then the async proxy, no fence between
  missing_wait,         // touches what an asynchronous operation may still read or write: no wait covers it
  out_of_bounds,
  misaligned,
  uninitialised,  // reads memory that nothing has written
  wrong_space,    // an address outside every window
  // Registers and warps.
  pending_register,    // a register of a matrix product under way is read or written
  pending_load,        // tcgen05.ld's result is read before its wait
  divergent_aligned,   // .aligned or warpgroup-wide, but not all of its threads are there
  exited_lanes,        // .aligned, but lanes of the warp have exited
  register_budget,     // setmaxnreg beyond what the block has
  uneven_registers,    // setmaxnreg that the warps of a warpgroup do not all execute
  unwritten_register,  // is read, but nobody has written it
  shuffle_lane,        // reads a lane that is not in the mask, or has exited
  // Barriers.
  wrong_parity,        // waits for a phase that passed two completions ago, or was never begun
  over_arrival,        // more arrivals than the phase expects, or bytes beyond the counter
  invalid_barrier,     // no mbarrier here: never initialised, invalidated, overwritten
  barrier_count,       // named barrier: counts differ, or are no multiple of 32
  ignored_wait,        // a try_wait or test_wait whose answer nobody looks at
  missing_init_fence,  // an operation signals a barrier, but nothing makes its init visible to it
  deadlock,
  // Asynchronous operations.
  missing_wgmma_fence,
  late_wgmma_write,    // registers of a product are written behind the wgmma.fence
  invalid_descriptor,  // fields out of range, layouts that the instruction does not have
  invalid_shape,       // shape, type or size that the instruction does not have on this target
  invalid_tensor_map,
  uncommitted,      // work that no commit or wait ever covered
  live_at_exit,     // the thread or block ended with operations under way, or its peers still use its memory
  unstarted_peer,   // reaches for another block of the cluster before anything says that it has begun
  unwaited_commit,  // the block exits with an earlier commit of a peer outstanding than the one that it has waited for
  unwaited_store,   // the thread exits while its bulk store may still read shared memory
  // Tensor memory.
  tmem_unallocated,
  tmem_quadrant,  // a warp outside its 32 lanes
  tmem_leak,
  mixed_cta_group,
  missing_tcgen05_fence,
  pending_store,  // a warp loads or stores where its own tcgen05.st may still be under way
  // The launch.
  device_limit,  // shared memory, registers, threads, cluster beyond the device's
  trap,
  count
};
std::string_view name_of(Rule rule);    // "data-race"
std::string_view advice_of(Rule rule);  // one sentence on what to do

// How much a finding weighs.
enum class Grade : uint8_t {
  error,      // hardware can give another result, or hang, under some schedule that the architecture allows
  spec_only,  // PTX does not promise it, and all hardware that there is does it
};
Grade grade_of(Rule rule);
std::string_view name_of(Grade grade);  // "error", "letter"

// Who did something, as precisely as it is known.
struct Accessor {
  int32_t cta = -1;  // linear in the grid
  int32_t warp = -1, lane = -1;
  int32_t instruction = -1;  // of the program; its source line and name are looked up for the report
  std::string what = {};     // "wgmma reads", "thread writes"
};

// What happens at a line time and again is one finding, the first time in full.
struct Finding {
  Rule rule = Rule::trap;
  Accessor party;
  Accessor other;                  // instruction -1: nobody
  std::string subject;             // the address by symbol: "shared k[2] + 0x1200 (0x14a00)", "barrier q_full, phase 3"
  std::string message;             // one sentence: what happened
  uint64_t times = 1;              // it happened
  uint64_t places = 0, warps = 0;  // different addresses, and warps; 0: there are none to tell
  std::vector<int32_t> others = {};  // instructions at other lines that the other party was at
};

}  // namespace tandem::vgpu
