// What a warp executes in one turn of a loop, as far as the code alone tells.
//
// Where a branch gives a choice, the warp goes
//   - past what waits: a side with a loop that polls a barrier, a sleep, a call or a trap;
//   - in a loop over scores through the exponentials (eight or more) that a branch passes over where eight registers
//     are cleared in their place: scores that nobody sees;
//   - in a loop over scores through the mask (eight or more selects) when the masked path is asked for, else past it,
//     and of two steps (eight or more exponentials each) past the one that has a mask in one of its ways;
//   - where a predicate decides that has decided about a mask (elsewhere in the turn), as it did there;
//   - where a vote's predicate decides at several branches, as where the sides differ most;
//   - past the longer side when a vote decides (what any lane needs, all do: an exception) or a look at a barrier (a
//     second look), and before that past the one with exponentials where the other does without;
//   - past what rescales: sixteen or more multiplications that are at least half of a side without matrix product;
//   - else through the longer side, so that the count is no less than what is executed.
// Branches out of the loop are not taken, and loops within it make one turn here. Instructions under a predicate count:
// they are issued all the same.
#pragma once

#include <cstdint>
#include <vector>

#include "sass/src/graph.h"

namespace tandem::machine_code {

// The instructions of the path, by number, in the order of execution.
std::vector<int32_t> likely_path(const std::vector<Instruction>& code, const Graph& graph, const Loop& loop,
                                 bool through_masks);

// All of the loop.
std::vector<int32_t> whole_loop(const Graph& graph, const Loop& loop);

// How many of these choose between a value and another by a predicate, as masks do.
int selects_in(const std::vector<Instruction>& code, const std::vector<int32_t>& path);

}  // namespace tandem::machine_code
