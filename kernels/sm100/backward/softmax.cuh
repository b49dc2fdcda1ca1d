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

constexpr int kChunk = Sm100BackwardConfig::kRun;  // queries whose scores are loaded together

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
  // Scores [begin, end) of queries from first on that the key is not seen by become -infinity. Queries that there are
  // not have probabilities of 0 by their lse.
  TANDEM_DEVICE void apply_mask(float (&x)[kChunk], int first, int begin, int end) const {
    const int first_seen = clamp(seen.begin - first, 0, kChunk);
    const int seen_end = T.left ? clamp(seen.end - first, first_seen, kChunk) : kChunk;
    const u32 visible = bit_range(first_seen, seen_end - first_seen);
#pragma unroll
    for (int n = begin; n < end; ++n) x[n] = masked_score(visible, n, x[n]);
  }
};

// Of the n-th query of a chunk: what dropout leaves of a probability, or of the derivative by it.
template <Sm100BackwardConfig T>
TANDEM_DEVICE float kept_or_zero(u32 kept, int n, float x) {
  return !T.dropout || is_kept(kept, n) ? x : 0.0f;
}

// Half of a chunk.
TANDEM_DEVICE float (&half_of(float (&x)[kChunk], int begin))[kChunk / 2] {
  return reinterpret_cast<float(&)[kChunk / 2]>(x[begin]);
}

