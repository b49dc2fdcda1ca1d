// Computes P and dS from S and dP, with keys in rows: masks, score options, exponentials, dropout, and their
// derivatives.
#pragma once
#include "device/fragment_softmax.cuh"
#include "device/key_scores.cuh"
#include "score_grads/captured_sums.cuh"
#include "sm90/backward/bias.cuh"
#include "sm90/backward/prefetched.cuh"
#include "sm90/backward/warpgroup_tile.cuh"

template <auto T, int n>
TANDEM_DEVICE void pack_all(u32 (&to)[n], const float (&from)[2 * n]) {
#pragma unroll
  for (int r = 0; r < n; ++r) to[r] = pack<T>(from[2 * r], from[2 * r + 1]);
}

// Sets scores of hidden keys to -infinity.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void apply_mask(float (&scores)[T.score_queries() / 2], const WarpgroupTile<T>& tile, int m_block) {
  const QueryRange seen[2] = {tile.seen_by(0), tile.seen_by(1)};
#pragma unroll
  for (int r = 0; r < T.score_queries() / 2; ++r) {
    const QueryRange& by = seen[row_of(r)];
    const int query = kHasBand<T> ? tile.query_of(m_block, r) : 0;
    if (query < by.begin || (T.options.bounded_left && query >= by.end)) scores[r] = -kInfinity;
  }
}

// Replaces scores by probabilities; a staged bias has been added to them. use(pair, derivatives, given) is called for
// four scores at a time, when their probabilities are ready. given: the score_mod's input, with T.captured_per_score.
template <Sm90BackwardConfig T, class Use>
TANDEM_DEVICE void make_each_probability(float (&scores)[T.score_queries() / 2], const Prefetched<T>& prefetched,
                                         const WarpgroupTile<T>& tile, const WarpgroupRings<T>& rings,
                                         const WarpgroupSteps<T>& step, const Use& use) {
  const BackwardParams& p = tile.p;
  const HeadScores<T> of_head(p, tile.sequence, step.head, prefetched.row);
  if constexpr (T.options.softcap) apply_softcap<false>(scores, p);
  if (tile.is_masked(step.m_block)) apply_mask(scores, tile, step.m_block);
  if constexpr (T.options.block_mask) apply_block_mask<T>(scores, prefetched.shown);
#pragma unroll
  for (int pair = 0; pair < T.score_queries() / 8; ++pair) {
    const float2 minus_lse = pair < T.preloaded_lse() ? prefetched.lse[pair] : lse_delta_of(tile, rings, 0, pair);
    float derivative[4] = {1, 1, 1, 1}, mod_input[4] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = 4 * pair + n;
      const float lse = n & 1 ? minus_lse.y : minus_lse.x;
      if constexpr (T.has_score_mod()) {
        const bool hidden = scores[r] == -kInfinity || lse == -kInfinity;  // or the query is beyond the sequence
        float score = scaled_score<T>(scores[r], p);
        if constexpr (T.options.softcap) derivative[n] = softcap_derivative(score, p);
        score = of_head(score, p, tile.query_of(step.m_block, 0), column_of(r), tile.key(row_of(r)), &derivative[n],
                        T.captured_per_score ? &mod_input[n] : nullptr);
        scores[r] = hidden ? 0.0f : exp2_approx(score + lse);
      } else {
        scores[r] = exp2_approx(fmaf(scores[r], p.scale_log2, lse));
      }
    }
    use(pair, derivative, mod_input);
  }
}
template <Sm90BackwardConfig T>
TANDEM_DEVICE void pack_probabilities(u32 (&probabilities)[T.score_queries() / 4],
                                      const float (&scores)[T.score_queries() / 2], const Prefetched<T>& prefetched,
                                      int pair) {
#pragma unroll
  for (int n = 0; n < 4; n += 2)
    probabilities[2 * pair + n / 2] = pack<T>(keep_or_zero(prefetched, 4 * pair + n, scores[4 * pair + n]),
                                              keep_or_zero(prefetched, 4 * pair + n + 1, scores[4 * pair + n + 1]));
}

