// The path that a warp most likely takes through one turn of a loop, according to the code alone.
//
// At a branch the warp
//   - avoids the side that waits: a loop that polls a barrier, a sleep, a call or a trap;
//   - executes the exponentials (eight or more) of scores instead of clearing eight registers;
//   - masks (eight or more selects) if a masked path is requested; else it avoids the mask, or a step with one;
//   - decides as at another branch with the same predicate: about a mask, or where the sides of a vote differ most;
//   - avoids the only side with exponentials, else the longer side, if a vote (an exception) or a barrier test decides;
//   - avoids rescaling: sixteen or more multiplications that are half of a side without a matrix product;
//   - else takes the longer side, so that no count is too small.
// Branches out of the loop are not taken, and inner loops make one turn. Predicated instructions count as issued.
#pragma once

#include <cstdint>
#include <vector>

#include "sass/src/graph.h"

namespace tandem::machine_code {

// The instructions of the path as indices, in the order of execution.
std::vector<int32_t> likely_path(const std::vector<Instruction>& code, const Graph& graph, const Loop& loop,
                                 bool through_masks);

// Returns all instructions of the loop.
std::vector<int32_t> whole_loop(const Graph& graph, const Loop& loop);

// The number of instructions that select one of two values by a predicate, as masks do.
int selects_in(const std::vector<Instruction>& code, const std::vector<int32_t>& path);

}  // namespace tandem::machine_code
