// P from S and dS from dP in the Blackwell backward, 32 scores of a thread at a time. Includes masks, score options,
// exponentials, dropout, and their derivatives.
#pragma once
#include "config/sm100_backward.h"
#include "device/dropout.cuh"
#include "device/key_scores.cuh"
#include "device/mask.cuh"
#include "device/pack.cuh"
#include "ptx/float2.cuh"
#include "ptx/warp.cuh"

constexpr int kChunk = Sm100BackwardConfig::kRun;  // queries whose scores are loaded together

// The queries of a tile's iterations that see its keys.
template <Sm100BackwardConfig T>
struct Visibility {
  QueryRange seen;                   // the queries that see the thread's key
  int unmasked_begin, unmasked_end;  // m_blocks whose queries all see all of the CTA's keys

  TANDEM_DEVICE Visibility(const BackwardParams& p, const SequenceCoords& sequence, int first_key, int key) {
    const auto band = band_of<T>(p, sequence);
    seen = band.visible_queries(key, key);
    if (key >= sequence.k_len) seen.begin = seen.end = 1 << 29;
    const int last_key = first_key + T.kCtaKeys - 1;
    const QueryRange unmasked = band.unmasked_queries(first_key, last_key);
    unmasked_begin = T.options.bounded_right ? (max(0, unmasked.begin) + T.tile_m - 1) / T.tile_m : 0;
    if (last_key >= sequence.k_len) unmasked_begin = 1 << 30;
    unmasked_end = T.options.bounded_left ? unmasked.end / T.tile_m : 1 << 30;
  }
  TANDEM_DEVICE bool masks(int m_block) const {
    return warp_any(m_block < unmasked_begin || (T.options.bounded_left && m_block >= unmasked_end));
  }
  // Returns true if some of the queries [first, end) sees the key.
  TANDEM_DEVICE bool sees_some(int first, int end) const {
    return seen.begin < end && (!T.options.bounded_left || first < seen.end);
  }
  // Sets scores [begin, end) of queries from `first` on that do not see the key to -infinity. Queries beyond the
  // sequence have probabilities of 0 through their lse.
  TANDEM_DEVICE void apply_mask(float (&x)[kChunk], int first, int begin, int end) const {
    const int first_seen = clamp(seen.begin - first, 0, kChunk);
    const int seen_end = T.options.bounded_left ? clamp(seen.end - first, first_seen, kChunk) : kChunk;
    const u32 visible = bit_range(first_seen, seen_end - first_seen);
#pragma unroll
    for (int n = begin; n < end; ++n) x[n] = masked_score(visible, n, x[n]);
  }
};

// Applies dropout to a probability, or to its derivative, of the n-th query of a chunk.
template <Sm100BackwardConfig T>
TANDEM_DEVICE float keep_or_zero(u32 keep_mask, int n, float x) {
  if constexpr (T.options.dropout) return keep_or_zero(keep_mask, n, x);
  return x;
}

// An iteration from the view of one thread: its key, and the warpgroup's queries.
template <Sm100BackwardConfig T>
struct StepAt {
  static constexpr int kChunks = T.queries_of_warpgroup() / kChunk;
  static constexpr int kNextRun = T.run_begin(0, 1);  // distance between the first queries of two chunks

  const BackwardParams& p;
  const Visibility<T>& visibility;
  const HeadScores<T>& of_head;
  const u32 (&keep_mask)[kChunks];  // dropout mask
  const float* const lse_delta;     // -lse; delta from index T.tile_m on
  const int query, key;             // query: the thread's first
};

// Half of a chunk.
TANDEM_DEVICE float (&half_of(float (&x)[kChunk], int begin))[kChunk / 2] {
  return reinterpret_cast<float(&)[kChunk / 2]>(x[begin]);
}