// Scores [begin, end) become probabilities, in float32 and, two in a word, rounded; where a score is capped, the former
// times its derivative. minus_lse: of the chunk's queries. kept: which of them dropout keeps, the rounded ones only.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void make_probabilities(float (&x)[kChunk], u32 (&rounded)[kChunk / 2], int begin, int end,
                                      const float* minus_lse, u32 kept, const HeadScores<T>& of_head,
                                      const BackwardParams& p, int query, int key) {
  auto round = [&](int n) {
    rounded[n / 2] = pack<T>(kept_or_zero<T>(kept, n, x[n]), kept_or_zero<T>(kept, n + 1, x[n + 1]));
  };
#pragma unroll
  for (int n = begin; n < end; n += 4) {
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
// A warp's rows of the own half are told to the leader, those of the other half go to the other CTA.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void send_ds(BackwardShared<T>& s, int index, int warp) {
  const int rank = rank_of_cta<T>();
  __syncwarp();
  if (!elect_one()) return;
  if (index == rank) return arrive_at_leader<T>(&s.pair.ds_written, true);
  constexpr int kOfWarp = 32 * T.queries_of_warpgroup();
  bulk_send(s.ds + rank * (4 * kOfWarp) + warp * kOfWarp, s.ds_sent + warp * kOfWarp, 2 * kOfWarp, &s.pair.ds_landed,
            rank ^ 1);
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void compute(const BackwardParams& p, BackwardShared<T>& s, int index) {
  constexpr int kChunks = T.queries_of_warpgroup() / kChunk;
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32, row = threadIdx.x % 128;
  // Of a step, and in columns of S and dP.
  const int first_query = T.run_begin(index, 0);
  constexpr int kNextRun = T.run_begin(0, 1);
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
    KeySteps<T> step(p, tile);
    const bool any = warp_any(step.left > 0);
#pragma unroll 1
    for (; warp_any(step.left > 0); step.advance(), q_ring.advance(), ++steps) {
      HeadScores<T> of_head(p, sequence, step.head);
      of_head.state = step_state<T>(p, sequence, step.head, step.m_block, tile.n_block, rank_of_cta<T>());
      const int query = step.m_block * T.tile_m + first_query;
      const float* const stats = s.stats[T.stats_alone() ? steps & 1 : q_ring.slot] + first_query;
      const u32 s_slot = steps % T.s_slots(), scores_at = scores + s_slot * T.tile_m;
      u32 kept[kChunks] = {};
      if constexpr (T.dropout) {  // drawn while S is multiplied
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          kept[c] = dropout.of_column(query + c * kNextRun, sequence.sequence * p.heads_q + step.head, key, lane);
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
      u32 rounded[kChunks][kChunk / 2];
      auto to_probabilities = [&](bool hides, int c, int begin, int end) {
        const int first = query + c * kNextRun;
        if constexpr (T.softcap) {
          begin == 0 && end == kChunk ? apply_softcap<true>(x[c], p) : apply_softcap<true>(half_of(x[c], begin), p);
        }
        if (hides) visibility.apply_mask(x[c], first, begin, end);
        make_probabilities<T>(x[c], rounded[c], begin, end, stats + c * kNextRun, kept[c], of_head, p, first, key);
      };
      auto store_probabilities = [&](int c) {
        fence_operand(x[c]);
        if constexpr (T.makes_dv()) tmem_store(scores_at + c * (kChunk / 2), rounded[c]);
      };
      auto probabilities = [&](bool hides) {
        if constexpr (T.pair) {
          // What of the scores is there first is small, and the rest comes under its exponentials.
          tmem_load(half_of(x[0], 0), scores_at);
          tmem_wait_load(half_of(x[0], 0));
          tmem_load(half_of(x[0], kChunk / 2), scores_at + kChunk / 2);
          tmem_load(x[1], scores_at + kNextRun);
          to_probabilities(hides, 0, 0, kChunk / 2);
          tmem_wait_load(x);
          signal(&s.s_empty);
          to_probabilities(hides, 0, kChunk / 2, kChunk);
          store_probabilities(0);
          signal(&s.p_ready[0]);
          to_probabilities(hides, 1, 0, kChunk);
          store_probabilities(1);
          signal(&s.p_ready[1]);
        } else {
          if constexpr (T.reads_scores_ahead()) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) tmem_load(x[c], scores_at + c * kNextRun);
            tmem_wait_load(x);
            signal(&s.s_empty);
          }
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            if constexpr (!T.reads_scores_ahead()) {
              tmem_load(x[c], scores_at + c * kNextRun);
              tmem_wait_load(x[c]);
            }
            to_probabilities(hides, c, 0, kChunk);
            store_probabilities(c);
          }
          if constexpr (T.makes_dv()) signal(&s.p_ready[s_slot]);
        }
      };
      // Steps without a mask have code of their own: branches within would keep instructions apart. Changes of scores
      // are too long for that.
      if (T.has_score_mod()) {
        probabilities(masks);
      } else if (masks) {
        probabilities(true);
      } else {
        probabilities(false);
      }
      if constexpr (!T.makes_dk()) continue;
      mbarrier_wait(&s.dp_ready, steps & 1);
      tcgen05_fence_after();
      const int ds_at = opaque(ds_first);
      u32 ds[kChunks][kChunk / 2];
      auto write_ds = [&](int c) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
          ds_smem[ds_at ^ (4 * c + n)] = {{ds[c][4 * n], ds[c][4 * n + 1], ds[c][4 * n + 2], ds[c][4 * n + 3]}};
      };
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float dp[kChunk];
        tmem_load(dp, dp_scores + c * kNextRun);
        tmem_wait_load(dp);
        make_ds<T>(ds[c], x[c], dp, stats + T.tile_m + c * kNextRun, kept[c], p);
        tmem_store(dp_scores + c * (kChunk / 2), ds[c]);
        if constexpr (!T.pair) write_ds(c);
      }
      if constexpr (T.pair) {
        signal(&s.ds_ready);
        mbarrier_wait(s.dq_ready, (steps & 1) ^ 1);  // of the step before: it has read dS, here and there
#pragma unroll
        for (int c = 0; c < kChunks; ++c) write_ds(c);
      }
      fence_proxy_async();
      if constexpr (T.pair) {
        send_ds(s, index, warp);
      } else {
        signal(&s.ds_ready);
      }
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
