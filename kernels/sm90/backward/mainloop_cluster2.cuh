// The schedule cluster2 of the Hopper backward: two CTAs have 64 keys each and exchange dS. Each CTA computes half of
// dq's columns over the keys of both CTAs, because additions to dq limit head_dim 256:
//
//    CTA 0        keys 0..63,   dS ->  | dq[:, :128] = dS' K[:64, :128] + (dS of CTA 1)' K[64:, :128]
//    CTA 1        keys 64..127, dS ->  | dq[:, 128:] = (dS of CTA 0)' K[:64, 128:] + dS' K[64:, 128:]
#pragma once
#include "ptx/cluster.cuh"
#include "sm90/backward/mainloop_shared_p.cuh"

// An iteration extends to the next scores, whose product runs while dq is added.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mainloop_cluster2(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
                                     float (&dk)[T.dk_columns() / 2], float (&dv)[T.dv_columns() / 2]) {
  SharedStorage<T>& s = tile.s;
  const int rank = tile.thread.rank, index = tile.thread.index;
  float scores[T.score_queries() / 2], dp[T.score_queries() / 2];
  u32 ds[T.score_queries() / 4];
  Prefetched<T> prefetched;
  auto step = [&](bool more) __attribute__((always_inline)) {
    mma_dp(dp, prefetched, tile, rings, at.m_block);
    draw_dropout_mask(prefetched, tile, at);
    evaluate_mask_mod(prefetched, tile, at);
    probabilities_and_dv(dv, scores, prefetched, tile, rings, at);
    fence_operand(dp);
    make_ds(dp, scores, prefetched, tile, rings);
    finish_dv(dv, tile, rings);
    pack_all<T>(ds, dp);
    mbarrier_wait(&s.cluster2.ds_read, (rings.steps & 1) ^ 1);  // the other CTA has read dS of the previous iteration
    store_fragments(shared_address(s.ds[0]), ds, tile);
    fence_proxy_async();
    named_sync(kBarAllMma, 128 * T.warpgroups);
    if (index == 0 && tile.thread.warp == 0 && elect_one()) {
      mbarrier_expect_tx(&s.cluster2.ds_peer_full[0], sizeof s.cluster2.ds[0]);
      bulk_send(s.cluster2.ds[0], s.ds[0], sizeof s.cluster2.ds[0], &s.cluster2.ds_peer_full[0], rank ^ 1);
    }
    float dq[T.dq_columns() / 2];
    mma_dq_of<T>(dq, shared_address(s.ds[0]), shared_address(s.k) + (rank * T.warpgroups + index) * kKeyBlockBytes<T>,
                 false);
    mma_dk(dk, ds, tile, rings);
    at.advance();
    prefetch_iteration(prefetched, tile, at);
    mbarrier_wait(&s.cluster2.ds_peer_full[0], rings.steps & 1);
    mma_dq_of<T>(dq, shared_address(s.cluster2.ds[0]), shared_address(s.cluster2.k) + index * kKeyBlockBytes<T>, true);
    if (more) mma_s(scores, tile, rings, at.m_block);
    wgmma_wait<1>();
    if (!more) wgmma_wait<0>();
    fence_operand(dk);
    fence_operand(dq);
    __syncwarp();
    arrive(&s.q_empty[rings.q.index]);
    rings.q.advance();
    if (tile.thread.lane == 0) mbarrier_arrive_at(&s.cluster2.ds_read, rank ^ 1);
    accumulate_dq(dq, tile, rings.steps);
    if (more) wgmma_wait<0>();
    fence_operand(scores);
    ++rings.steps;
  };
  prefetch_iteration(prefetched, tile, at);
  mma_s(scores, tile, rings, at.m_block);
  wgmma_wait<0>();
  fence_operand(scores);
#pragma unroll 1
  for (int left = at.count; warp_any(left > 1); --left) step(true);
  step(false);
}
