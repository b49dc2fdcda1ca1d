// An MMA warpgroup of the Blackwell backward: P from S and dS from dP (dsoftmax.cuh), read from tensor memory and
// stored for the next products. A thread has one key and its warpgroup's half of an iteration's queries.
#pragma once
#include "device/dropout.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "score_grads/captured_sums.cuh"
#include "sm100/backward/dsoftmax.cuh"
#include "sm100/backward/epilogue.cuh"
#include "sm100/backward/smem.cuh"

// The destination of a warpgroup's dS: keys in rows of 64 queries. In a CTA pair each CTA needs all keys, but only half
// of the queries; the other half is sent.
template <Sm100BackwardConfig T>
TANDEM_DEVICE u16* ds_place(SharedStorage<T>& s, int index) {
  constexpr int kHalf = T.kCtaKeys * T.queries_of_warpgroup();
  if constexpr (T.two_cta) {
    if (index != cta_rank<T>()) return s.ds_sent;
  }
  if constexpr (T.makes_dk()) return s.ds + index * kHalf;
  return nullptr;
}
// Signals the leader for a warp's rows of the own half, or sends its rows of the other half.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void send_ds(SharedStorage<T>& s, int index, int warp) {
  const int rank = cta_rank<T>();
  __syncwarp();
  if (!elect_one()) return;
  if (index == rank) return arrive_at_leader<T>(&s.two_cta.ds_written, true);
  constexpr int kOfWarp = 32 * T.queries_of_warpgroup();
  bulk_send(s.ds + rank * (4 * kOfWarp) + warp * kOfWarp, s.ds_sent + warp * kOfWarp, 2 * kOfWarp,
            &s.two_cta.ds_tma_full, rank ^ 1);
}

// Signals that a warp has written tensor memory; written: shared memory, too.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void signal(u64* barrier, bool written = false) {
  tmem_wait_store();
  tcgen05_fence_before();
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive_at_leader<T>(barrier, written);
}

// Computes P of an iteration from S at column scores_at, and overwrites S with the rounded P.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void step_probabilities(float (&x)[StepAt<T>::kChunks][kChunk], const StepAt<T>& at, SharedStorage<T>& s,
                                      u32 scores_at, u32 s_slot, bool hides) {
  constexpr int kChunks = StepAt<T>::kChunks, kNextRun = StepAt<T>::kNextRun;
  u32 rounded[kChunks][kChunk / 2];
  auto to_probabilities = [&](int c, int begin, int end) {
    if constexpr (T.softcap) {
      begin == 0 && end == kChunk ? apply_softcap<true>(x[c], at.p) : apply_softcap<true>(half_of(x[c], begin), at.p);
    }
    if (hides) at.visibility.apply_mask(x[c], at.query + c * kNextRun, begin, end);
    if constexpr (T.branches_at_scores()) {
      const int query = at.query + c * kNextRun;
      if (hides && !warp_any(at.visibility.sees_some(query + begin, query + end)))
        return no_probabilities(x[c], rounded[c], begin, end);
    }
    make_probabilities(x[c], rounded[c], at, c, begin, end);
  };
  auto store_probabilities = [&](int c) {
    fence_operand(x[c]);
    if constexpr (T.makes_dv()) tmem_store(scores_at + c * (kChunk / 2), rounded[c]);
  };
  if constexpr (T.two_cta) {
    // Load a small first part of S, then load the rest while its exponentials are computed.
    tmem_load(half_of(x[0], 0), scores_at);
    tmem_wait_load(half_of(x[0], 0));
    tmem_load(half_of(x[0], kChunk / 2), scores_at + kChunk / 2);
    tmem_load(x[1], scores_at + kNextRun);
    to_probabilities(0, 0, kChunk / 2);
    tmem_wait_load(x);
    signal<T>(&s.s_empty);
    to_probabilities(0, kChunk / 2, kChunk);
    store_probabilities(0);
    signal<T>(&s.p_ready[0]);
    to_probabilities(1, 0, kChunk);
    store_probabilities(1);
    signal<T>(&s.p_ready[1]);
  } else {
    if constexpr (T.reads_scores_ahead()) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) tmem_load(x[c], scores_at + c * kNextRun);
      tmem_wait_load(x);
      signal<T>(&s.s_empty);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (!T.reads_scores_ahead()) {
        tmem_load(x[c], scores_at + c * kNextRun);
        tmem_wait_load(x[c]);
      }
      to_probabilities(c, 0, kChunk);
      store_probabilities(c);
    }
    if constexpr (T.makes_dv()) {
      // Orders the reads of lse and delta before TMA overwrites them. dS has its own fence.
      if constexpr (!T.makes_dk()) fence_proxy_async();
      signal<T>(&s.p_ready[s_slot]);
    }
  }
}

