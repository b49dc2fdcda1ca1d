// Waiting times between the blocks of a backward. Each m_block sums dq in the order of n_blocks so that every run gives
// the same bits. The model plays the plan's order of tiles and iterations with the clocks of one iteration.
#pragma once

#include <optional>

#include "plan/backward_schedule.h"
#include "plan/plan.h"

namespace tandem::tool {

// Clocks outside of an iteration.
struct HandOver {
  double adds = 1800;    // from the turn until the added dq is visible
  double busy = 1800;    // from the turn until the next dq can be added
  double visible = 700;  // until the next n_block has seen the added dq
  double tile = 6000;    // last dq of a tile to the next tile's first iteration
};

struct Waiting {
  int64_t steps = 0;         // sum over all tiles
  double clocks = 0;         // duration of the grid
  double without_turns = 0;  // duration with dq added in any order
  double share() const { return clocks / without_turns - 1; }
};

// Clocks by which an addition of dq to memory lengthens an iteration on Hopper. The model of the machine code assumes
// that additions take no time. Blackwell has no measurement.
double adding_clocks(const plan::BackwardKernel& tile);

// The result is empty unless the problem is dense and its tiles sum dk, dv and dq in the same way. step: clocks of an
// iteration without waiting.
std::optional<Waiting> waiting_of(const Problem& problem, const plan::BackwardSchedule& tiling, double step,
                                  const HandOver& hand_over = {});

}  // namespace tandem::tool
