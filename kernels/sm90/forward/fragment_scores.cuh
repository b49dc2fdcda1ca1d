// Score options and masks on the fragments of a warpgroup.
#pragma once
#include "device/block_mask.cuh"
#include "device/fragment_softmax.cuh"
#include "device/mask.cuh"
#include "device/score_mod.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/smem.cuh"

// The thread's two rows of a tile, and its first column.
struct FragmentPlace {
  const ForwardParams& p;
  const TileCoords t;
  const Row rows[2];
  const int column0;
};

// Scores from products, in log2 units unless a score_mod is present. A bias without other options is added to the raw
// products. by: 1 / scale.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void apply_score_mod(float (&s)[T.tile_n / 2], const FragmentPlace& at, const HeldRow<T> (&held)[2],
                                   const BiasFragments<T>& bias, float by) {
  const ForwardParams& p = at.p;
  if constexpr (T.options.softcap) apply_softcap<false>(s, p);
  const ScoreMod<T, T.options.score_mod> mods[2] = {{p, at.t, at.rows[0], held[0]}, {p, at.t, at.rows[1], held[1]}};
#pragma unroll
  for (int r = 0; r < T.tile_n / 2; r += 2) {
    BiasValue<T> of_bias[2] = {};
    if constexpr (T.options.bias != Bias::none) bias.load(r, of_bias);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (T.has_score_mod()) {
        s[r + n] = mods[row_of(r)](s[r + n], p, at.column0, column_of(r + n), of_bias[n]);
      } else {
        s[r + n] = with_bias<T>(s[r + n], of_bias[n], by);
      }
    }
  }
}

// Evaluates the mask_mod of a block mask for this thread's scores, from the preloaded values of its rows and of keys.
// column0: its first key; steps: the number of remaining iterations, this one included.
template <Sm90ForwardConfig T>
struct FragmentMask {
  const ForwardParams& p;
  const typename MaskShared<T>::KeyPair* const pairs;  // pairs from the thread's first key on
  const MaskMod<T> mods[2];
  const MaskRow<T> held[2];
  const int column0;

  TANDEM_DEVICE FragmentMask(const ForwardParams& params, const MaskShared<T>& s, const TileCoords& t,
                             const Row (&rows)[2], int first_column, int steps)
      : p(params),
        pairs(s.keys[steps & 1] + (threadIdx.x & 3)),
        mods{{t, rows[0]}, {t, rows[1]}},
        held{s.rows[own_row()], s.rows[own_row() + 8]},
        column0(first_column) {}
  // Calls use(n, score r + n is visible) for four scores.
  template <class Use>
  TANDEM_DEVICE void ask_four(int r, const Use& use) const {
    const auto pair = pairs[r];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      use(n, mods[row_of(n)](p, held[row_of(n)], pair.keys[n & 1], column0 + column_of(r) + column_of(n)));
  }

 private:
  TANDEM_DEVICE static int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
};

// A mask_mod of at most six operations per score is evaluated where it hides scores; with per-key values the limit is
// three. A longer mask_mod is evaluated during the product, one bit per score. Few copies are inlined, because each
// copy is the whole expression.
template <Sm90ForwardConfig T>
constexpr bool asks_ahead() {
  if constexpr (T.evaluates_mask_mod()) return mask_operations<T>() > (__is_empty(MaskKey<T>) ? 6 : 3);
  return false;
}
template <Sm90ForwardConfig T>
constexpr int kShownNumbers = (T.tile_n / 2 + 31) / 32;
template <Sm90ForwardConfig T>
TANDEM_DEVICE void evaluate_mask_mod(u32 (&shown)[kShownNumbers<T>], const FragmentPlace& at, const MaskShared<T>& held,
                                     BlockState state, int steps) {
  if (state == BlockState::full) return;
#pragma unroll
  for (int i = 0; i < kShownNumbers<T>; ++i) shown[i] = 0;
  if (state != BlockState::partial) return;
  const FragmentMask<T> mask(at.p, held, at.t, at.rows, at.column0, steps);
#pragma unroll
  for (int i = 0; i < kShownNumbers<T>; ++i) {
    const int end = min(32, T.tile_n / 2 - 32 * i);
#pragma unroll 2
    for (int r = 0; r < end; r += 4) {
      u32 four = 0;
      mask.ask_four(32 * i + r, [&](int n, bool is_shown) { four |= u32{is_shown} << n; });
      shown[i] |= four << r;
    }
  }
}
// Hides the scores that a block mask hides in an n_block.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void apply_block_mask(float (&s)[T.tile_n / 2], const u32 (&shown)[kShownNumbers<T>],
                                    const FragmentPlace& at, const MaskShared<T>& held, BlockState state, int steps) {
  if (state == BlockState::full) return;
  if constexpr (asks_ahead<T>()) {
#pragma unroll
    for (int r = 0; r < T.tile_n / 2; ++r) s[r] = shown[r / 32] >> r % 32 & 1 ? s[r] : -kInfinity;
    return;
  } else if constexpr (T.evaluates_mask_mod()) {
    if (state == BlockState::partial) {
      const FragmentMask<T> mask(at.p, held, at.t, at.rows, at.column0, steps);
#pragma unroll
      for (int r = 0; r < T.tile_n / 2; r += 4)
        mask.ask_four(r, [&](int n, bool is_shown) { s[r + n] = is_shown ? s[r + n] : -kInfinity; });
      return;
    }
  }
#pragma unroll
  for (float& score : s) score = -kInfinity;
}

// Hides scores beyond the keys or outside the window.
template <Sm90ForwardConfig T, int n>
TANDEM_DEVICE void apply_mask(float (&s)[n], const ForwardParams& p, const TileCoords& t, const Row (&rows)[2],
                              int column0) {
  const KeyRange keys[2] = {visible_keys<T>(p, t, rows[0]), visible_keys<T>(p, t, rows[1])};
  const u32 count[2] = {static_cast<u32>(max(0, keys[0].end - keys[0].begin)),
                        static_cast<u32>(max(0, keys[1].end - keys[1].begin))};
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int i = row_of(r), column = column0 + column_of(r);
    if (T.options.bounded_left ? static_cast<u32>(column - keys[i].begin) >= count[i] : column >= keys[i].end)
      s[r] = -kInfinity;
  }
}
