// Each operation as a loop over the elements of a tile, compiled once for each instruction set.
#pragma once

#include "score_mod/op.h"
#include "score_mod/tensor_view.h"

namespace tandem::score_mod {

inline constexpr int kTile = 256;  // elements at once: what an operation reads and writes stays in the nearest cache

// Arrays of float or int32_t; bools are the ints 0 and 1. to overlaps nothing.
struct LoopArguments {
  int count;  // of elements, at most kTile
  void* to;
  const void* from[kMaxRank];
  const TensorView* tensor;  // of a gather
};

using Loop = void (*)(const LoopArguments&);

struct TileLoops {
  const char* name;          // the instruction set
  Loop loops[kOps][kTypes];  // by the type of the last operand; null where an operation does not take it
  Loop gathers[kElements];
};

// Those for the machine this runs on.
const TileLoops& tile_loops();

}  // namespace tandem::score_mod
