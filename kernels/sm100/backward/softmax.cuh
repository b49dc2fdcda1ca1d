// What a computing warpgroup of the Blackwell backward does: probabilities P from S, and dS from dP. A thread has a
// key, and of a step the queries of its warpgroup, half of them.
#pragma once
#include "ptx/float2.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/epilogue.cuh"
#include "sm100/backward/shared_plan.cuh"
#include "tile/dropout.cuh"
#include "tile/key_scores.cuh"
#include "tile/mask.cuh"
#include "tile/pack.cuh"

constexpr int kChunk = 32;  // queries whose scores are loaded together

// Which queries of a tile's steps its keys see.
template <Sm100BackwardConfig T>
struct Visibility {
  QueryRange seen;                   // by the thread's key
  int unmasked_begin, unmasked_end;  // m_blocks whose queries all see all of the CTA's keys

  TANDEM_DEVICE Visibility(const BackwardParams& p, const SequenceCoords& sequence, int first_key, int key) {
    const auto band = band_of<T>(p, sequence);
    seen = band.visible_queries(key, key);
    if (key >= sequence.k_len) seen.begin = seen.end = 1 << 29;
    const int last_key = first_key + T.kCtaKeys - 1;
    const QueryRange unmasked = band.unmasked_queries(first_key, last_key);
    unmasked_begin = T.right ? (max(0, unmasked.begin) + T.tile_m - 1) / T.tile_m : 0;
    if (last_key >= sequence.k_len) unmasked_begin = 1 << 30;
    unmasked_end = T.left ? unmasked.end / T.tile_m : 1 << 30;
  }
  TANDEM_DEVICE bool masks(int m_block) const {
    return warp_any(m_block < unmasked_begin || (T.left && m_block >= unmasked_end));
  }
  // Scores of queries [first, first + kChunk) that the key is not seen by become -infinity. Queries that there are not
  // have probabilities of 0 by their lse.
  TANDEM_DEVICE void apply_mask(float (&x)[kChunk], int first) const {
    const int begin = clamp(seen.begin - first, 0, kChunk);
    const int end = T.left ? clamp(seen.end - first, begin, kChunk) : kChunk;
    const u32 visible = bit_range(begin, end - begin);
#pragma unroll
    for (int n = 0; n < kChunk; ++n) x[n] = masked_score(visible, n, x[n]);
  }
};

// Of the n-th query of a chunk: what dropout leaves of a probability, or of the derivative by it.
template <Sm100BackwardConfig T>
TANDEM_DEVICE float kept_or_zero(u32 kept, int n, float x) {
  return !T.dropout || is_kept(kept, n) ? x : 0.0f;
}

