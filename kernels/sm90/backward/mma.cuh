// The products of an iteration of the Hopper backward if each MMA warpgroup computes S, dP, dv, dk and dq. This file
// issues and commits the products; the main loops wait for them (mainloop_*.cuh).
#pragma once
#include "sm90/backward/dsoftmax.cuh"
#include "sm90/backward/warpgroup_tile.cuh"

// Issues S = K Q' after the queries have arrived. there: the caller knows that they have arrived.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mma_s(float (&scores)[T.score_queries() / 2], const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings,
                         int m_block, bool is_last = true, bool there = false) {
  SharedStorage<T>& s = tile.s;
  PipelineState<T.q_stages>& q_next = rings.q_next;
  if (!there) mbarrier_wait(&s.q_full[q_next.index], q_next.phase);
  tile.clear(s.q[q_next.index], T.tile_m, T.head_dim, tile.sequence.q_len - m_block * T.tile_m);
  multiply_rows<Wgmma<T.options.f16, T.score_queries()>, kKeyBlockBytes<T>, kQueryBlockBytes<T>>(
      scores, shared_address(s.k) + tile.thread.own_keys, shared_address(s.q[q_next.index]) + tile.first_query * 128,
      T.head_dim);
  if (is_last) q_next.advance();
}

// Issues dP = V dO' after dout and the log-sum-exp of its queries have arrived.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mma_dp(float (&dp)[T.score_queries() / 2], Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                          const WarpgroupRings<T>& rings, int m_block, bool there = false) {
  SharedStorage<T>& s = tile.s;
  const PipelineState<T.dout_stages>& dout_ring = rings.dout;
  if (!there) mbarrier_wait(&s.dout_full[dout_ring.index], dout_ring.phase);
  tile.clear(s.dout[dout_ring.index], T.tile_m, T.head_dim_v, tile.sequence.q_len - m_block * T.tile_m);
  preload_lse(prefetched, tile, rings);
  multiply_rows<Wgmma<T.options.f16, T.score_queries()>, kKeyBlockBytes<T>, kQueryBlockBytes<T>>(
      dp, shared_address(s.v) + tile.thread.own_keys, shared_address(s.dout[dout_ring.index]) + tile.first_query * 128,
      T.head_dim_v);
}

// The queries that one product for dk or dv sums over: an iteration's, or a subtile's. offset: their place in the
// operand at the warpgroup's columns.
template <Sm90BackwardConfig T>
constexpr int kSummedQueries = T.q_subtiles() ? T.score_queries() : T.tile_m;
template <Sm90BackwardConfig T>
TANDEM_DEVICE u32 first_summed(const WarpgroupTile<T>& tile, int columns) {
  return tile.thread.own_columns(columns) + (T.q_subtiles() ? tile.first_query * 128 : 0);
}

// Issues dv += P dO. P comes from registers, or from shared memory if all warpgroups share the keys.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mma_dv(float (&dv)[T.dv_columns() / 2], const u32 (&probabilities)[T.score_queries() / 4],
                          const WarpgroupTile<T>& tile, const WarpgroupRings<T>& rings) {
  using DvMma = Wgmma<T.options.f16, T.dv_columns()>;
  const u32 place = shared_address(tile.s.dout[rings.dout.index]) + first_summed(tile, T.dv_columns());
  const u64 dout = wgmma_smem_desc(place, kQueryBlockBytes<T>, 1024);
  const u64 p_smem = wgmma_smem_desc(shared_address(tile.s.p[T.ds_gmem() ? rings.steps & 1 : 0]), 16, 1024);
  fence_operand(dv);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < kSummedQueries<T> / 16; ++c) {
    if constexpr (T.shared_p()) {
      DvMma::ss_nn(dv, p_smem + in_row(c, kKeyBlockBytes<T>), dout + rows_16(c), true);
    } else {
      DvMma::rs_nn(dv, probabilities + 4 * c, dout + rows_16(c), true);
    }
  }
  wgmma_commit();
}

