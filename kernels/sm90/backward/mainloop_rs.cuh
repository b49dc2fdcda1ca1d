// The schedule rs of the Hopper backward: P and dS are register operands, and each warpgroup has its own 64 keys.
#pragma once
#include "score_grads/captured_sums.cuh"
#include "sm90/backward/dq_accumulate.cuh"
#include "sm90/backward/mma.cuh"

// The order of the products and stores of an iteration.
template <Sm90BackwardConfig T>
struct RsOrder {
  // True: the next S is issued with dK, and the next dP with S, if registers suffice next to dS. False for a stored dq,
  // which takes longer than an addition while iterations are few.
  static constexpr bool kScoresAhead = !T.single_n_block && (T.head_dim <= 64 || T.plain_scores());
  // True: dq is written to shared memory before the next S is issued. Stores after a product stall until the tensor
  // core has accepted the product, the fence waits for these stores, and dP waits for the fence.
  static constexpr bool kDqFirst = T.staged();
  static constexpr bool kDkFirst = T.tile_m > 64 || !kScoresAhead || kDqFirst;
  // Overlaps dV with the computation of dS: 2 % faster under a causal mask, no gain without a mask.
  static constexpr bool kDvFirst = T.tile_m > 64 && T.options.bounded_right && !T.options.bounded_left;
  // The position of the fence after the stores of dS. dq multiplies dS only in the next iteration, so that the fence
  // can overlap other products.
  enum class Fence { first, between, last };
  static constexpr Fence kFence = T.staged() ? Fence::last : T.preloaded_lse() > 0 ? Fence::between : Fence::first;
  // Tests whether the next operands have arrived before products are issued. A test after the issue stalls until the
  // tensor core has accepted the products.
  static constexpr bool kAsksQueries = T.tile_m > 64 && !T.options.varlen, kAsksDout = kAsksQueries && !kDvFirst;
  // Draws the next dropout mask during dq, dV and dK if no scores are in registers; else while S is multiplied.
  static constexpr bool kDrawsAhead = T.options.dropout && !kScoresAhead;
};