// Probabilities in float32, and rounded. With a softcap or score_mod the float32 probability is multiplied by the
// derivative.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void make_probabilities(float (&scores)[T.score_queries() / 2],
                                      u32 (&probabilities)[T.score_queries() / 4], const Prefetched<T>& prefetched,
                                      const WarpgroupTile<T>& tile, const WarpgroupRings<T>& rings,
                                      const WarpgroupSteps<T>& step) {
  make_each_probability<T>(scores, prefetched, tile, rings, step, [&](int pair, const float(&derivative)[4], auto&) {
    pack_probabilities(probabilities, scores, prefetched, pair);
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[4 * pair + n] = apply_score_derivative<T>(scores[4 * pair + n], derivative[n]);
  });
}

// Sums by two independent chains of additions.
template <int n>
TANDEM_DEVICE float sum_of(const float (&x)[n]) {
  float even = x[0], odd = x[1];
#pragma unroll
  for (int r = 2; r < n; r += 2) even += x[r], odd += x[r + 1];
  return even + odd;
}

// Returns dP - delta, the factor of a probability, with the dropout mask applied to dP.
template <Sm90BackwardConfig T>
TANDEM_DEVICE float minus_delta(float dp, float delta, const Prefetched<T>& prefetched, int r,
                                const BackwardParams& p) {
  if constexpr (T.options.dropout) return fmaf(keep_or_zero(prefetched, r, dp), p.dropout.scale, -delta);
  return dp - delta;
}

// Computes dS = P (dP - delta) in place of dP.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void make_ds(float (&dp)[T.score_queries() / 2], const float (&scores)[T.score_queries() / 2],
                           const Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                           const WarpgroupRings<T>& rings) {
#pragma unroll
  for (int pair = 0; pair < T.score_queries() / 8; ++pair) {
    const float2 delta = pair < T.preloaded_delta() ? prefetched.delta[pair] : lse_delta_of(tile, rings, 1, pair);
#pragma unroll
    for (int r = 4 * pair; r < 4 * pair + 4; ++r)
      dp[r] = scores[r] * minus_delta(dp[r], r & 1 ? delta.y : delta.x, prefetched, r, tile.p);
  }
  fence_operand(dp);
}

// The iteration of P and dS.
template <Sm90BackwardConfig T>
struct Iteration {
  const Prefetched<T>& prefetched;
  const WarpgroupTile<T>& tile;
  const WarpgroupRings<T>& rings;
  const WarpgroupSteps<T>& step;
};

// Computes P and dS together if sums need a score and its gradient: no register keeps the score until dP is ready.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void make_ds_and_sums(u32 (&ds)[T.score_queries() / 4], ScoreSums<T>& sums,
                                    float (&dp)[T.score_queries() / 2], float (&scores)[T.score_queries() / 2],
                                    u32 (&probabilities)[T.score_queries() / 4], const Iteration<T>& at) {
  const auto& [prefetched, tile, rings, step] = at;
  make_each_probability<T>(
      scores, prefetched, tile, rings, step, [&](int pair, const float(&derivative)[4], const float(&mod_input)[4]) {
        pack_probabilities(probabilities, scores, prefetched, pair);
        const float2 delta = lse_delta_of(tile, rings, 1, pair);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int r = 4 * pair + n;
          const bool is_seen = scores[r] != 0;
          const float gradient = scores[r] * minus_delta(dp[r], n & 1 ? delta.y : delta.x, prefetched, r, tile.p);
          sums.add(tile.p, mod_input[n], tile.place(step.head, 0, 0),
                   typename ScoreSums<T>::AddingFinite{sums, gradient, is_seen});
          dp[r] = is_seen ? gradient * derivative[n] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) ds[2 * pair + n] = pack<T>(dp[4 * pair + 2 * n], dp[4 * pair + 2 * n + 1]);
        // ptxas would pack all pairs at the end, with too many live registers. A branch that is never taken prevents
        // that: no packed pair is all ones.
        if (pair % 4 == 3 && (probabilities[2 * pair + 1] & ds[2 * pair + 1]) == ~0u) asm volatile("nanosleep.u32 0;");
      });
}
