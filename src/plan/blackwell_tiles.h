// How a Blackwell forward kernel is cut: derived from the clocks that each unit needs (docs/lab/blackwell-forward.md),
// not yet measured. This table is all that tuning changes.
#pragma once

#include "shared/forward.h"

namespace tandem::plan {

// Serves what has these sizes at most. Pairs of exponentials, of 16, that the FMA units take: of bfloat16, whose steps
// do not look for the largest score, and of float16, whose steps do.
struct BlackwellChoice {
  int head_dim, head_dim_v;
  int fma_pairs_bf16, fma_pairs_f16;
};

// The first that serves a problem is taken.
inline constexpr BlackwellChoice kBlackwellTiles[] = {
    {64, 64, 6, 5},
    {128, 128, 4, 3},
    {192, 128, 3, 2},
};

constexpr bool blackwell_tiles_fit() {
  for (const BlackwellChoice& c : kBlackwellTiles) {
    const BlackwellTile t{.head_dim = c.head_dim, .head_dim_v = c.head_dim_v};
    if (!t.ring_suffices() || !t.columns_suffice() || t.shared_bytes() > ForwardTile::kMostShared) return false;
  }
  return true;
}
static_assert(blackwell_tiles_fit(), "a tile of the table needs more shared or tensor memory than there is");

}  // namespace tandem::plan