// Scores become probabilities, in float32 and, two in a word, rounded; where a score is capped, the former times its
// derivative. minus_lse: of these queries. kept: which of them dropout keeps, the rounded ones only.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void make_probabilities(float (&x)[kChunk], u32 (&rounded)[kChunk / 2], const float* minus_lse, u32 kept,
                                      const HeadScores<T>& of_head, const BackwardParams& p, int query, int key) {
  auto round = [&](int n) {
    rounded[n / 2] = pack<T>(kept_or_zero<T>(kept, n, x[n]), kept_or_zero<T>(kept, n + 1, x[n + 1]));
  };
#pragma unroll
  for (int n = 0; n < kChunk; n += 4) {
    const float4 lse = *reinterpret_cast<const float4*>(minus_lse + n);
    if constexpr (T.has_score_mod()) {
      const float of_query[4] = {lse.x, lse.y, lse.z, lse.w};
      float derivative[4] = {1, 1, 1, 1};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool hidden = x[n + i] == -kInfinity || of_query[i] == -kInfinity;  // or its query is none
        float score = scaled_score<T>(x[n + i], p);
        if constexpr (T.softcap) derivative[i] = softcap_derivative(score, p);
        score = of_head(score, p, query + n + i, key, &derivative[i]);
        x[n + i] = hidden ? 0.0f : exp2_approx(score + of_query[i]);
      }
      round(n);
      round(n + 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n + i] = through_scores<T>(x[n + i], derivative[i]);
      __syncwarp();  // ptxas would have the loads and exponentials of all queries under way at once, and spill
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

// dS = P (dP - delta), rounded. With dropout dP is that of the kept ones, over the probability to be kept.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void make_ds(u32 (&ds)[kChunk / 2], const float (&probabilities)[kChunk], const float (&dp)[kChunk],
                           const float* delta, u32 kept, const BackwardParams& p) {
  auto less_delta = [&](int n, float x, float y) {
    if constexpr (!T.dropout) return float2_of(dp[n], dp[n + 1]) - float2_of(x, y);
    const Float2 left = float2_of(kept_or_zero<T>(kept, n, dp[n]), kept_or_zero<T>(kept, n + 1, dp[n + 1]));
    return fma(left, float2_of(p.dropout.scale), float2_of(-x, -y));
  };
#pragma unroll
  for (int n = 0; n < kChunk; n += 4) {
    const float4 of_query = *reinterpret_cast<const float4*>(delta + n);
    const Float2 low = float2_of(probabilities[n], probabilities[n + 1]) * less_delta(n, of_query.x, of_query.y);
    const Float2 high =
        float2_of(probabilities[n + 2], probabilities[n + 3]) * less_delta(n + 2, of_query.z, of_query.w);
    float x[4];
    split(low, &x[0], &x[1]);
    split(high, &x[2], &x[3]);
    ds[n / 2] = pack<T>(x[0], x[1]);
    ds[n / 2 + 1] = pack<T>(x[2], x[3]);
  }
}

// Where a warpgroup's dS goes, keys in rows of 64 queries. Of a pair each CTA wants all keys of its own half of the
// queries: the other half is sent.
template <Sm100BackwardConfig T>
TANDEM_DEVICE u16* ds_place(BackwardShared<T>& s, int index) {
  constexpr int kHalf = T.kCtaKeys * T.queries_of_warpgroup();
  if constexpr (T.pair) {
    if (index != rank_of_cta<T>()) return s.ds_sent;
  }
  if constexpr (T.makes_dk()) return s.ds + index * kHalf;
  return nullptr;
}
// A warp's rows go to the other CTA. Their place here is free when dQ is done, as dS everywhere.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void send_ds(BackwardShared<T>& s, int index, int warp) {
  const int rank = rank_of_cta<T>();
  __syncwarp();
  if (index == rank || !elect_one()) return;
  constexpr int kOfWarp = 32 * T.queries_of_warpgroup();
  bulk_send(s.ds + rank * (4 * kOfWarp) + warp * kOfWarp, s.ds_sent + warp * kOfWarp, 2 * kOfWarp, &s.pair.ds_landed,
            rank ^ 1);
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void compute(const BackwardParams& p, BackwardShared<T>& s, int index) {
  constexpr int kChunks = T.queries_of_warpgroup() / kChunk;
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32, row = threadIdx.x % 128;
  const int first_query = index * T.queries_of_warpgroup();  // of a step
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  const u32 scores = lanes + T.tmem_s() + first_query, dp_scores = lanes + T.tmem_dp() + first_query;
  // The warpgroup's queries are a block of 64 columns of dS in shared memory.
  static_assert(T.queries_of_warpgroup() == 64);
  auto* const ds_smem = reinterpret_cast<Chunk*>(ds_place(s, index));
  const int ds_first = row * 8 + (row & 7);  // chunk 0 of the row, swizzled
  Dropout dropout;
  if constexpr (T.dropout) dropout = Dropout(p.dropout);
  Ring<T.q_stages> q_ring;
  u32 steps = 0, summed = 0;
  auto signal = [&](u64* barrier, bool written = false) {
    tmem_wait_store();
    tcgen05_fence_before();
    __syncwarp();
    if (lane == 0) arrive_at_leader<T>(barrier, written);
  };
  for (u32 taken = 0;; ++taken) {
    const KeyTile tile = wait_for_tile(s, taken);
    if (tile.n_block < 0) break;
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    const int first_key = first_key_of<T>(tile), key = first_key + row;
    const Visibility<T> visibility(p, sequence, first_key, key);
    Steps step(p, tile);
    const bool any = warp_any(step.left > 0);
#pragma unroll 1
    for (; warp_any(step.left > 0); step.advance(), q_ring.advance(), ++steps) {
      const HeadScores<T> of_head(p, sequence, step.head);
      const int query = step.m_block * T.tile_m + first_query;
      const float* const stats = s.stats[T.stats_alone() ? steps & 1 : q_ring.slot] + first_query;
      const u32 s_slot = steps % T.s_slots(), scores_at = scores + s_slot * T.tile_m;
      u32 kept[kChunks] = {};
      if constexpr (T.dropout) {  // drawn while S is multiplied
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          kept[c] = dropout.of_column(query + c * kChunk, sequence.sequence * p.heads_q + step.head, key, lane);
      }
      if constexpr (T.stats_alone()) {
        mbarrier_wait(&s.stats_landed[steps & 1], steps >> 1 & 1);
      } else {
        mbarrier_wait(&s.q_landed[q_ring.slot], q_ring.parity);
      }
      mbarrier_wait(&s.s_ready[s_slot], steps / T.s_slots() & 1);
      tcgen05_fence_after();
      const bool masks = visibility.masks(step.m_block);
      float x[kChunks][kChunk];
      if constexpr (!T.makes_dv()) {  // all at once: dQ waits for the place
#pragma unroll
        for (int c = 0; c < kChunks; ++c) tmem_load(x[c], scores_at + c * kChunk);
        tmem_wait_load(x);
        signal(&s.s_empty);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if constexpr (T.makes_dv()) {
          tmem_load(x[c], scores_at + c * kChunk);
          tmem_wait_load(x[c]);
        }
        if constexpr (T.softcap) apply_softcap<true>(x[c], p);
        if (masks) visibility.apply_mask(x[c], query + c * kChunk);
        u32 rounded[kChunk / 2];
        make_probabilities<T>(x[c], rounded, stats + c * kChunk, kept[c], of_head, p, query + c * kChunk, key);
        fence_operand(x[c]);
        if constexpr (T.makes_dv()) tmem_store(scores_at + c * (kChunk / 2), rounded);
      }
      if constexpr (T.makes_dv()) signal(&s.p_ready[s_slot]);
      if constexpr (!T.makes_dk()) continue;
      mbarrier_wait(&s.dp_ready, steps & 1);
      tcgen05_fence_after();
      const int ds_at = opaque(ds_first);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float dp[kChunk];
        u32 ds[kChunk / 2];
        tmem_load(dp, dp_scores + c * kChunk);
        tmem_wait_load(dp);
        make_ds<T>(ds, x[c], dp, stats + T.tile_m + c * kChunk, kept[c], p);
        tmem_store(dp_scores + c * (kChunk / 2), ds);
#pragma unroll
        for (int n = 0; n < 4; ++n)
          ds_smem[ds_at ^ (4 * c + n)] = {{ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3]}};
      }
      fence_proxy_async();
      if constexpr (T.pair) send_ds(s, index, warp);
      signal(&s.ds_ready, index == rank_of_cta<T>());
    }
    if (any) {
      mbarrier_wait(&s.sums_ready, summed & 1);
      ++summed;
    }
    store_tile<T>(p, s, index, any);
    if (index == 0 && warp == 0 && elect_one()) tma_store_wait_read();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.kv_empty);
  }
  if (index == 0 && warp == 0 && elect_one()) tma_store_wait();
}
