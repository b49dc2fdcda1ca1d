// The schedule shared_p of the Hopper backward, for wide heads: P and dS go through shared memory.
#pragma once
#include "sm90/backward/dq_accumulate.cuh"
#include "sm90/backward/mma.cuh"

// Wide heads, after scores are complete and with dP in flight: stores P to shared memory, issues dV and waits for dP.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void probabilities_and_dv(float (&dv)[T.dv_columns() / 2], float (&scores)[T.score_queries() / 2],
                                        const Prefetched<T>& prefetched, const WarpgroupTile<T>& tile,
                                        WarpgroupRings<T>& rings, const WarpgroupSteps<T>& at) {
  SharedStorage<T>& s = tile.s;
  u32 probabilities[T.score_queries() / 4];
  make_probabilities(scores, probabilities, prefetched, tile, rings, at);
  store_fragments(shared_address(s.p[0]), probabilities, tile);
  fence_proxy_async();
  named_sync(kBarAllMma, 128 * T.warpgroups);
  mma_dv(dv, probabilities, tile, rings);
  wgmma_wait<1>();
}

// Waits for dV and releases the iteration's dout, LSE and delta.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void finish_dv(float (&dv)[T.dv_columns() / 2], const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings) {
  fence_proxy_async();  // the next TMA load may overwrite delta
  wgmma_wait<0>();
  fence_operand(dv);
  arrive(&tile.s.dout_empty[rings.dout.index]);
  rings.dout.advance();
}

// The schedule shared_p for wide heads: all warpgroups share the same keys, and each has separate queries of an
// iteration. The warpgroups synchronize after P has been stored and after dS has been stored.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mainloop_shared_p(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
                                     float (&dk)[T.dk_columns() / 2], float (&dv)[T.dv_columns() / 2]) {
  SharedStorage<T>& s = tile.s;
  float scores[T.score_queries() / 2], dp[T.score_queries() / 2];
  u32 ds[T.score_queries() / 4];
  Prefetched<T> prefetched;
  prefetch_iteration(prefetched, tile, at);
#pragma unroll 1
  for (int left = at.count; warp_any(left > 0); --left) {
    mma_s(scores, tile, rings, at.m_block);
    mma_dp(dp, prefetched, tile, rings, at.m_block);
    draw_dropout_mask(prefetched, tile, at);
    evaluate_mask_mod(prefetched, tile, at);
    wgmma_wait<1>();
    fence_operand(scores);
    probabilities_and_dv(dv, scores, prefetched, tile, rings, at);
    fence_operand(dp);
    make_ds(dp, scores, prefetched, tile, rings);
    finish_dv(dv, tile, rings);
    pack_all<T>(ds, dp);
    at.advance();
    prefetch_iteration(prefetched, tile, at);
    store_fragments(shared_address(s.ds[0]), ds, tile);
    fence_proxy_async();
    named_sync(kBarAllMma, 128 * T.warpgroups);
    float dq[T.dq_columns() / 2];
    mma_dq(dq, tile, 0);
    mma_dk(dk, ds, tile, rings);
    wgmma_wait<1>();
    fence_operand(dq);
    accumulate_dq(dq, tile, rings.steps);
    wgmma_wait<0>();
    fence_operand(dk);
    arrive(&s.q_empty[rings.q.index]);
    rings.q.advance();
    ++rings.steps;
  }
}
