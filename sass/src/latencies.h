// How long what one instruction starts takes, in clocks: the figures of the timing model, each with where it is from.
#pragma once

#include <string_view>

#include "sass/src/units.h"

namespace tandem::machine_code {

// An instruction beside products whose sums are in registers.
struct Beside {
  double reads = 0;                       // of registers, as the ports count them
  double unit = 0, unit_beside_left = 0;  // clocks more of its unit, by where the product's left operand is
  double warp = 0;                        // clocks until its warp can issue another one
};

struct Latencies {
  std::string_view arch;

  // From an instruction's issue until the scoreboard that it sets is released.
  double exponential = 0, shared = 0, memory = 0, uniform = 0, control = 0;
  double tensor_load = 0;   // LDTM, besides its bytes
  double tensor_store = 0;  // STTM

  // Synchronisation.
  double look = 0;           // a look at an mbarrier that has been completed
  double arrival = 0;        // from the last arrival until a warp that waits goes on
  double remote = 0;         // more, where it arrives at another block's barrier
  double named_barrier = 0;  // from the last warp until all go on

  // Products. The end of the last one until a wait for them, or their commit's arrival, is over.
  double products_in_registers = 0;
  double left_in_tensor_memory = 0, left_in_shared_memory = 0, by_a_pair = 0;
  // From the issue of a product in registers until an idle tensor core begins, by where its left operand is.
  double start_from_shared = 0, start_from_registers = 0;
  // The register file's ports: reads in a clock, of which a product takes one and its left operand some in all; how
  // many it can have left over before it misses them.
  double port_reads = 2, left_reads = 0, spare_reads = 0;
  Beside fma, alu, exponentials;  // alu: conversions too

  // Copies into shared memory.
  double copy = 0, copy_bytes = 1;  // latency; bytes a clock of a multiprocessor

  // The whole card. Beyond 0.57 of the tensor core's rate its power lowers the clock.
  double megahertz = 0, megahertz_lost = 0;
  double tile_bytes = 1;  // bytes a clock of a tile's queries and result, which no step hides
};

// Nothing where no figures are known.
const Latencies* latencies_of(std::string_view arch);

}  // namespace tandem::machine_code