// Computes dS of an iteration from dP at column dp_at, and overwrites dP; also stores it to shared memory in chunks of
// 16 bytes. Returns the thread's sum if it is wanted.
template <Sm100BackwardConfig T>
TANDEM_DEVICE float step_ds(const float (&x)[StepAt<T>::kChunks][kChunk], const StepAt<T>& at, SharedStorage<T>& s,
                            u32 dp_at, Chunk* ds_smem, int ds_at, u32 steps) {
  constexpr int kChunks = StepAt<T>::kChunks;
  u32 ds[kChunks][kChunk / 2];
  Float2 sum = float2_of(0.0f);
  auto write_ds = [&](int c) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      ds_smem[ds_at ^ (4 * c + n)] = {{ds[c][4 * n], ds[c][4 * n + 1], ds[c][4 * n + 2], ds[c][4 * n + 3]}};
  };
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float dp[kChunk];
    tmem_load(dp, dp_at + c * StepAt<T>::kNextRun);
    tmem_wait_load(dp);
    make_ds(ds[c], x[c], dp, at, c, sum);
    tmem_store(dp_at + c * (kChunk / 2), ds[c]);
    if constexpr (!T.two_cta) write_ds(c);
  }
  if constexpr (T.two_cta) {
    fence_proxy_async();  // TMA may overwrite lse and delta after dK
    signal<T>(&s.ds_ready);
    mbarrier_wait(s.dq_ready, (steps & 1) ^ 1);  // previous dQ has read dS, in both CTAs
#pragma unroll
    for (int c = 0; c < kChunks; ++c) write_ds(c);
  }
  fence_proxy_async();
  if constexpr (!T.captured_per_tile) return 0;
  float even, odd;
  split(sum, &even, &odd);
  return even + odd;
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void compute(const BackwardParams& p, SharedStorage<T>& s, int index) {
  constexpr int kChunks = StepAt<T>::kChunks;
  const int warp = warp_uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32, row = threadIdx.x % 128;
  // The first query of an iteration, and the first column in S and dP.
  const int first_query = T.run_begin(index, 0);
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  const u32 scores = lanes + T.tmem_s() + first_query, dp_scores = lanes + T.tmem_dp() + first_query;
  // The warpgroup's queries are a block of 64 columns of dS in shared memory.
  static_assert(T.queries_of_warpgroup() == 64);
  auto* const ds_smem = reinterpret_cast<Chunk*>(ds_place(s, index));
  const int ds_first = row * 8 + (row & 7);  // chunk 0 of the row, swizzled
  Dropout dropout;
  if constexpr (T.dropout) dropout = Dropout(p.dropout);
  PipelineState<T.q_stages> q_ring;
  u32 steps = 0, summed = 0;
  for (u32 tile_idx = 0;; ++tile_idx) {
    const NBlockWork tile = wait_for_tile(s, tile_idx);
    if (tile.n_block < 0) break;
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    const int first_key = first_key_of<T>(tile), key = first_key + row;
    const Visibility<T> visibility(p, sequence, first_key, key);
    MBlockIterator<T> step(p, tile);
    const bool any = warp_any(step.left > 0);
#pragma unroll 1
    for (; warp_any(step.left > 0); step.advance(), q_ring.advance(), ++steps) {
      HeadScores<T> of_head(p, sequence, step.head);
      of_head.state = block_state<T>(p, sequence, step.head, step.m_block, tile.n_block, cta_rank<T>());
      const int query = step.m_block * T.tile_m + first_query;
      const float* const lse_delta = s.lse_delta[T.lse_delta_alone() ? steps & 1 : q_ring.index] + first_query;
      const u32 s_slot = steps % T.s_slots(), scores_at = scores + s_slot * T.tile_m;
      u32 keep_mask[kChunks] = {};
      if constexpr (T.dropout) {  // drawn while S is multiplied
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          keep_mask[c] =
              dropout.of_column(query + c * StepAt<T>::kNextRun, sequence.sequence * p.heads_q + step.head, key, lane);
      }
      const StepAt<T> at{p, visibility, of_head, keep_mask, lse_delta, query, key};
      if constexpr (T.lse_delta_alone()) {
        mbarrier_wait(&s.lse_delta_tma_full[steps & 1], steps >> 1 & 1);
      } else {
        mbarrier_wait(&s.q_tma_full[q_ring.index], q_ring.phase);
      }
      mbarrier_wait(&s.s_ready[s_slot], steps / T.s_slots() & 1);
      tcgen05_fence_after();
      const bool masks = visibility.masks(step.m_block);
      float x[kChunks][kChunk];
      // Iterations without a mask have separate code, because branches would keep instructions from overlapping. Score
      // options are too long for two copies.
      if (T.has_score_mod()) {
        step_probabilities(x, at, s, scores_at, s_slot, masks);
      } else if (masks) {
        step_probabilities(x, at, s, scores_at, s_slot, true);
      } else {
        step_probabilities(x, at, s, scores_at, s_slot, false);
      }
      if constexpr (!T.makes_dk()) continue;
      mbarrier_wait(&s.dp_ready, steps & 1);
      tcgen05_fence_after();
      [[maybe_unused]] const float sum = step_ds(x, at, s, dp_scores, ds_smem, opaque(ds_first), steps);
      if constexpr (T.two_cta) {
        send_ds(s, index, warp);
      } else {
        signal<T>(&s.ds_ready);
      }
      if constexpr (T.captured_per_tile)
        add_tile<T, T.kCtaKeys>(p, sequence, step.head, step.m_block, first_key / T.kCtaKeys, sum);
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
