// Rules of the virtual GPU, and findings about a kernel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::vgpu {

// vgpu/docs/virtual-gpu-rules.md has the basis of each rule and a minimal kernel that breaks it.
enum class Rule : uint8_t {
  // Memory.
  data_race,            // two accesses, one a write, nothing orders them
  relaxed_hand_over,    // only relaxed operations order the accesses
  narrow_release,       // the arrival releases to its own block only
  missing_proxy_fence,  // no fence between generic and async proxy
  missing_wait,         // an asynchronous operation may still use the memory
  out_of_bounds,
  misaligned,
  uninitialised,  // reads memory that nothing has written
  wrong_space,    // an address outside every window
  // Rules of registers and warps.
  pending_register,    // a register of an outstanding matrix product is used
  pending_load,        // tcgen05.ld's result is read before its wait
  divergent_aligned,   // .aligned or warpgroup-wide, but threads are missing
  exited_lanes,        // .aligned, but lanes of the warp have exited
  register_budget,     // setmaxnreg beyond what the block has
  uneven_registers,    // setmaxnreg that the warps of a warpgroup do not all execute
  unwritten_register,  // a register is read, but never written
  shuffle_lane,        // reads a lane that is not in the mask, or has exited
  // Barriers.
  wrong_parity,        // waits for a phase two completions ago
  over_arrival,        // more arrivals or bytes than the phase expects
  invalid_barrier,     // not initialised, invalidated or overwritten
  barrier_count,       // named barrier: counts differ, or are no multiple of 32
  ignored_wait,        // a try_wait or test_wait whose result is unused
  missing_init_fence,  // the init of a signalled barrier may be invisible
  deadlock,
  endless_loop,  // more instructions than the run allows
  // Rules of asynchronous operations.
  missing_wgmma_fence,
  late_wgmma_write,    // registers written after the wgmma.fence
  invalid_descriptor,  // fields out of range, unsupported layouts
  invalid_shape,       // shape, type or size that the target lacks
  invalid_tensor_map,
  uncommitted,      // work that no commit or wait ever covered
  live_at_exit,     // exit with operations outstanding or memory in use
  unstarted_peer,   // accesses a block that may not have begun
  unwaited_commit,  // an earlier commit than the awaited one may still arrive
  unwaited_store,   // exit while a bulk store may read shared memory
  // Rules of tensor memory.
  tmem_unallocated,
  tmem_quadrant,  // a warp outside its 32 lanes
  tmem_leak,
  mixed_cta_group,
  missing_tcgen05_fence,
  pending_store,  // accesses cells of the warp's own outstanding tcgen05.st
  // Rules of the launch.
  device_limit,  // exceeds a limit of the device
  trap,
  count
};
std::string_view name_of(Rule rule);    // "data-race"
std::string_view advice_of(Rule rule);  // one sentence: the remedy

// The severity of a finding.
enum class Grade : uint8_t {
  error,      // an allowed schedule gives another result, or hangs
  spec_only,  // not promised by PTX, but true on all known hardware
};
Grade grade_of(Rule rule);
std::string_view name_of(Grade grade);  // "error", "letter"

// An access or event, as precisely as it is known.
struct Accessor {
  int32_t cta = -1;  // linear in the grid
  int32_t warp = -1, lane = -1;
  int32_t instruction = -1;  // index in the program
  std::string what = {};     // "wgmma reads", "thread writes"
};

// Repetitions at one line are one finding, which describes the first occurrence.
struct Finding {
  Rule rule = Rule::trap;
  Accessor party;
  Accessor other;                    // instruction -1: no other party
  std::string subject;               // the address by symbol, "shared k[2] + 0x1200 (0x14a00)"
  std::string message;               // one sentence: the event
  uint64_t times = 1;                // the violation happened
  uint64_t places = 0, warps = 0;    // numbers of addresses and warps; 0: unknown
  std::vector<int32_t> others = {};  // instructions of the other party at other lines
};

}  // namespace tandem::vgpu
