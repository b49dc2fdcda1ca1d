// Score mods and masks on the fragments of a warpgroup.
#pragma once
#include "shared/sm90_forward.h"
#include "tile/block_mask.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/mask.cuh"
#include "tile/score_mod.cuh"

// Scores in log2 units from products.
template <Sm90ForwardConfig T, int n>
TANDEM_DEVICE void apply_score_mod(float (&s)[n], const ForwardParams& p, const TileCoords& t, const Row (&rows)[2],
                                   int column0) {
  if constexpr (T.softcap) apply_softcap<false>(s, p);
  const ScoreMod<T> mods[2] = {{p, t, rows[0]}, {p, t, rows[1]}};
#pragma unroll
  for (int r = 0; r < n; ++r) s[r] = mods[row_of(r)](s[r], p, column0, column_of(r));
}

// Hides what a block mask hides in an n_block.
template <Sm90ForwardConfig T, int n>
TANDEM_DEVICE void apply_block_mask(float (&s)[n], const ForwardParams& p, const TileCoords& t, const Row (&rows)[2],
                                    int column0, StepState state) {
  if (state == StepState::full) return;
  if constexpr (T.mask_mod) {
    if (state == StepState::partial) {
      const MaskMod<T> mods[2] = {{t, rows[0]}, {t, rows[1]}};
#pragma unroll
      for (int r = 0; r < n; ++r) s[r] = mods[row_of(r)](p, column0 + column_of(r)) ? s[r] : -kInfinity;
      return;
    }
  }
#pragma unroll
  for (int r = 0; r < n; ++r) s[r] = -kInfinity;
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
