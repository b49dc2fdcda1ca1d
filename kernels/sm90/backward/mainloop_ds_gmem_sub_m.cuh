// The schedule ds_gmem_sub_m of the Hopper backward: dS goes to global memory as in ds_gmem. Because this kernel
// computes no dq, registers suffice for 64 keys per warpgroup and 32 queries (a subtile) at a time:
//
//    queue of a subtile  | dV += P dO, next S, next dP, dK += dS Q
//    meanwhile           |    dS, to shared memory     |  next P
#pragma once
#include "sm90/backward/mma.cuh"

// dS goes to global memory. Each warpgroup has separate keys, and its accumulators leave registers for 32 queries at a
// time. P and dS stay in registers, so that warpgroups need not synchronize. dV of a subtile overlaps its dS. S and dP
// of the next subtile are issued before dK, so that the tensor core is busy while P is computed.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mainloop_ds_gmem_sub_m(const WarpgroupTile<T>& first, WarpgroupRings<T>& rings,
                                          WarpgroupSteps<T>& at, float (&dk)[T.dk_columns() / 2],
                                          float (&dv)[T.dv_columns() / 2]) {
  SharedStorage<T>& s = first.s;
  const WarpgroupTile<T> second = first.second_subtile();
  float scores[T.score_queries() / 2], dp[T.score_queries() / 2];
  u32 probabilities[T.score_queries() / 4], ds[T.score_queries() / 4];
  Prefetched<T> prefetched;
  auto dv_and_ds = [&](const WarpgroupTile<T>& tile, u32 to) {
    mma_dv(dv, probabilities, tile, rings);
    make_ds(dp, scores, prefetched, tile, rings);
    pack_all<T>(ds, dp);
    store_fragments(to, ds, tile);
  };
  // Afterwards no product is in flight.
  auto probabilities_and_dp = [&](const WarpgroupTile<T>& tile) {
    fence_operand(scores);
    make_probabilities(scores, probabilities, prefetched, tile, rings, at);
    preload_delta(prefetched, tile, rings);
    wgmma_wait<0>();
    fence_operand(dp);
    fence_operand(dk);
  };
  auto step = [&](bool more) __attribute__((always_inline)) {
    const int slot = rings.steps & 1, dout_slot = rings.dout.index;
    const u32 to = shared_address(s.ds[slot]);
    mbarrier_wait(&s.ds_empty[slot], (rings.steps >> 1 & 1) ^ 1);
    dv_and_ds(first, to);
    mma_s(scores, second, rings, at.m_block, true, true);  // the same queries have arrived
    mma_dp(dp, prefetched, second, rings, at.m_block, true);
    mma_dk(dk, ds, first, rings);
    wgmma_wait<2>();
    fence_operand(dv);
    probabilities_and_dp(second);
    dv_and_ds(second, to);
    fence_proxy_async();
    __syncwarp();
    arrive(&s.ds_full[slot]);
    rings.dout.advance();
    if (more) {
      at.advance();
      prefetch_iteration(prefetched, first, at);
      mma_s(scores, first, rings, at.m_block, false);
      mma_dp(dp, prefetched, first, rings, at.m_block);
    }
    mma_dk(dk, ds, second, rings);
    if (more) {
      wgmma_wait<2>();
    } else {
      wgmma_wait<0>();
      fence_operand(dk);
    }
    fence_operand(dv);
    arrive(&s.dout_empty[dout_slot]);
    if (more) probabilities_and_dp(first);
    arrive(&s.q_empty[rings.q.index]);
    rings.q.advance();
    ++rings.steps;
  };
  first_scores(scores, dp, prefetched, first, rings, at);
  probabilities_and_dp(first);
#pragma unroll 1
  for (int left = at.count; warp_any(left > 1); --left) step(true);
  step(false);
}
