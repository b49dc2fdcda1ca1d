// An MMA warpgroup of the Blackwell backward. The warpgroup loads S and dP from tensor memory, computes P and dS
// (dsoftmax.cuh), and stores both for the next products. A thread has one key and its warpgroup's half of an
// iteration's queries.
#pragma once
#include "device/dropout.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "score_grads/captured_sums.cuh"
#include "sm100/backward/dsoftmax.cuh"
#include "sm100/backward/epilogue.cuh"
#include "sm100/backward/smem.cuh"
#include "sm100/backward/step_ds.cuh"
#include "sm100/backward/step_probabilities.cuh"

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
  if constexpr (T.options.dropout) dropout = Dropout(p.dropout);
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
      if constexpr (T.options.dropout) {  // drawn while S is multiplied
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          keep_mask[c] = dropout.of_column(query + c * StepAt<T>::kNextRun,
                                           dropout_head<T>(p, sequence.sequence, step.head), key, lane);
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
      [[maybe_unused]] const float sum = step_ds(x, at, s, dp_scores, {ds_smem, opaque(ds_first)}, steps);
      if constexpr (T.two_cta) {
        send_ds(s, index, warp);
      } else {
        signal<T>(&s.ds_ready);
      }
      if constexpr (T.captured_per_tile)
        add_tile<T, T.kCtaKeys>(p, sequence, step.head, step.m_block, first_key / T.kCtaKeys, sum);
    }
    if (any) wait_for_gradients(s, steps, summed);
    store_tile<T>(p, s, index, any);
    if (index == 0 && warp == 0 && elect_one()) tma_store_wait_read();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.kv_empty);
  }
  if (index == 0 && warp == 0 && elect_one()) tma_store_wait();
}
