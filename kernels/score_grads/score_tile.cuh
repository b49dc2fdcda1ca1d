// Additional kernels of a backward. These kernels compute scores again and sum the gradients of a bias
// (score_grads/dbias.cuh) and of a score_mod's tensors (score_grads/captured.cuh). The main kernel has no registers for
// such sums, and it spreads the tiles of a sum over heads and sequences.
#pragma once
#include "device/dropout.cuh"
#include "device/key_scores.cuh"
#include "device/m_block_lists.cuh"
#include "device/sequence.cuh"
#include "ptx/warp.cuh"

// A tile of T.tile_m queries and a block of keys.
struct ScoreTileAt {
  SequenceCoords sequence;
  int head, m_block, key_block;
};

TANDEM_DEVICE ModPlace place_of(const ScoreTileAt& at, int query, int key) {
  return {at.sequence.sequence, at.head, query, key, at.sequence.q_len, at.sequence.k_len};
}

// The block mask's state of the tile. The tile's keys are the keys of one CTA of the main kernel.
template <auto T>
TANDEM_DEVICE BlockState state_at(const BackwardParams& p, const ScoreTileAt& at) {
  return block_state<T>(p, at.sequence, at.head, at.m_block, at.key_block / T.ctas(), at.key_block % T.ctas());
}

// Returns true if some query of the tile sees some of its `keys` keys.
template <auto T, int keys>
TANDEM_DEVICE bool sees_some(const BackwardParams& p, const ScoreTileAt& at) {
  const SequenceCoords& sequence = at.sequence;
  const int first = at.key_block * keys, last = min(first + keys, sequence.k_len) - 1;
  const QueryRange visible = band_of<T>(p, sequence).visible_queries(first, last);
  const int query = at.m_block * T.tile_m;
  if (T.options.block_mask && state_at<T>(p, at) == BlockState::absent) return false;
  return first <= last && query < min(visible.end, sequence.q_len) && visible.begin < query + T.tile_m;
}

// The gradient of one score.
struct ScoreGradient {
  float ds;          // P (dP - delta), the gradient of the softmax's score
  float mod_input;   // score_mod's input
  float derivative;  // score_mod's derivative by its input
};

// The -lse (in log2 units) and delta of a query.
struct LseDelta {
  float minus_lse, delta;
};

// ds is 0 if the score is -infinity (hidden or beyond a sequence). A product with 0 is not enough, because the factor
// may be NaN. keep_or_zero() explains kept and r.
template <auto T>
TANDEM_DEVICE float ds_of(const BackwardParams& p, float score, const LseDelta& row, float dp, u32 keep_mask, int r) {
  if constexpr (T.options.dropout) dp = keep_or_zero(keep_mask, r, dp * p.dropout.scale);
  const bool hidden = score == -kInfinity || row.minus_lse == -kInfinity;
  return hidden ? 0.0f : exp2_approx(score + row.minus_lse) * (dp - row.delta);
}
