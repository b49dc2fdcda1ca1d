// The instructions that each warp of a block executes, from the start of the kernel through some turns of its loop. The
// trace has the loop of each warp, and the barrier, bytes and product of each instruction.
//
// A warp follows the branches that its thread index decides. If a branch depends on lengths or tiles, the warp takes
// the shortest path to its loop. Within the loop the warp takes the likely path (likely_path.h). sass/docs/clocks.md
// lists the known errors.
#pragma once

#include <cstdint>
#include <vector>

#include "sass/src/cost_model.h"
#include "sass/src/sass.h"

namespace tandem::machine_code {

struct Event {
  static constexpr uint32_t kUnknown = ~0u;
  int32_t instruction = 0;
  uint32_t barrier = kUnknown;  // address (bits 24 and up: CTA in the cluster), or named index
  uint32_t amount = kUnknown;   // wait: parity; arrival: bytes; named: threads; product: idesc
};

struct WarpTrace {
  Role role{};
  int block = 0;  // block of a pair
  int warp = 0;   // warp of its block
  std::vector<Event> events;
  std::vector<size_t> turns;  // start of each turn, and the end of the last
};

// The passes of a backward over its tiles. The first has dS and dQ; the second exists if a kernel computes scores
// twice.
enum class Pass { first, second };
bool has_second_pass(const CostModel& cost_model);

// Traces one block, or both blocks of a pair. cost_model decides which loops are steady.
std::vector<WarpTrace> trace(const Kernel& kernel, const CostModel& cost_model, int turns, Pass pass = Pass::first);

}  // namespace tandem::machine_code
