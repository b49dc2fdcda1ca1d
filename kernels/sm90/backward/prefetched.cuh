// Values of an iteration of the Hopper backward that are loaded, evaluated or drawn before its scores are ready.
#pragma once
#include "device/key_scores.cuh"
#include "sm90/backward/warpgroup_tile.cuh"

// The visible scores of an iteration under a block mask, one bit each. The mask_mod is evaluated in parts while scores
// are multiplied, as in the forward.
template <Sm90BackwardConfig T>
constexpr int kShownNumbers = (T.score_queries() / 2 + 31) / 32;
template <Sm90BackwardConfig T>
struct Shown {
  u32 word;  // state in the table, prefetched by prefetch_iteration()
  BlockState state = BlockState::full;
  u32 bits[kShownNumbers<T>];
};
// The dropout mask of an iteration's probabilities.
constexpr int kKeepGroup = 32;  // registers per word of the mask
template <Sm90BackwardConfig T>
constexpr int kKeepMaskWords = (T.score_queries() / 2 + kKeepGroup - 1) / kKeepGroup;

// Values of an iteration that are loaded or drawn before its scores are ready.
template <Sm90BackwardConfig T>
struct Prefetched {
  HeadRow<T> row;
  Shown<T> shown;
  u32 keep_mask[kKeepMaskWords<T>];
  float2 lse[T.preloaded_lse() + 1], delta[T.preloaded_delta() + 1];  // lse_delta_of the first pairs of columns
};

// Loads an iteration's prefetched values before its scores are multiplied.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void prefetch_iteration(Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                                      const WarpgroupSteps<T>& step) {
  if constexpr (T.options.block_mask)
    prefetched.shown.word = table_word<T>(tile.p, tile.sequence, step.head, step.m_block, tile.cta_pair_n_block);
  prefetched.row = hold_head<T>(tile.p, tile.sequence, step.head);
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void evaluate_mask_mod(Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                                     const WarpgroupSteps<T>& step) {
  if constexpr (T.options.block_mask) {
    Shown<T>& shown = prefetched.shown;
    const SequenceCoords& sequence = tile.sequence;
    shown.state = state_of(shown.word, tile.thread.rank);
    if (shown.state == BlockState::full) return;
#pragma unroll
    for (int i = 0; i < kShownNumbers<T>; ++i) shown.bits[i] = 0;
    if constexpr (T.options.mask_mod) {
      if (shown.state != BlockState::partial) return;
      const ModNames& names = static_cast<const ModifiedBackwardParams&>(tile.p).mods.mask;
      ModPlace at{sequence.sequence, step.head, 0, 0, sequence.q_len, sequence.k_len};
      const int queries = T.score_queries();
      static_assert(T.score_queries() <= 128);
      at.q = tile.query_of(step.m_block, 0) + tile.thread.lane * (queries / 32) - 2 * (tile.thread.lane & 3);
      mask_touch_queries<T>(at, names);
#pragma unroll
      for (int i = 0; i < kShownNumbers<T>; ++i) {
        const int end = min(32, queries / 2 - 32 * i);
#pragma unroll 2
        for (int r = 0; r < end; r += 4) {
          u32 four = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            at.q = tile.query_of(step.m_block, 32 * i + r + j);
            at.k = tile.key(row_of(j));
            four |= u32{mask_mod<T>(at, names)} << j;
          }
          shown.bits[i] |= four << r;
        }
      }
    }
  }
}
// Hides the scores that a block mask hides.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void apply_block_mask(float (&scores)[T.score_queries() / 2], const Shown<T>& shown) {
  if (shown.state == BlockState::full) return;
#pragma unroll
  for (int r = 0; r < T.score_queries() / 2; ++r) scores[r] = shown.bits[r / 32] >> r % 32 & 1 ? scores[r] : -kInfinity;
}

// Returns -lse in log2 units (which = 0) or delta (which = 1) of the queries of two neighbouring columns.
template <Sm90BackwardConfig T>
TANDEM_DEVICE float2 lse_delta_of(const WarpgroupTile<T>& tile, const WarpgroupRings<T>& rings, int which, int pair) {
  const float* const at =
      tile.s.lse_delta[rings.dout.index] + which * T.tile_m + tile.first_query + 8 * pair + 2 * (tile.thread.lane & 3);
  return *reinterpret_cast<const float2*>(at);
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void preload_lse(Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                               const WarpgroupRings<T>& rings) {
#pragma unroll
  for (int pair = 0; pair < T.preloaded_lse(); ++pair) prefetched.lse[pair] = lse_delta_of(tile, rings, 0, pair);
}
template <Sm90BackwardConfig T>
TANDEM_DEVICE void preload_delta(Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                                 const WarpgroupRings<T>& rings) {
#pragma unroll
  for (int pair = 0; pair < T.preloaded_delta(); ++pair) prefetched.delta[pair] = lse_delta_of(tile, rings, 1, pair);
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void draw_dropout_mask(Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                                     const WarpgroupSteps<T>& step) {
  if constexpr (T.options.dropout) {
    const int warp_key =
        tile.n_block * T.cta_keys() + (T.shared_p() ? 0 : tile.thread.index * 64) + tile.thread.warp * 16;
#pragma unroll
    for (int r = 0; r < T.score_queries() / 2; r += kKeepGroup)
      prefetched.keep_mask[r / kKeepGroup] =
          tile.thread.dropout.by_columns(step.m_block * T.tile_m + tile.first_query + 2 * r,
                                         dropout_head<T>(tile.p, tile.sequence.sequence, step.head), warp_key,
                                         min(kKeepGroup, T.score_queries() / 2 - r) / 4, tile.thread.lane);
  }
}
template <Sm90BackwardConfig T>
TANDEM_DEVICE float keep_or_zero(const Prefetched<T>& prefetched, int r, float x) {
  if constexpr (T.options.dropout) return keep_or_zero(prefetched.keep_mask[r / kKeepGroup], r % kKeepGroup, x);
  return x;
}
