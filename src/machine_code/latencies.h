// How long what one instruction starts takes, in clocks: the figures of the timing model, each with where it is from.
#pragma once

#include <string_view>

#include "machine_code/units.h"

namespace tandem::machine_code {

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
  double registers_beside = 1;  // clocks that an instruction takes of the register file while products use it

  // Copies into shared memory.
  double copy = 0, copy_bytes = 1;  // latency; bytes a clock of a multiprocessor

  // The whole card. Beyond 0.6 of the tensor core's rate its power lowers the clock.
  double megahertz = 0, megahertz_lost = 0;
  double tile_bytes = 1;  // bytes a clock of a tile's queries and result, which no step hides
};

// Nothing where no figures are known.
const Latencies* latencies_of(std::string_view arch);

}  // namespace tandem::machine_code
