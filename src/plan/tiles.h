// How a Hopper forward kernel is cut, by head_dim, length and mask: measured (docs/lab/hopper-forward.md), not derived.
// This table is all that tuning for another card changes.
#pragma once

#include <cstdint>

#include "shared/forward.h"

namespace tandem::plan {

enum class Mask : uint8_t { any, full, bounded, left };  // bounded: causal or a window; left: a window
enum class Scores : uint8_t { any, plain };              // plain: scaled products, nothing added

// Serves what has these sizes at most, and at least so many rows and keys.
struct TileChoice {
  int head_dim, head_dim_v;
  int64_t rows, keys;  // of one sequence; rows of the query heads that are taken together
  Mask mask;
  Scores scores;
  int warpgroups, step, stages;  // step: keys of one
  bool turns;

  constexpr bool serves(int dim, int dim_v, int64_t of_rows, int64_t of_keys, bool left, bool right, bool plain) const {
    if (dim > head_dim || dim_v > head_dim_v || of_rows < rows || of_keys < keys) return false;
    if (scores == Scores::plain && !plain) return false;
    switch (mask) {
      case Mask::any: return true;
      case Mask::full: return !left && !right;
      case Mask::bounded: return left || right;
      case Mask::left: return left;
    }
    return false;
  }
};

// The first that serves a problem is taken.
inline constexpr TileChoice kHopperTiles[] = {
    {64, 64, 129, 0, Mask::full, Scores::plain, 4, 64, 2, true},
    {64, 64, 129, 0, Mask::bounded, Scores::plain, 4, 64, 3, true},
    {64, 64, 0, 0, Mask::any, Scores::plain, 2, 128, 2, true},
    {64, 64, 0, 0, Mask::any, Scores::any, 2, 96, 2, false},
    {128, 128, 0, 0, Mask::any, Scores::plain, 2, 128, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::any, 2, 64, 2, true},
    {192, 128, 129, 24576, Mask::full, Scores::plain, 3, 64, 2, true},
    {192, 128, 0, 513, Mask::full, Scores::plain, 2, 96, 2, true},
    {192, 128, 0, 0, Mask::full, Scores::plain, 2, 128, 2, false},
    {192, 128, 0, 2048, Mask::bounded, Scores::plain, 2, 96, 2, true},
    {192, 128, 0, 512, Mask::bounded, Scores::plain, 2, 64, 3, true},
    {192, 128, 0, 0, Mask::bounded, Scores::plain, 2, 96, 2, true},
    {192, 192, 0, 0, Mask::any, Scores::plain, 2, 64, 2, true},
    {256, 256, 0, 0, Mask::any, Scores::plain, 2, 64, 2, true},
    {256, 256, 0, 0, Mask::any, Scores::any, 2, 32, 2, true},
};

// Heads whose tiles are taken together under a mask, for 16384 keys; falls as the square root of the keys and of the
// query heads that share a tile, and is twice that at head_dim 64. More of them share the L2 cache, fewer balance
// worse: measured.
inline constexpr double kHeadsTogether = 8;
// Of ragged sequences, whose tiles are listed for all of them: tiles per SM.
inline constexpr double kWavesTogether = 6;

constexpr ForwardTile tile_of(const TileChoice& c, int head_dim, int head_dim_v) {
  return {.head_dim = head_dim,
          .head_dim_v = head_dim_v,
          .warpgroups = c.warpgroups,
          .keys = c.step,
          .stages = c.stages,
          .turns = c.turns};
}

// A computing thread's registers hold scores, result, probabilities and perhaps the queries, beside some 30 to 40 for
// everything else.
constexpr bool fits(const ForwardTile& t) {
  const int queries = t.queries_in_registers() ? t.head_dim / 4 : 0;
  const int registers = t.keys / 2 + t.head_dim_v / 2 + t.keys / 4 + queries;
  return t.shared_bytes() <= ForwardTile::kMostShared && registers <= t.registers() - (t.registers() > 160 ? 40 : 28);
}
constexpr bool all_fit() {
  for (const TileChoice& c : kHopperTiles) {
    if (!fits(tile_of(c, c.head_dim, c.head_dim_v))) return false;
  }
  return true;
}
static_assert(all_fit(), "a tile of the table needs more shared memory or registers than there are");

}  // namespace tandem::plan
