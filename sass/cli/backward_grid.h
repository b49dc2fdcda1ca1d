// How long the blocks of a backward wait for each other: each m_block's dq is summed in the order of n_blocks, so that
// every run gives the same bits. Modelled: the plan's order of tiles and steps, played with clocks of a step.
#pragma once

#include <optional>

#include "plan/backward_schedule.h"
#include "plan/plan.h"

namespace tandem::tool {

// Clocks of what is not in a step.
struct HandOver {
  double adds = 1800;  // from a step's turn until its dq has been added, as others may see
  double told = 700;   // until the next n_block has seen that
  double tile = 6000;  // from a tile's last dq to the first step of the next: its keys, dk and dv
};

struct Waiting {
  int64_t steps = 0;         // of all tiles
  double clocks = 0;         // of the grid
  double without_turns = 0;  // the same, were dq added in any order
  double share() const { return clocks / without_turns - 1; }
};

// Clocks that adding its dq to memory makes a step of Hopper's kernels longer: the model of the machine code takes
// additions to be over at once. Nothing of Blackwell's has been measured.
double adding_clocks(const plan::BackwardKernel& tile);

// Of dense problems whose tiles sum dk, dv and dq alike; nothing of others. step: clocks, without waiting.
std::optional<Waiting> waiting_of(const Problem& problem, const plan::BackwardSchedule& tiling, double step,
                                  const HandOver& hand_over = {});

}  // namespace tandem::tool
