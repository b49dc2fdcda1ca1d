// The main loops of the Hopper backward with warpgroup roles. One warpgroup computes scores, dS and dq, with queries in
// rows. One warpgroup sums dv and one sums dk, over all iterations of a tile. Operands pass through shared memory.
// Warpgroups wait at different places, so that products of one overlap the exponentials of another:
//
//    make_scores         | sum_steps, of dv | sum_steps, of dk
//    S = Q K'            |                  |
//    dP = dO V', during  |                  |
//      it P -> p         | dv += P' dO      |
//    dS -> ds, and to    |                  | dk += dS' Q
//      the other CTA     |                  |
//    dq of the previous  |                  |
//      iteration, then   |                  |
//      the next S        |                  |
#pragma once
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/role_scores.cuh"
#include "sm90/backward/smem.cuh"

// Sums dk (of_k) or dv.
template <Sm90BackwardConfig T, bool of_k>
TANDEM_DEVICE void sum_steps(const BackwardParams& p, SharedStorage<T>& s, int index) {
  constexpr int kColumns = of_k ? T.dk_columns() : T.dv_columns(), kLefts = of_k ? T.ds_stages() : 1;
  constexpr u32 kQueryBlock = T.tile_m * 128;
  using Mma = Wgmma<T.options.f16, kColumns>;
  const int lane = threadIdx.x % 32;
  PipelineState<of_k ? T.q_stages : T.dout_stages> ring;
  PipelineState<kLefts> left_ring;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    if (warp_uniform(s.tile.n_block) < 0) break;
    const SequenceCoords sequence = sequence_coords<T>(p, T.options.varlen ? warp_uniform(s.tile.sequence) : 0);
    float sums[kColumns / 2];
#pragma unroll
    for (float& x : sums) x = 0;
#pragma unroll 1
    for (int left = MBlockIterator<T>(p, s.tile).left; warp_any(left > 0); --left) {
      u64* const right_full = of_k ? &s.q_full[ring.index] : &s.dout_full[ring.index];
      u64* const left_full = of_k ? &s.ds_full[left_ring.index] : &s.p_full;
      mbarrier_wait(right_full, ring.phase);
      mbarrier_wait(left_full, left_ring.phase);
      const u64 a = wgmma_smem_desc(shared_address(of_k ? s.ds[left_ring.index] : s.p[0]), 16, 1024);
      const u64 b = wgmma_smem_desc(shared_address(of_k ? s.q[ring.index] : s.dout[ring.index]), kQueryBlock, 1024);
      fence_operand(sums);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < T.tile_m / 16; ++c) Mma::ss_tn(sums, a + rows_16(c), b + rows_16(c), true);
      wgmma_commit();
      wgmma_wait<0>();
      fence_operand(sums);
      if (lane == 0) {
        mbarrier_arrive(of_k ? &s.q_empty[ring.index] : &s.dout_empty[ring.index]);
        mbarrier_arrive(of_k ? &s.ds_empty[left_ring.index] : &s.p_empty);
      }
      ring.advance();
      left_ring.advance();
    }
    const KeyEpilogue<T> epilogue(p, s, sequence, index);
    release_kv<T>(s, index);
    epilogue.template store<of_k>(sums);
  }
}

// Sends dS of each iteration to the other CTA, by one thread, after that CTA has read dS of two iterations earlier.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void send_ds(const BackwardParams& p, SharedStorage<T>& s) {
  const int rank = cta_rank<T>();
  PipelineState<T.ds_stages()> ring;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    if (s.tile.n_block < 0) break;
    int left = MBlockIterator<T>(p, s.tile).left;
    mbarrier_arrive(&s.kv_empty);
    for (; left > 0; --left, ring.advance()) {
      mbarrier_wait(&s.ds_full[ring.index], ring.phase);
      mbarrier_expect_tx(&s.cluster2.ds_peer_full[ring.index], sizeof s.ds[0]);
      bulk_send(s.cluster2.ds[ring.index], s.ds[ring.index], sizeof s.ds[0], &s.cluster2.ds_peer_full[ring.index],
                rank ^ 1);
    }
  }
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void make_scores(const BackwardParams& p, SharedStorage<T>& s) {
  RoleState<T> state;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    const int n_block = warp_uniform(s.tile.n_block) * T.ctas() + state.rank;
    if (n_block < 0) break;
    mbarrier_wait(&s.v_full, tile_idx & 1);
    const RoleTile<T> tile(p, s, state, n_block);
    float scores[T.cta_keys() / 2], dp[T.cta_keys() / 2];
    float dq_first[T.kDqFirst / 2], dq_rest[T.kDqRest / 2];
    MBlockIterator<T> at(p, s.tile);
    // An iteration extends from dS to the next dS. At the loop's start no product is in flight.
    auto step = [&](bool more, bool previous) __attribute__((always_inline)) {
      tile.make_ds(scores, dp);
      at.advance();
      if (previous) tile.mma_dq(dq_first, dq_rest, state.steps - 2);
      if (more) {
        tile.mma_s(scores, at.m_block);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (previous) tile.accumulate_dq(dq_first, dq_rest, state.steps - 2);
      if (more) {
        tile.mma_dp(dp, at.m_block);
        wgmma_wait<1>();
        tile.make_probabilities(scores, dp, at.m_block);
      }
    };
    const int count = at.left;
    if (warp_any(count > 0)) {
      tile.mma_s(scores, at.m_block);
      tile.mma_dp(dp, at.m_block);
      wgmma_wait<1>();
      tile.make_probabilities(scores, dp, at.m_block);
      if (warp_any(count > 1)) step(true, false);
#pragma unroll 1
      for (int left = count - 1; warp_any(left > 1); --left) step(true, true);
      if (warp_any(count > 1)) {
        step(false, true);
      } else {
        step(false, false);
      }
      tile.mma_dq(dq_first, dq_rest, state.steps - 1);
      wgmma_wait<0>();
      tile.accumulate_dq(dq_first, dq_rest, state.steps - 1);
    }
    release_kv<T>(s, RoleState<T>::kIndex);
  }
}
