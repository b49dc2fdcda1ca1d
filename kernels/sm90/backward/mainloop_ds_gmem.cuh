// The schedule ds_gmem of the Hopper backward, for wide heads. dS goes to global memory (ds_store.cuh), a chunk at a
// time, and a second kernel computes dq from it (dq_kernel.cuh):
//
//    launches     backward, chunk 0 | dq, chunk 0 | backward, chunk 1 | dq, chunk 1 | ...
#pragma once
#include "sm90/backward/mma.cuh"

// Products follow each other without a gap: dV, dK, then the next S and dP, which overlap the computation of P.
// Warpgroups synchronize after P has been stored and after dS has been stored. P and dS are double-buffered.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mainloop_ds_gmem(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
                                    float (&dk)[T.dk_columns() / 2], float (&dv)[T.dv_columns() / 2]) {
  SharedStorage<T>& s = tile.s;
  float scores[T.score_queries() / 2], dp[T.score_queries() / 2];
  u32 probabilities[T.score_queries() / 4], ds[T.score_queries() / 4];
  Prefetched<T> prefetched;
  auto probabilities_and_dv = [&] {
    fence_operand(scores);
    make_probabilities(scores, probabilities, prefetched, tile, rings, at);
    store_fragments(shared_address(s.p[rings.steps & 1]), probabilities, tile);
    fence_proxy_async();
    named_sync(kBarAllMma, 128 * T.warpgroups);
    mma_dv(dv, probabilities, tile, rings);
    wgmma_wait<1>();
    fence_operand(dp);
  };
  // An iteration extends from dS to the next dS.
  auto step = [&](bool more) __attribute__((always_inline)) {
    const int slot = rings.steps & 1;
    make_ds(dp, scores, prefetched, tile, rings);
    pack_all<T>(ds, dp);
    mbarrier_wait(&s.ds_empty[slot], (rings.steps >> 1 & 1) ^ 1);
    store_fragments(shared_address(s.ds[slot]), ds, tile);
    fence_proxy_async();
    __syncwarp();
    arrive(&s.ds_full[slot]);
    named_sync(kBarAllMma, 128 * T.warpgroups);
    mma_dk(dk, ds, tile, rings);
    at.advance();
    prefetch_iteration(prefetched, tile, at);
    if (more) {
      mma_s(scores, tile, rings, at.m_block);
      wgmma_wait<2>();
    } else {
      wgmma_wait<1>();
    }
    fence_operand(dv);
    arrive(&s.dout_empty[rings.dout.index]);
    rings.dout.advance();
    if (more) {
      mma_dp(dp, prefetched, tile, rings, at.m_block);
      draw_dropout_mask(prefetched, tile, at);
      evaluate_mask_mod(prefetched, tile, at);
      wgmma_wait<2>();
    } else {
      wgmma_wait<0>();
    }
    fence_operand(dk);
    arrive(&s.q_empty[rings.q.index]);
    rings.q.advance();
    ++rings.steps;
    if (more) {
      wgmma_wait<1>();
      probabilities_and_dv();
    }
  };
  first_scores(scores, dp, prefetched, tile, rings, at);
  probabilities_and_dv();
#pragma unroll 1
  for (int left = at.count; warp_any(left > 1); --left) step(true);
  step(false);
}