// Replaces scores [begin, end) of chunk c by probabilities: in float32, and rounded with two in a word. With a softcap
// the float32 probability is multiplied by the softcap's derivative. Dropout applies only to the rounded probabilities.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void make_probabilities(float (&x)[kChunk], u32 (&rounded)[kChunk / 2], const StepAt<T>& at, int c,
                                      int begin, int end) {
  const BackwardParams& p = at.p;
  const float* const minus_lse = at.lse_delta + c * StepAt<T>::kNextRun;
  const int query = at.query + c * StepAt<T>::kNextRun;
  const u32 keep_mask = at.keep_mask[c];
  auto round = [&](int n) {
    rounded[n / 2] = pack<T>(keep_or_zero<T>(keep_mask, n, x[n]), keep_or_zero<T>(keep_mask, n + 1, x[n + 1]));
  };
#pragma unroll
  for (int n = begin; n < end; n += 4) {
    const float4 lse = *reinterpret_cast<const float4*>(minus_lse + n);
    if constexpr (T.has_score_mod()) {
      const float of_query[4] = {lse.x, lse.y, lse.z, lse.w};
      float derivative[4] = {1, 1, 1, 1};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // true also if the query is beyond the sequence
        const bool hidden = x[n + i] == -kInfinity || of_query[i] == -kInfinity;
        float score = scaled_score<T>(x[n + i], p);
        if constexpr (T.options.softcap) derivative[i] = softcap_derivative(score, p);
        score = at.of_head(score, p, query, n + i, at.key, &derivative[i]);
        x[n + i] = hidden ? 0.0f : exp2_approx(score + of_query[i]);
      }
      round(n);
      round(n + 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n + i] = apply_score_derivative<T>(x[n + i], derivative[i]);
      __syncwarp();  // otherwise ptxas overlaps all loads and exp2, and spills
    } else {
      const Float2 scale = float2_of(p.scale_log2);
      split(fma(float2_of(x[n], x[n + 1]), scale, float2_of(lse.x, lse.y)), &x[n], &x[n + 1]);
      split(fma(float2_of(x[n + 2], x[n + 3]), scale, float2_of(lse.z, lse.w)), &x[n + 2], &x[n + 3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n + i] = exp2_approx(x[n + i]);
      round(n);
      round(n + 2);
    }
  }
}

// Sets probabilities [begin, end) of a chunk to 0 if they are hidden from all keys of the warp.
TANDEM_DEVICE void no_probabilities(float (&x)[kChunk], u32 (&rounded)[kChunk / 2], int begin, int end) {
#pragma unroll
  for (int n = begin; n < end; n += 2) {
    x[n] = x[n + 1] = 0;
    rounded[n / 2] = 0;
  }
}

// dS = P (dP - delta) of chunk c, rounded. With dropout, dropped dP count as 0, and kept dP are divided by the keep
// probability. sum: the sum over all dS, if the caller needs it.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void make_ds(u32 (&ds)[kChunk / 2], const float (&probabilities)[kChunk], const float (&dp)[kChunk],
                           const StepAt<T>& at, int c, Float2& sum) {
  const float* const delta = at.lse_delta + T.tile_m + c * StepAt<T>::kNextRun;
  const u32 keep_mask = at.keep_mask[c];
  auto minus_delta = [&](int n, float x, float y) {
    if constexpr (!T.options.dropout) return float2_of(dp[n], dp[n + 1]) - float2_of(x, y);
    const Float2 left = float2_of(keep_or_zero<T>(keep_mask, n, dp[n]), keep_or_zero<T>(keep_mask, n + 1, dp[n + 1]));
    return fma(left, float2_of(at.p.dropout.scale), float2_of(-x, -y));
  };
#pragma unroll
  for (int n = 0; n < kChunk; n += 4) {
    const float4 of_query = *reinterpret_cast<const float4*>(delta + n);
    const Float2 low = float2_of(probabilities[n], probabilities[n + 1]) * minus_delta(n, of_query.x, of_query.y);
    const Float2 high =
        float2_of(probabilities[n + 2], probabilities[n + 3]) * minus_delta(n + 2, of_query.z, of_query.w);
    if constexpr (T.captured_per_tile) sum = sum + (low + high);
    float x[4];
    split(low, &x[0], &x[1]);
    split(high, &x[2], &x[3]);
    ds[n / 2] = pack<T>(x[0], x[1]);
    ds[n / 2 + 1] = pack<T>(x[2], x[3]);
  }
}
