// Score mods and masks on the fragments of a warpgroup.
#pragma once
#include "sm90/forward/bias.cuh"
#include "tile/block_mask.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/mask.cuh"
#include "tile/score_mod.cuh"

// Scores from products: in log2 units, or with a score_mod not. What is but a bias is added to products as they are;
// by: 1 / scale.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void apply_score_mod(float (&s)[T.tile_n / 2], const ForwardParams& p, const TileCoords& t,
                                   const Row (&rows)[2], const HeldRow<T> (&held)[2], int column0,
                                   const BiasFragments<T>& bias, float by) {
  if constexpr (T.softcap) apply_softcap<false>(s, p);
  const ScoreMod<T, T.score_mod> mods[2] = {{p, t, rows[0], held[0]}, {p, t, rows[1], held[1]}};
#pragma unroll
  for (int r = 0; r < T.tile_n / 2; r += 2) {
    BiasValue<T> of_bias[2] = {};
    if constexpr (T.bias != Bias::none) bias.load(r, of_bias);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (T.has_score_mod()) {
        s[r + n] = mods[row_of(r)](s[r + n], p, column0, column_of(r + n), of_bias[n]);
      } else {
        s[r + n] = with_bias<T>(s[r + n], of_bias[n], by);
      }
    }
  }
}

// Which scores of a step a block mask shows, a bit each; full steps need none. Made while the scores are multiplied: so
// a text has the registers of a few scores beside it, whatever the tile, and its loads wait under the product. Its
// copies are few, since each is the whole text. first: key of the step.
template <Sm90ForwardConfig T>
constexpr int kShownNumbers = (T.tile_n / 2 + 31) / 32;
template <Sm90ForwardConfig T>
TANDEM_DEVICE void ask_block_mask(u32 (&shown)[kShownNumbers<T>], const ForwardParams& p, const TileCoords& t,
                                  const Row (&rows)[2], int first, StepState state) {
  if (state == StepState::full) return;
#pragma unroll
  for (int i = 0; i < kShownNumbers<T>; ++i) shown[i] = 0;
  if constexpr (T.mask_mod) {
    if (state != StepState::partial) return;
    const MaskMod<T> mods[2] = {{t, rows[0]}, {t, rows[1]}};
    touch_keys<T, T.tile_n>(p, mods[0], first);
    const int column0 = first + 2 * static_cast<int>(threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < kShownNumbers<T>; ++i) {
      const int end = min(32, T.tile_n / 2 - 32 * i);
#pragma unroll 2
      for (int r = 0; r < end; r += 4) {
        u32 four = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          four |= u32{mods[row_of(j)](p, column0 + column_of(32 * i) + column_of(r) + column_of(j))} << j;
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
