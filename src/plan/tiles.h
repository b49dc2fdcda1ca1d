// How a Hopper forward kernel is cut, by head_dim, length and mask: measured (docs/lab/hopper-forward.md), not derived.
// This table is all that tuning for another card changes. Of light scores it is modelled (docs/lab/mods.md).
#pragma once

#include <cstdint>

#include "plan/fields.h"
#include "shared/sm90_forward.h"

namespace tandem::plan {

enum class Mask : uint8_t { any, full, bounded, left };  // bounded: causal or a window; left: a window
// plain: scaled products, nothing added. capped: by a softcap, perhaps with ALiBi. light: plain ones, or those that a
// short text alone changes. bias: to which it alone is added.
enum class Scores : uint8_t { any, bias, light, plain, capped };

// Serves what has these sizes at most, and at least so many rows and keys.
struct Sm90Choice {
  int head_dim, head_dim_v;
  int64_t rows, keys;  // of one sequence; rows of the query heads that are taken together
  Mask mask;
  Scores scores;
  int warpgroups, tile_n, stages;  // tile_n: keys of an n_block
  bool pingpong;

  // A configuration that is cut so, and else as it was.
  constexpr Sm90ForwardConfig cut(Sm90ForwardConfig t) const {
    t.warpgroups = warpgroups;
    t.tile_n = tile_n;
    t.stages = stages;
    t.pingpong = pingpong;
    return t;
  }
  constexpr bool serves(int dim, int dim_v, int64_t of_rows, int64_t of_keys, bool left, bool right, Scores of) const {
    if (dim > head_dim || dim_v > head_dim_v || of_rows < rows || of_keys < keys || !serves(of)) return false;
    switch (mask) {
      case Mask::any: return true;
      case Mask::full: return !left && !right;
      case Mask::bounded: return left || right;
      case Mask::left: return left;
    }
    return false;
  }
  constexpr bool serves(Scores of) const {
    const bool has_few = of == Scores::plain || of == Scores::capped;  // registers of their own
    return scores == Scores::any || of == scores || (has_few && (scores == Scores::light || scores == Scores::plain));
  }
};

// The first that serves a problem is taken.
inline constexpr Sm90Choice kSm90Choices[] = {
    {64, 64, 129, 0, Mask::full, Scores::plain, 4, 64, 2, true},
    {64, 64, 129, 0, Mask::bounded, Scores::plain, 4, 64, 3, true},
    {64, 64, 0, 0, Mask::any, Scores::plain, 2, 128, 2, true},
    {64, 64, 129, 0, Mask::any, Scores::light, 4, 64, 2, true},
    {64, 64, 129, 0, Mask::any, Scores::bias, 4, 64, 2, true},
    {64, 64, 0, 0, Mask::any, Scores::any, 2, 96, 2, false},
    {128, 128, 129, 0, Mask::any, Scores::capped, 3, 80, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::plain, 2, 128, 2, true},
    {128, 128, 129, 0, Mask::any, Scores::light, 3, 64, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::bias, 2, 112, 2, true},
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

// The same with a block mask, whose blocks' keys must be a multiple of tile_n: it may be halved twice, down to
// kLeastBlockKeys. A mask_mod may be asked beside any scores. Modelled, not measured.
inline constexpr Sm90Choice kSm90BlockChoices[] = {
    {64, 64, 0, 0, Mask::any, Scores::any, 2, 128, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::light, 2, 128, 2, true},
    {192, 128, 0, 0, Mask::any, Scores::any, 2, 64, 2, true},
    {256, 256, 0, 0, Mask::any, Scores::any, 2, 32, 2, true},
};
inline constexpr int64_t kLeastBlockKeys = 32;

// Heads whose tiles are taken together under a mask, for 16384 keys; falls as the square root of the keys and of the
// query heads that share a tile, and is twice that at head_dim 64. More of them share the L2 cache, fewer balance
// worse: measured.
inline constexpr double kL2Heads = 8;
// Heads that share a bias, without a mask. Of 132 tiles at once so many times fewer are of one head: the bias is read
// as many times less often from memory, keys and values more often. Not measured.
inline constexpr double kL2BiasHeads = 8;
// CTAs of a cluster among which TMA spreads a bias that they share. Four leave multiprocessors idle, and are slower.
inline constexpr int kBiasCtas = 2;
// Among which it spreads keys and values beside a bias that each has for itself: 1 or 2.
inline constexpr int kBiasKvCtas = 2;
// Of varlen sequences, whose tiles are listed for all of them: tiles per SM.
inline constexpr double kL2Waves = 6;

constexpr Sm90ForwardConfig tile_of(const Sm90Choice& c, int head_dim, int head_dim_v) {
  return c.cut({.head_dim = head_dim, .head_dim_v = head_dim_v});
}

// A computing thread's registers hold scores, result, probabilities and perhaps the queries, beside some 30 to 40 for
// everything else.
constexpr bool fits(const Sm90ForwardConfig& t) {
  const int queries = t.q_in_registers() ? t.head_dim / 4 : 0;
  const int registers = t.tile_n / 2 + t.head_dim_v / 2 + t.tile_n / 4 + queries;
  return t.smem_bytes() <= Sm90ForwardConfig::kMaxSmemBytes &&
         registers <= t.registers() - (t.registers() > 160 ? 40 : 28);
}
constexpr bool all_fit() {
  for (const Sm90Choice& c : kSm90Choices) {
    Sm90ForwardConfig t = tile_of(c, c.head_dim, c.head_dim_v);
    if (c.serves(Scores::bias)) t.bias = Bias::f32, t.bias_ctas = kBiasCtas;
    if (!fits(t) || !is_valid(t)) return false;
  }
  for (const Sm90Choice& c : kSm90BlockChoices) {
    const Sm90ForwardConfig t = tile_of(c, c.head_dim, c.head_dim_v);
    if (!fits(t) || !is_valid(t)) return false;
  }
  return true;
}
static_assert(
    all_fit(),
    "a tile of the table needs more shared memory or registers than there are, or plan/fields.h does not know it");

}  // namespace tandem::plan
