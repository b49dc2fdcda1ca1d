// A model of how long the blocks of a backward wait for each other. The dq of each m_block is summed in the order of
// n_blocks, so that every run gives the same bits. The model simulates the plan's order of tiles with clocks of a step.
#pragma once

#include <optional>

#include "plan/backward_schedule.h"
#include "plan/plan.h"

namespace tandem::tool {

// Clocks outside of the steps.
struct HandOver {
  double adds = 1800;  // from the turn until the added dq is visible
  double told = 700;   // until the next n_block has seen that
  double tile = 6000;  // between two tiles: loads of keys, stores of dk and dv
};

struct Waiting {
  int64_t steps = 0;         // all tiles together
  double clocks = 0;         // the whole grid
  double without_turns = 0;  // the same, were dq added in any order
  double share() const { return clocks / without_turns - 1; }
};

// Clocks by which adding dq to memory lengthens a step of Hopper's kernels. The model of the machine code assumes that
// additions finish immediately. Blackwell is not measured.
double adding_clocks(const plan::BackwardKernel& tile);

// For dense problems whose tiles accumulate dk, dv and dq; nothing for other problems. step: clocks without waiting.
std::optional<Waiting> waiting_of(const Problem& problem, const plan::BackwardSchedule& tiling, double step,
                                  const HandOver& hand_over = {});

}  // namespace tandem::tool