// Issues dk += dS Q, with the same operand sources.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mma_dk(float (&dk)[T.dk_columns() / 2], const u32 (&ds)[T.score_queries() / 4],
                          const WarpgroupTile<T>& tile, const WarpgroupRings<T>& rings) {
  using DkMma = Wgmma<T.options.f16, T.dk_columns()>;
  const u32 place = shared_address(tile.s.q[rings.q.index]) + first_summed(tile, T.dk_columns());
  const u64 q = wgmma_smem_desc(place, kQueryBlockBytes<T>, 1024);
  const u64 ds_smem = wgmma_smem_desc(shared_address(tile.s.ds[T.ds_gmem() ? rings.steps & 1 : 0]), 16, 1024);
  fence_operand(dk);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < kSummedQueries<T> / 16; ++c) {
    if constexpr (T.shared_p()) {
      DkMma::ss_nn(dk, ds_smem + in_row(c, kKeyBlockBytes<T>), q + rows_16(c), true);
    } else {
      DkMma::rs_nn(dk, ds + 4 * c, q + rows_16(c), true);
    }
  }
  wgmma_commit();
}

// Issues dq of 64 queries over these columns and the CTA's keys, or the other CTA's keys in a pair. adds: accumulates
// to dq.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mma_dq_of(float (&dq)[T.dq_columns() / 2], u32 ds, u32 keys, bool adds) {
  using DqMma = Wgmma<T.options.f16, T.dq_columns()>;
  const u64 a = wgmma_smem_desc(ds, kKeyBlockBytes<T>, 1024);
  const u64 b = wgmma_smem_desc(keys, kKeyBlockBytes<T>, 1024);
  if (adds) {
    fence_operand(dq);
  } else {
    discard(dq);
  }
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < T.cta_keys() / 16; ++c) DqMma::ss_tn(dq, a + rows_16(c), b + rows_16(c), adds || c > 0);
  wgmma_commit();
}

// Issues the warpgroup's part of dq of the iteration whose dS is in the slot.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mma_dq(float (&dq)[T.dq_columns() / 2], const WarpgroupTile<T>& tile, int slot) {
  constexpr bool kByColumns = T.dq_row_parts() == 1;
  const int row_part = kByColumns ? 0 : tile.thread.index, column = kByColumns ? tile.thread.index * T.dq_columns() : 0;
  mma_dq_of<T>(dq, shared_address(tile.s.ds[slot]) + row_part * kKeyBlockBytes<T>,
               shared_address(tile.s.k) + column / 64 * kKeyBlockBytes<T> + column % 64 * 2, false);
}

// Keys are in rows: the warpgroup has separate rows and columns.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void store_fragments(u32 to, const u32 (&fragments)[T.score_queries() / 4],
                                   const WarpgroupTile<T>& tile) {
#pragma unroll
  for (int n = 0; n < T.score_queries() / 16; ++n)
    stmatrix(fragment_at<T>(to + tile.thread.own_keys, tile.first_query / 16 + n),
             {fragments[4 * n], fragments[4 * n + 1], fragments[4 * n + 2], fragments[4 * n + 3]});
}

// Computes S and dP of a tile's first iteration, or of its first subtile. Afterwards S is complete, and dP is in
// flight.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void first_scores(float (&scores)[T.score_queries() / 2], float (&dp)[T.score_queries() / 2],
                                Prefetched<T>& prefetched, const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings,
                                const WarpgroupSteps<T>& at) {
  prefetch_iteration(prefetched, tile, at);
  mma_s(scores, tile, rings, at.m_block, !T.q_subtiles());
  mma_dp(dp, prefetched, tile, rings, at.m_block);
  draw_dropout_mask(prefetched, tile, at);
  evaluate_mask_mod(prefetched, tile, at);
  wgmma_wait<1>();
}
