// Kernels beside the main one of a backward, which make scores anew and sum their gradients over other tiles than it
// does: the gradient of a bias (tile/dbias.cuh), those of what a score_mod reads (tile/captured.cuh). The main kernel
// has no registers left for such sums, and tiles of other heads and sequences meet nowhere.
#pragma once
#include "ptx/warp.cuh"
#include "tile/dropout.cuh"
#include "tile/key_scores.cuh"
#include "tile/key_steps.cuh"
#include "tile/sequence.cuh"

// A tile of T.tile_m queries and a block of keys.
struct ScoreTileAt {
  SequenceCoords sequence;
  int head, m_block, key_block;
};

TANDEM_DEVICE ModPlace place_of(const ScoreTileAt& at, int query, int key) {
  return {at.sequence.sequence, at.head, query, key, at.sequence.q_len, at.sequence.k_len};
}

// What a block mask says of it. Its keys are those of a CTA of the main kernel.
template <auto T>
TANDEM_DEVICE StepState state_at(const BackwardParams& p, const ScoreTileAt& at) {
  return step_state<T>(p, at.sequence, at.head, at.m_block, at.key_block / T.ctas(), at.key_block % T.ctas());
}

// Whether some query of the tile, which has so many keys, sees some key.
template <auto T, int keys>
TANDEM_DEVICE bool sees_some(const BackwardParams& p, const ScoreTileAt& at) {
  const SequenceCoords& sequence = at.sequence;
  const int first = at.key_block * keys, last = min(first + keys, sequence.k_len) - 1;
  const QueryRange visible = band_of<T>(p, sequence).visible_queries(first, last);
  const int query = at.m_block * T.tile_m;
  if (T.block_mask && state_at<T>(p, at) == StepState::absent) return false;
  return first <= last && query < min(visible.end, sequence.q_len) && visible.begin < query + T.tile_m;
}

// Of one score.
struct ScoreGradient {
  float ds;          // P (dP - delta): the gradient of the score that the softmax is of
  float given;       // to a score_mod
  float derivative;  // of what it made of that, if there is one
};

// ds is 0 where the score is -infinity (not seen, or beyond a sequence): a product with 0 would not do, for it may be
// NaN. kept, r: as kept_or_zero() takes them.
template <auto T>
TANDEM_DEVICE float ds_of(const BackwardParams& p, float score, float minus_lse, float dp, float delta, u32 kept,
                          int r) {
  if constexpr (T.dropout) dp = kept_or_zero(kept, r, dp * p.dropout.scale);
  const bool hidden = score == -kInfinity || minus_lse == -kInfinity;
  return hidden ? 0.0f : exp2_approx(score + minus_lse) * (dp - delta);
}