// The schedule with P and dS in registers: each warpgroup has 64 keys. dq is one iteration late, and the next S and dP
// overlap other work (drawing in kernel.cuh). The caller adds dq of the last iteration.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mainloop_rs(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
                               float (&dk)[T.dk_columns() / 2], float (&dv)[T.dv_columns() / 2],
                               float (&last_dq)[T.dq_columns() / 2]) {
  using Order = RsOrder<T>;
  SharedStorage<T>& s = tile.s;
  float scores[T.score_queries() / 2], dp[T.score_queries() / 2];
  u32 probabilities[T.score_queries() / 4], ds[T.score_queries() / 4];
  Prefetched<T> prefetched;
  // All warpgroups have written dS of the n-th iteration and read dS of iteration n - 2 for dq.
  auto wait_ds = [&](u32 n) { mbarrier_wait(&s.ds_full[n & 1], n >> 1 & 1); };
  // On entry the scores of the n-th iteration are complete, and dP is in flight.
  auto probabilities_and_dp = [&](u32 n) {
    fence_operand(scores);
    if constexpr (T.stages_bias()) add_bias(scores, tile, n);
    if constexpr (!T.captured_per_score) make_probabilities(scores, probabilities, prefetched, tile, rings, at);
    preload_delta(prefetched, tile, rings);
    wgmma_wait<0>();
    fence_operand(dp);
  };
  auto signal_ds = [&] {
    fence_proxy_async();
    __syncwarp();
    arrive(&s.ds_full[rings.steps & 1]);
  };
  // An iteration extends from dS to the next S and dP. No product is in flight at the loop's start, as ptxas requires
  // for registers that products write.
  auto step = [&](bool more, bool previous) __attribute__((always_inline)) {
    [[maybe_unused]] ScoreSums<T> sums;
    [[maybe_unused]] float sum = 0;
    if constexpr (T.captured_per_score) {
      make_ds_and_sums<T>(ds, sums, dp, scores, probabilities, {prefetched, tile, rings, at});
    } else {
      if (Order::kDvFirst) mma_dv(dv, probabilities, tile, rings);
      make_ds(dp, scores, prefetched, tile, rings);
      if constexpr (T.captured_per_tile) sum = sum_of(dp);
      pack_all<T>(ds, dp);
    }
    wait_ds(rings.steps - 1);
    [[maybe_unused]] bool queries_there = false, dout_there = false;
    if (Order::kAsksQueries) queries_there = mbarrier_test(&s.q_full[rings.q_next.index], rings.q_next.phase);
    if (Order::kAsksDout) {
      PipelineState<T.dout_stages> next = rings.dout;
      next.advance();
      dout_there = mbarrier_test(&s.dout_full[next.index], next.phase);
    }
    if constexpr (T.ds_stages() == 2) mbarrier_wait(&s.bias.dq_made, (rings.steps & 1) ^ 1);  // previous iteration
    store_fragments(shared_address(s.ds[rings.ds_slot]), ds, tile);
    float dq[T.dq_columns() / 2];
    if (Order::kFence == Order::Fence::first) signal_ds();
    mma_dq(dq, tile, rings.ds_before);
    if (!Order::kDvFirst) mma_dv(dv, probabilities, tile, rings);
    if (Order::kFence == Order::Fence::between) signal_ds();
    mma_dk(dk, ds, tile, rings);
    if (Order::kFence == Order::Fence::last) signal_ds();
    if constexpr (T.captured_per_tile) {
      // opaque() keeps derived values out of registers, which would spill over the iterations.
      add_tile<T, T.cta_keys()>(tile.p, tile.sequence, at.head, at.m_block, opaque(tile.n_block), sum);
    }
    if constexpr (T.captured_per_score) sums.store(tile.p, tile.place(at.head, 0, 0));
    if (Order::kDrawsAhead) {
      at.advance();
      if (more) draw_dropout_mask(prefetched, tile, at);
    }
    wgmma_wait<1>();
    fence_operand(dv);
    fence_operand(dq);
    arrive(&s.dout_empty[rings.dout.index]);
    if constexpr (T.ds_stages() == 2) arrive(&s.bias.dq_made);
    rings.dout.advance();
    if (!Order::kDrawsAhead) at.advance();
    prefetch_iteration(prefetched, tile, at);
    if (Order::kScoresAhead && !Order::kDqFirst && more) mma_s(scores, tile, rings, at.m_block, true, queries_there);
    if (warp_any(previous)) accumulate_dq(dq, tile, rings.steps - 1);
    if (Order::kScoresAhead && Order::kDqFirst && more) mma_s(scores, tile, rings, at.m_block);
    auto dk_is_made = [&] {
      fence_operand(dk);
      arrive(&s.q_empty[rings.q.index]);
      rings.q.advance();
    };
    if (more) {
      if (Order::kDkFirst) {
        wgmma_wait<Order::kScoresAhead ? 1 : 0>();
        dk_is_made();
      }
      if (!Order::kScoresAhead) mma_s(scores, tile, rings, at.m_block);
      mma_dp(dp, prefetched, tile, rings, at.m_block, dout_there);
      if (!Order::kDrawsAhead) draw_dropout_mask(prefetched, tile, at);
      evaluate_mask_mod(prefetched, tile, at);
      wgmma_wait<1>();
      if (!Order::kDkFirst) dk_is_made();
      probabilities_and_dp(rings.steps + 1);
    } else {
      wgmma_wait<0>();
      dk_is_made();
    }
    ++rings.steps;
    rings.ds_before = rings.ds_slot;
    rings.ds_slot = rings.ds_slot + 1 == T.ds_stages() ? 0 : rings.ds_slot + 1;
  };
  first_scores(scores, dp, prefetched, tile, rings, at);
  probabilities_and_dp(rings.steps);
#pragma unroll 1
  for (int left = at.count; warp_any(left > 1); --left) step(true, left < at.count);
  step(false, at.count > 1);
  wait_ds(rings.steps - 1);
  mma_dq(last_dq, tile, rings.ds_before);
  wgmma_wait<0>();
  fence_operand(last_dq);
}
