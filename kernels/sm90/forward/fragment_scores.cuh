// Score mods and masks on the fragments of a warpgroup.
#pragma once
#include "sm90/forward/shared_plan.cuh"
#include "tile/block_mask.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/mask.cuh"
#include "tile/score_mod.cuh"

// Scores from products: in log2 units, or with a score_mod not.
template <Sm90ForwardConfig T, int n>
TANDEM_DEVICE void apply_score_mod(float (&s)[n], const ForwardParams& p, const TileCoords& t, const Row (&rows)[2],
                                   const HeldRow<T> (&held)[2], int column0) {
  if constexpr (T.softcap) apply_softcap<false>(s, p);
  const ScoreMod<T, T.score_mod> mods[2] = {{p, t, rows[0], held[0]}, {p, t, rows[1], held[1]}};
#pragma unroll
  for (int r = 0; r < n; ++r) s[r] = mods[row_of(r)](s[r], p, column0, column_of(r));
}

// Which scores of a step a block mask shows, a bit each; full steps need none. Made while the scores are multiplied: so
// a text has the registers of a few scores beside it, whatever the tile. Its copies are few, since each is the whole
// text. first: key of the step; steps: left, with this one.
template <Sm90ForwardConfig T>
constexpr int kShownNumbers = (T.tile_n / 2 + 31) / 32;
template <Sm90ForwardConfig T>
TANDEM_DEVICE void ask_block_mask(u32 (&shown)[kShownNumbers<T>], const MaskShared<T>& s, const ForwardParams& p,
                                  const TileCoords& t, const Row (&rows)[2], int first, StepState state, int steps) {
  if (state == StepState::full) return;
#pragma unroll
  for (int i = 0; i < kShownNumbers<T>; ++i) shown[i] = 0;
  if constexpr (T.asks_mask()) {
    if (state != StepState::partial) return;
    const MaskMod<T> mods[2] = {{t, rows[0]}, {t, rows[1]}};
    const int row0 = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, pair0 = threadIdx.x & 3;
    const MaskRow<T> held[2] = {s.rows[row0], s.rows[row0 + 8]};
#pragma unroll
    for (int i = 0; i < kShownNumbers<T>; ++i) {
      const int end = min(32, T.tile_n / 2 - 32 * i);
#pragma unroll 2
      for (int r = 0; r < end; r += 4) {
        const auto pair = s.keys[steps & 1][pair0 + 32 * i + r];
        const int column = first + 2 * pair0 + column_of(32 * i) + column_of(r);
        u32 four = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          four |= u32{mods[row_of(j)](p, held[row_of(j)], pair.keys[j & 1], column + column_of(j))} << j;
        shown[i] |= four << r;
      }
    }
  }
}
// Hides what a block mask hides in an n_block.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void apply_block_mask(float (&s)[T.tile_n / 2], const u32 (&shown)[kShownNumbers<T>], StepState state) {
  if (state == StepState::full) return;
#pragma unroll
  for (int r = 0; r < T.tile_n / 2; ++r) s[r] = shown[r / 32] >> r % 32 & 1 ? s[r] : -kInfinity;
}

// Hides what lies beyond the keys or outside the window.
template <Sm90ForwardConfig T, int n>
TANDEM_DEVICE void apply_mask(float (&s)[n], const ForwardParams& p, const TileCoords& t, const Row (&rows)[2],
                              int column0) {
  const KeyRange keys[2] = {visible_keys<T>(p, t, rows[0]), visible_keys<T>(p, t, rows[1])};
  const u32 count[2] = {static_cast<u32>(max(0, keys[0].end - keys[0].begin)),
                        static_cast<u32>(max(0, keys[1].end - keys[1].begin))};
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int i = row_of(r), column = column0 + column_of(r);
    if (T.left ? static_cast<u32>(column - keys[i].begin) >= count[i] : column >= keys[i].end) s[r] = -kInfinity;
  }
}
