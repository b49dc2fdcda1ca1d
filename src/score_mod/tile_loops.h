// Each operation as a loop over the elements of a tile, compiled once for each instruction set.
#pragma once

#include "score_mod/op.h"
#include "score_mod/tensor_view.h"

namespace tandem::score_mod {

inline constexpr int kTile = 256;  // elements; all operands fit in the L1 cache

// Arrays of float or int32_t. A bool is the int 0 or 1. `to` must not overlap another array.
struct LoopArguments {
  int count;  // elements, at most kTile
  void* to;
  const void* from[kMaxRank];
  const TensorView* tensor;  // operand of a gather
};

using Loop = void (*)(const LoopArguments&);

struct TileLoops {
  const char* name;          // the instruction set
  Loop loops[kOps][kTypes];  // per type of the last operand; null: unsupported type
  Loop gathers[kElements];
};

// Returns the loops for this machine.
const TileLoops& tile_loops();

}  // namespace tandem::score_mod
