// How a Blackwell forward kernel is cut: derived from the clocks that each unit needs (docs/lab/blackwell-forward.md),
// not yet measured. This table is all that tuning changes.
#pragma once

#include <cstdint>

#include "shared/forward.h"

namespace tandem::plan {

enum class Cluster : uint8_t { one, pair_if_full, pair };  // pair_if_full: where nothing is hidden and rows fill pairs

// Serves what has these sizes at most. Pairs of exponentials, of 16, that the FMA units take: of steps that do not look
// for the largest score (BlackwellTile::unchecked), and of steps that do.
struct BlackwellChoice {
  int head_dim, head_dim_v;
  Cluster cluster;
  int fma_pairs_unchecked, fma_pairs_checked;
};

// The first that serves a problem is taken.
inline constexpr BlackwellChoice kBlackwellTiles[] = {
    {64, 64, Cluster::one, 6, 5},
    {128, 128, Cluster::pair_if_full, 4, 3},
    {192, 128, Cluster::pair_if_full, 3, 2},
    {256, 256, Cluster::pair, 0, 0},
};

constexpr bool blackwell_tiles_fit() {
  for (const BlackwellChoice& c : kBlackwellTiles) {
    for (const bool pair : {false, true}) {
      if (c.cluster == Cluster::pair && !pair) continue;
      const BlackwellTile t{.head_dim = c.head_dim, .head_dim_v = c.head_dim_v, .pair = pair};
      if (!t.fits() || BlackwellTile::shared_bytes() > ForwardTile::kMostShared) return false;
    }
  }
  return true;
}
static_assert(blackwell_tiles_fit(),
              "a tile of the table needs more registers, shared or tensor memory than there are");

}  // namespace tandem::plan
