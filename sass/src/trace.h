// What each warp of a block executes, from the kernel's start through some turns of the loop that is its role's: which
// warps run which loop, and which barriers, bytes and products each instruction is about.
//
// A warp goes where its thread's number says. Where that is not enough (lengths, tiles) it takes the shortest way to
// its loop, and within the loop the likely one (path.h). sass/docs/clocks.md says where this is not what a kernel does.
#pragma once

#include <cstdint>
#include <vector>

#include "sass/src/cost_model.h"
#include "sass/src/sass.h"

namespace tandem::machine_code {

struct Event {
  static constexpr uint32_t kUnknown = ~0u;
  int32_t instruction = 0;
  uint32_t barrier = kUnknown;  // address, of a cluster's block in bits 24 and up; number of a named one
  uint32_t amount =
      kUnknown;  // of a wait its parity, of an arrival bytes, of a named barrier threads, of a product idesc
};

struct WarpTrace {
  Role role{};
  int block = 0;  // of a pair
  int warp = 0;   // of its block
  std::vector<Event> events;
  std::vector<size_t> turns;  // where each begins; the last one's end
};

// Of one block, or of both of a pair. The account tells which loops are steady.
std::vector<WarpTrace> trace(const Kernel& kernel, const CostModel& cost_model, int turns);

}  // namespace tandem::machine_code
