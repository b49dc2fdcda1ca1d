// From S and dP to P and dS, keys in rows: masks, what is done to scores, exponentials, dropout, and the derivatives of
// all that.
#pragma once
#include "sm90/backward/warpgroup_tile.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/key_scores.cuh"

template <auto T, int n>
TANDEM_DEVICE void pack_all(u32 (&to)[n], const float (&from)[2 * n]) {
#pragma unroll
  for (int r = 0; r < n; ++r) to[r] = pack<T>(from[2 * r], from[2 * r + 1]);
}

// -infinity where a key is not seen.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void apply_mask(float (&scores)[T.score_queries() / 2], const WarpgroupTile<T>& tile, int m_block) {
  const QueryRange seen[2] = {tile.seen_by(0), tile.seen_by(1)};
#pragma unroll
  for (int r = 0; r < T.score_queries() / 2; ++r) {
    const QueryRange& by = seen[row_of(r)];
    const int query = tile.query_of(m_block, r);
    if (query < by.begin || (T.left && query >= by.end)) scores[r] = -kInfinity;
  }
}

// What a block mask hides, by itself: a mask_mod is asked here alone, so that steps that are seen whole are not longer.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void apply_block_mask(float (&scores)[T.score_queries() / 2], const WarpgroupTile<T>& tile,
                                    const WarpgroupSteps<T>& step) {
  const BackwardParams& p = tile.p;
  const SequenceCoords& sequence = tile.sequence;
  const StepState state = step_state<T>(p, sequence, step.head, step.m_block, tile.taken_block, tile.thread.rank);
  if (state == StepState::full) return;
#pragma unroll
  for (int r = 0; r < T.score_queries() / 2; ++r) {
    bool visible = false;
    if constexpr (T.mask_mod) {
      const ModPlace at{sequence.sequence,   step.head,      tile.query_of(step.m_block, r),
                        tile.key(row_of(r)), sequence.q_len, sequence.k_len};
      visible = state == StepState::partial && mask_mod<T>(at, static_cast<const ModifiedBackwardParams&>(p).mods.mask);
    }
    if (!visible) scores[r] = -kInfinity;
  }
}

// -lse in log2 units (which 0), or delta (1), of the queries of a pair of neighbouring columns.
template <Sm90BackwardConfig T>
TANDEM_DEVICE float2 stat_of(const WarpgroupTile<T>& tile, const WarpgroupRings<T>& rings, int which, int pair) {
  const float* const at = tile.s.stats[rings.dout.slot] + which * T.tile_m + tile.thread.first_query + 8 * pair +
                          2 * (tile.thread.lane & 3);
  return *reinterpret_cast<const float2*>(at);
}

// Which of a step's probabilities have met values, drawn while the step is multiplied.
constexpr int kKeptGroup = 32;  // registers of which one number tells
template <Sm90BackwardConfig T>
constexpr int kKeptNumbers = (T.score_queries() / 2 + kKeptGroup - 1) / kKeptGroup;

template <Sm90BackwardConfig T>
TANDEM_DEVICE void draw_kept(u32 (&kept)[kKeptNumbers<T>], const WarpgroupTile<T>& tile,
                             const WarpgroupSteps<T>& step) {
  if constexpr (T.dropout) {
    const int warp_key = tile.n_block * T.cta_keys() + (T.wide() ? 0 : tile.thread.index * 64) + tile.thread.warp * 16;
#pragma unroll
    for (int r = 0; r < T.score_queries() / 2; r += kKeptGroup)
      kept[r / kKeptGroup] =
          tile.thread.dropout.by_columns(step.m_block * T.tile_m + tile.thread.first_query + 2 * r,
                                         tile.sequence.sequence * tile.p.heads_q + step.head, warp_key,
                                         min(kKeptGroup, T.score_queries() / 2 - r) / 4, tile.thread.lane);
  }
}
template <Sm90BackwardConfig T>
TANDEM_DEVICE float kept_or_zero(const u32 (&kept)[kKeptNumbers<T>], int r, float x) {
  if constexpr (T.dropout) return kept_or_zero(kept[r / kKeptGroup], r % kKeptGroup, x);
  return x;
}

// Scores become probabilities, in float32 and rounded; where a score is capped or modified, the former times the
// derivative of that.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void make_probabilities(float (&scores)[T.score_queries() / 2],
                                      u32 (&probabilities)[T.score_queries() / 4], const u32 (&kept)[kKeptNumbers<T>],
                                      const WarpgroupTile<T>& tile, const WarpgroupRings<T>& rings,
                                      const WarpgroupSteps<T>& step) {
  const BackwardParams& p = tile.p;
  const HeadScores<T> of_head(p, tile.sequence, step.head);
  if constexpr (T.softcap) apply_softcap<false>(scores, p);
  if (tile.is_masked(step.m_block)) apply_mask(scores, tile, step.m_block);
  if constexpr (T.block_mask) apply_block_mask(scores, tile, step);
#pragma unroll
  for (int pair = 0; pair < T.score_queries() / 8; ++pair) {
    const float2 minus_lse = stat_of(tile, rings, 0, pair);
    float derivative[4] = {1, 1, 1, 1};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = 4 * pair + n;
      const float lse = n & 1 ? minus_lse.y : minus_lse.x;
      if constexpr (T.has_score_mod()) {
        const bool hidden = scores[r] == -kInfinity || lse == -kInfinity;  // or its query is none
        float score = scaled_score<T>(scores[r], p);
        if constexpr (T.softcap) derivative[n] = softcap_derivative(score, p);
        score = of_head(score, p, tile.query_of(step.m_block, r), tile.key(row_of(r)), &derivative[n]);
        scores[r] = hidden ? 0.0f : exp2_approx(score + lse);
      } else {
        scores[r] = exp2_approx(fmaf(scores[r], p.scale_log2, lse));
      }
    }
#pragma unroll
    for (int n = 0; n < 4; n += 2)
      probabilities[2 * pair + n / 2] = pack<T>(kept_or_zero<T>(kept, 4 * pair + n, scores[4 * pair + n]),
                                                kept_or_zero<T>(kept, 4 * pair + n + 1, scores[4 * pair + n + 1]));
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[4 * pair + n] = through_scores<T>(scores[4 * pair + n], derivative[n]);
  }
}

// dS = P (dP - delta), in place of dP.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void make_ds(float (&dp)[T.score_queries() / 2], const float (&scores)[T.score_queries() / 2],
                           const u32 (&kept)[kKeptNumbers<T>], const WarpgroupTile<T>& tile,
                           const WarpgroupRings<T>& rings) {
#pragma unroll
  for (int pair = 0; pair < T.score_queries() / 8; ++pair) {
    const float2 delta = stat_of(tile, rings, 1, pair);
#pragma unroll
    for (int r = 4 * pair; r < 4 * pair + 4; ++r) {
      const float of_query = r & 1 ? delta.y : delta.x;
      if constexpr (T.dropout) {
        dp[r] = scores[r] * fmaf(kept_or_zero<T>(kept, r, dp[r]), tile.p.dropout.scale, -of_query);
      } else {
        dp[r] = scores[r] * (dp[r] - of_query);
      }
    }
  }
  fence_operand(dp);
}
