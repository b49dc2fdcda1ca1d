// The main loops of an MMA warpgroup of the Hopper backward, one per schedule. Each computes P, dS and the warpgroup's
// parts of dk, dv and dq for its 64 keys. The parts of an iteration are in products.cuh and probabilities.cuh.
//
// ptxas determines the form: arrays that products write are locals of the function with the loop, and an iteration is a
// lambda in it.
#pragma once
#include "score_grads/captured_sums.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/probabilities.cuh"
#include "sm90/backward/products.cuh"

// S and dP of a tile's first iteration, or of its first half. Afterwards S is complete and dP is in flight.
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

// Schedule with P and dS in registers: each warpgroup has its own 64 keys. dq is one iteration late, and the next S and
// dP overlap other work (drawing in kernel.cuh). The caller adds dq of the last iteration.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void pipelined_steps(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
                                   float (&dk)[T.dk_columns() / 2], float (&dv)[T.dv_columns() / 2],
                                   float (&last_dq)[T.dq_columns() / 2]) {
  // Issues the next S with dK, and the next dP with it, if registers suffice next to dS. Not with a stored dq, which
  // takes longer than an addition while iterations are few.
  constexpr bool kScoresAhead = !T.single_n_block && (T.head_dim <= 64 || T.plain_scores());
  // Writes dq to shared memory before the next S is issued. Stores after a product stall until the tensor core has
  // accepted it, the fence waits for these stores, and dP waits for the fence.
  constexpr bool kDqFirst = T.staged();
  constexpr bool kDkFirst = T.tile_m > 64 || !kScoresAhead || kDqFirst;
  // Overlaps dV with the computation of dS: 2 % faster under a causal mask, no gain without.
  constexpr bool kDvFirst = T.tile_m > 64 && T.bounded_right && !T.bounded_left;
  // The position of the fence after the stores of dS. dq multiplies dS only in the next iteration, so that the fence
  // can overlap other products.
  enum class Fence { first, between, last };
  constexpr Fence kFence = T.staged() ? Fence::last : T.preloaded_lse() > 0 ? Fence::between : Fence::first;
  // Tests whether the next operands have arrived before products are issued. A test after the issue stalls until the
  // tensor core has accepted the products.
  constexpr bool kAsksQueries = T.tile_m > 64 && !T.varlen, kAsksDout = kAsksQueries && !kDvFirst;
  // Draws the next dropout mask during dq, dV and dK if no scores are in registers; else while S is multiplied.
  constexpr bool kDrawsAhead = T.dropout && !kScoresAhead;
  SharedStorage<T>& s = tile.s;
  float scores[T.score_queries() / 2], dp[T.score_queries() / 2];
  u32 probabilities[T.score_queries() / 4], ds[T.score_queries() / 4];
  Prefetched<T> prefetched;
  // All warpgroups have written dS of the n-th iteration and read dS of iteration n - 2 for dq.
  auto wait_ds = [&](u32 n) { mbarrier_wait(&s.ds_full[n & 1], n >> 1 & 1); };
  // On entry scores of the n-th iteration are complete and dP is in flight.
  auto probabilities_and_dp = [&](u32 n) {
    fence_operand(scores);
    if constexpr (!T.captured_per_score) make_probabilities(scores, probabilities, prefetched, tile, rings, at, n);
    preload_delta(prefetched, tile, rings);
    wgmma_wait<0>();
    fence_operand(dp);
  };
  auto tell_ds = [&] {
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
      make_ds_and_sums<T>(ds, sums, dp, scores, probabilities, prefetched, tile, rings, at);
    } else {
      if constexpr (kDvFirst) mma_dv(dv, probabilities, tile, rings);
      make_ds(dp, scores, prefetched, tile, rings);
      if constexpr (T.captured_per_tile) sum = sum_of(dp);
      pack_all<T>(ds, dp);
    }
    wait_ds(rings.steps - 1);
    [[maybe_unused]] bool queries_there = false, dout_there = false;
    if constexpr (kAsksQueries) queries_there = mbarrier_test(&s.q_full[rings.q_next.index], rings.q_next.phase);
    if constexpr (kAsksDout) {
      PipelineState<T.dout_stages> next = rings.dout;
      next.advance();
      dout_there = mbarrier_test(&s.dout_full[next.index], next.phase);
    }
    if constexpr (T.ds_stages() == 2) mbarrier_wait(&s.bias.dq_made, (rings.steps & 1) ^ 1);  // previous iteration
    store_fragments(shared_address(s.ds[rings.ds_slot]), ds, tile);
    float dq[T.dq_columns() / 2];
    if constexpr (kFence == Fence::first) tell_ds();
    mma_dq(dq, tile, rings.ds_before);
    if constexpr (!kDvFirst) mma_dv(dv, probabilities, tile, rings);
    if constexpr (kFence == Fence::between) tell_ds();
    mma_dk(dk, ds, tile, rings);
    if constexpr (kFence == Fence::last) tell_ds();
    if constexpr (T.captured_per_tile) {
      // opaque(): derived values would be kept over all iterations and spill.
      add_tile<T, T.cta_keys()>(tile.p, tile.sequence, at.head, at.m_block, opaque(tile.n_block), sum);
    }
    if constexpr (T.captured_per_score) sums.store(tile.p, tile.place(at.head, 0, 0));
    if constexpr (kDrawsAhead) {
      at.advance();
      if (more) draw_dropout_mask(prefetched, tile, at);
    }
    wgmma_wait<1>();
    fence_operand(dv);
    fence_operand(dq);
    arrive(&s.dout_empty[rings.dout.index]);
    if constexpr (T.ds_stages() == 2) arrive(&s.bias.dq_made);
    rings.dout.advance();
    if constexpr (!kDrawsAhead) at.advance();
    prefetch_iteration(prefetched, tile, at);
    if (kScoresAhead && !kDqFirst && more) mma_s(scores, tile, rings, at.m_block, true, queries_there);
    if (warp_any(previous)) accumulate_dq(dq, tile, rings.steps - 1);
    if (kScoresAhead && kDqFirst && more) mma_s(scores, tile, rings, at.m_block);
    auto dk_is_made = [&] {
      fence_operand(dk);
      arrive(&s.q_empty[rings.q.index]);
      rings.q.advance();
    };
    if (more) {
      if constexpr (kDkFirst) {
        wgmma_wait<kScoresAhead ? 1 : 0>();
        dk_is_made();
      }
      if constexpr (!kScoresAhead) mma_s(scores, tile, rings, at.m_block);
      mma_dp(dp, prefetched, tile, rings, at.m_block, dout_there);
      if constexpr (!kDrawsAhead) draw_dropout_mask(prefetched, tile, at);
      evaluate_mask_mod(prefetched, tile, at);
      wgmma_wait<1>();
      if constexpr (!kDkFirst) dk_is_made();
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

// Wide heads, after scores are complete and with dP in flight: stores P to shared memory, multiplies dV and computes
// dS.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void dv_and_ds(float (&dv)[T.dv_columns() / 2], float (&scores)[T.score_queries() / 2],
                             float (&dp)[T.score_queries() / 2], u32 (&ds)[T.score_queries() / 4],
                             const Prefetched<T>& prefetched, const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings,
                             const WarpgroupSteps<T>& at) {
  SharedStorage<T>& s = tile.s;
  u32 probabilities[T.score_queries() / 4];
  make_probabilities(scores, probabilities, prefetched, tile, rings, at);
  store_fragments(shared_address(s.p[0]), probabilities, tile);
  fence_proxy_async();
  named_sync(kBarAllMma, 128 * T.warpgroups);
  mma_dv(dv, probabilities, tile, rings);
  wgmma_wait<1>();
  fence_operand(dp);
  make_ds(dp, scores, prefetched, tile, rings);
  fence_proxy_async();  // the next TMA load may overwrite delta
  wgmma_wait<0>();
  fence_operand(dv);
  arrive(&s.dout_empty[rings.dout.index]);
  rings.dout.advance();
  pack_all<T>(ds, dp);
}

// shared_p schedule for wide heads: all warpgroups share the same keys, and each has its own queries of an iteration.
// They synchronize after P and after dS have been stored.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void wide_steps(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
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
    dv_and_ds(dv, scores, dp, ds, prefetched, tile, rings, at);
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

// The same for a pair of CTAs, which exchange dS. An iteration extends to the next scores, which are multiplied while
// dq is added.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void pair_steps(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
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
    dv_and_ds(dv, scores, dp, ds, prefetched, tile, rings, at);
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

// Wide heads with dS in global memory. Products follow each other without a gap: dV, dK, then the next S and dP, which
// overlap the computation of P. Warpgroups synchronize after P and after dS have been stored; both are double-buffered.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void strip_steps(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
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

// dS in global memory, and separate keys per warpgroup, whose accumulators leave registers for 32 queries at a time. P
// and dS stay in registers, so that warpgroups need not synchronize. dV of a half overlaps its dS. S and dP of the next
// half are issued before dK, so that the tensor core is busy while P is computed.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void half_steps(const WarpgroupTile<T>& first, WarpgroupRings<T>& rings, WarpgroupSteps<T>& at,
                              float (&dk)[T.dk_columns() / 2], float (&dv)[T.dv_columns() / 2]) {
  SharedStorage<T>& s = first.s;
  const WarpgroupTile<T> second = first.second_half();
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

template <Sm90BackwardConfig T>
TANDEM_DEVICE void compute(const BackwardParams& p, SharedStorage<T>& s, int index) {
  const WarpgroupThread<T> thread(p, index);
  WarpgroupRings<T> rings;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    const int n_block = warp_uniform(s.tile.n_block);
    if (n_block < 0) break;
    const int m_begin = warp_uniform(s.tile.m_begin), m_end = warp_uniform(s.tile.m_end);
    mbarrier_wait(&s.v_full, tile_idx & 1);
    float dk[T.dk_columns() / 2], dv[T.dv_columns() / 2];
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    const WarpgroupTile<T> tile(p, s, thread, n_block);
    tile.clear_keys();
    WarpgroupSteps<T> steps(p, s.tile, thread.group, m_begin, m_end);
    [[maybe_unused]] float last_dq[T.dq_columns() / 2];
    if constexpr (T.q_subtiles()) {
      if (warp_any(steps.count > 0)) half_steps(tile, rings, steps, dk, dv);
    } else if constexpr (T.ds_gmem()) {
      if (warp_any(steps.count > 0)) strip_steps(tile, rings, steps, dk, dv);
    } else if constexpr (T.shared_p() && !T.cluster2()) {
      wide_steps(tile, rings, steps, dk, dv);
    } else if (warp_any(steps.count > 0)) {
      if constexpr (T.cluster2()) {
        pair_steps(tile, rings, steps, dk, dv);
      } else {
        pipelined_steps(tile, rings, steps, dk, dv, last_dq);
      }
    }
    const KeyEpilogue<T> epilogue(p, s, tile.sequence, index);
    release_kv<T>(s, index);
    epilogue.template store<false>(dv);
    epilogue.template store<true>(dk);
    // The last dq comes after the epilogue, because its turn comes late and the next tile's keys load meanwhile.
    if constexpr (!T.shared_p() && !T.ds_gmem()) {
      if (warp_any(steps.count > 0)) accumulate_dq(last_dq, tile, rings.steps - 1);
    }
  }
}
