// The figures of the timing model: latencies in clocks. sass/docs/clocks.md names the source of each figure.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "sass/src/units.h"

namespace tandem::machine_code {

// An instruction that runs next to products whose sums are in registers.
struct Beside {
  double reads = 0;                       // register reads, as counted by the ports
  double unit = 0, unit_beside_left = 0;  // extra clocks of the unit, by place of the left operand
  double warp = 0;                        // clocks until its warp can issue the next instruction
};

// Waits on the way of results to memory and to the other block of a pair.
enum class Charge : uint8_t {
  bulk,         // a copy or addition to global memory
  gpu_fence,    // MEMBAR at GPU scope after writes to global memory
  idle_fence,   // MEMBAR at GPU scope without writes since the last one
  cta_fence,    // MEMBAR at CTA scope
  async_fence,  // FENCE.VIEW.ASYNC
  invalidate,   // CCTL.IVALL: end of an acquire
  strong_load,  // LDG.STRONG: a test of a semaphore
  dsmem,        // a copy to the shared memory of the other block
};
inline constexpr size_t kCharges = 8;
std::string_view name_of(Charge charge);

struct ChargedWait {
  double clocks = 0;
  double bytes = 0;  // per clock of an SM; 0: the clocks do not depend on bytes
};

struct Latencies {
  std::string_view arch;

  // The clocks from the issue of an instruction until the release of its scoreboard.
  double exponential = 0, shared = 0, memory = 0, uniform = 0, control = 0;
  double tensor_load = 0;   // LDTM, in addition to its bytes
  double tensor_store = 0;  // STTM

  // Synchronisation.
  double look = 0;           // test of an mbarrier whose phase is complete
  double arrival = 0;        // last arrival until a waiting warp continues
  double remote = 0;         // extra clocks of an arrival at another block's barrier
  double named_barrier = 0;  // last warp until all warps continue

  // Products: clocks from the end of the last product until a wait for it, or the arrival of its commit, is complete.
  double products_in_registers = 0;
  double left_in_tensor_memory = 0, left_in_shared_memory = 0, by_a_pair = 0;
  // Clocks from the issue of a product in registers until an idle tensor core begins, by the place of its left operand.
  double start_from_shared = 0, start_from_registers = 0;
  // Ports of the register file: reads per clock. A product takes one, and its left operand takes left_reads in all. Up
  // to spare_reads unused reads carry over.
  double port_reads = 2, left_reads = 0, spare_reads = 0;
  Beside fma, alu, exponentials;  // alu includes conversions

  // Copies into shared memory.
  double copy = 0, copy_bytes = 1;  // latency; bytes per clock of an SM

  std::array<ChargedWait, kCharges> charges;
  const ChargedWait& charge(Charge which) const { return charges[static_cast<size_t>(which)]; }
  // Returns the figures with this charge multiplied by a factor.
  Latencies with(Charge which, double factor) const;

  // The whole GPU: power lowers the clock if the tensor core is busy for more than 0.57 of the time.
  double megahertz = 0, megahertz_lost = 0;
  double tile_bytes = 1;  // bytes per clock for q and out of a tile, not overlapped
};

// Returns null if no figures are known.
const Latencies* latencies_of(std::string_view arch);

}  // namespace tandem::machine_code
