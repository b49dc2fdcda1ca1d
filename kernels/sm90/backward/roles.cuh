// What the computing warpgroups of the Hopper backward do where each has a role: one makes scores, dS and dq, with
// queries in rows, one sums dv, one dk, over all steps of a tile. What they multiply goes through shared memory. No
// warpgroup waits for the other to reach the same place, so that products of one run under the exponentials of another:
//
//    make_scores         | sum_steps, of dv | sum_steps, of dk
//    S = Q K'            |                  |
//    dP = dO V', under   |                  |
//      it P -> p         | dv += P' dO      |
//    dS -> ds, and to    |                  | dk += dS' Q
//      the other CTA     |                  |
//    dq of the step      |                  |
//      before, then S    |                  |
//      of the next one   |                  |
#pragma once
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/shared_plan.cuh"
#include "tile/pack.cuh"
#include "tile/row.cuh"

// dk (of_k), or dv.
template <Sm90BackwardConfig T, bool of_k>
TANDEM_DEVICE void sum_steps(const BackwardParams& p, BackwardShared<T>& s, int index) {
  constexpr int kColumns = of_k ? T.dk_columns() : T.dv_columns(), kLefts = of_k ? T.ds_stages() : 1;
  constexpr u32 kQueryBlock = T.tile_m * 128;
  using Mma = Wgmma<T.f16, kColumns>;
  const int lane = threadIdx.x % 32;
  Ring<of_k ? T.q_stages : T.dout_stages> ring;
  Ring<kLefts> left_ring;
  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_full, taken & 1);
    if (uniform(s.tile.n_block) < 0) break;
    const SequenceCoords sequence = sequence_coords<T>(p, T.varlen ? uniform(s.tile.sequence) : 0);
    float sums[kColumns / 2];
#pragma unroll
    for (float& x : sums) x = 0;
#pragma unroll 1
    for (int left = KeySteps<T>(p, s.tile).left; warp_any(left > 0); --left) {
      u64* const right_full = of_k ? &s.q_full[ring.slot] : &s.dout_full[ring.slot];
      u64* const left_full = of_k ? &s.ds_full[left_ring.slot] : &s.p_full;
      mbarrier_wait(right_full, ring.parity);
      mbarrier_wait(left_full, left_ring.parity);
      const u64 a = wgmma_smem_desc(shared_address(of_k ? s.ds[left_ring.slot] : s.p), 16, 1024);
      const u64 b = wgmma_smem_desc(shared_address(of_k ? s.q[ring.slot] : s.dout[ring.slot]), kQueryBlock, 1024);
      fence_operand(sums);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < T.tile_m / 16; ++c) Mma::ss_tn(sums, a + rows_16(c), b + rows_16(c), true);
      wgmma_commit();
      wgmma_wait<0>();
      fence_operand(sums);
      if (lane == 0) {
        mbarrier_arrive(of_k ? &s.q_empty[ring.slot] : &s.dout_empty[ring.slot]);
        mbarrier_arrive(of_k ? &s.ds_empty[left_ring.slot] : &s.p_empty);
      }
      ring.advance();
      left_ring.advance();
    }
    const KeyEpilogue<T> epilogue(p, s, sequence, index);
    leave_tile<T>(s, index);
    epilogue.template store<of_k>(sums);
  }
}

// dS of each step to the other CTA, whose dS of two steps before has been used by then: one thread.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void send_ds(const BackwardParams& p, BackwardShared<T>& s) {
  const int rank = rank_of_cta<T>();
  Ring<T.ds_stages()> ring;
  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_full, taken & 1);
    if (s.tile.n_block < 0) break;
    int left = KeySteps<T>(p, s.tile).left;
    mbarrier_arrive(&s.kv_empty);
    for (; left > 0; --left, ring.advance()) {
      mbarrier_wait(&s.ds_full[ring.slot], ring.parity);
      mbarrier_expect_tx(&s.pair.ds_landed[ring.slot], sizeof s.ds[0]);
      bulk_send(s.pair.ds[ring.slot], s.ds[ring.slot], sizeof s.ds[0], &s.pair.ds_landed[ring.slot], rank ^ 1);
    }
  }
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void make_scores(const BackwardParams& p, BackwardShared<T>& s) {
  using ScoreMma = Wgmma<T.f16, T.cta_keys()>;
  using DqFirst = Wgmma<T.f16, T.kDqFirst>;
  using DqRest = Wgmma<T.f16, T.kDqRest>;
  constexpr int kIndex = 2, kScores = T.cta_keys() / 2;                        // of a thread
  constexpr u32 kQueryBlock = T.tile_m * 128, kKeyBlock = T.cta_keys() * 128;  // bytes of 64 columns
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, row0 = warp * 16 + lane / 4;
  const int rank = rank_of_cta<T>();
  Ring<T.q_stages> q_ring;
  Ring<T.dout_stages> dout_ring;
  u32 steps = 0;
  auto arrive = [&](u64* barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  // Of a step: its slot of dS, and the parity of its barriers.
  auto slot_of = [](u32 step) { return step & 1; };
  auto parity_of = [](u32 step) { return step >> 1 & 1; };

  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_full, taken & 1);
    const int n_block = uniform(s.tile.n_block) * T.ctas() + rank;
    if (n_block < 0) break;
    mbarrier_wait(&s.v_full, taken & 1);
    const SequenceCoords sequence = sequence_coords<T>(p, T.varlen ? uniform(s.tile.sequence) : 0);
    const auto band = band_of<T>(p, sequence);
    const int first_key = n_block * T.cta_keys(), last_key = first_key + T.cta_keys() - 1;
    const QueryRange unmasked = band.unmasked_queries(first_key, last_key);

    auto clear = [&](u16* block, int rows, int columns, int used) {
      zero_tail<T>(block, rows, columns, used, kSyncOwn + kIndex, 128);
    };
    clear(s.k, T.cta_keys(), T.head_dim, sequence.k_len - first_key);
    clear(s.v, T.cta_keys(), T.head_dim_v, sequence.k_len - first_key);
    clear(s.pair.k, T.cta_keys(), T.pair_columns(), sequence.k_len - (n_block ^ 1) * T.cta_keys());

    float scores[kScores], dp[kScores];
    KeySteps<T> at(p, s.tile);
    // Rows of queries, or of dout, times keys or values.
    auto multiply = [&](float(&to)[kScores], u16* rows, const u16* keys, int columns) {
      clear(rows, T.tile_m, columns, sequence.q_len - at.m_block * T.tile_m);
      const u64 a = wgmma_smem_desc(shared_address(rows), 16, 1024);
      const u64 b = wgmma_smem_desc(shared_address(keys), 16, 1024);
      discard(to);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < columns / 16; ++c)
        ScoreMma::ss_nt(to, a + in_row(c, kQueryBlock), b + in_row(c, kKeyBlock), c > 0);
      wgmma_commit();
    };
    auto mma_s = [&] {
      mbarrier_wait(&s.q_full[q_ring.slot], q_ring.parity);
      multiply(scores, s.q[q_ring.slot], s.k, T.head_dim);
    };
    auto mma_dp = [&] {
      mbarrier_wait(&s.dout_full[dout_ring.slot], dout_ring.parity);
      multiply(dp, s.dout[dout_ring.slot], s.v, T.head_dim_v);
    };
    // -infinity where a key is not seen.
    auto apply_mask = [&] {
      const int first = at.m_block * T.tile_m, last = first + T.tile_m - 1;
      if (!warp_any((T.right && first < unmasked.begin) || (T.left && last >= unmasked.end) ||
                    last_key >= sequence.k_len))
        return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const KeyRange seen = band.visible_keys(first + row0 + 8 * i, first + row0 + 8 * i);
#pragma unroll
        for (int r = 2 * i; r < kScores; r += 4) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int key = first_key + 2 * (lane & 3) + 2 * (r - 2 * i) + n;
            if (key >= seen.end || (T.left && key < seen.begin)) scores[r + n] = -kInfinity;
          }
        }
      }
    };
    // Of this thread's i-th row: -lse in log2 units, or delta.
    auto stat = [&](int which, int i) { return s.stats[dout_ring.slot][which * T.tile_m + row0 + 8 * i]; };
    // One fragment of 16 x 16 after the other, rounded, to shared memory, of which `full` tells.
    auto store_rounded = [&](u16* to, const float(&x)[kScores], u64* full) {
#pragma unroll
      for (int n = 0; n < T.cta_keys() / 16; ++n) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack<T>(x[8 * n + 2 * i], x[8 * n + 2 * i + 1]);
        stmatrix(fragment_at<T>(shared_address(to), n), w);
      }
      fence_proxy_async();
      __syncwarp();
      arrive(full);
    };
    // S has been multiplied, dP is under way: P for dv.
    auto make_probabilities = [&] {
      fence_operand(scores);
      arrive(&s.q_empty[q_ring.slot]);
      q_ring.advance();
      apply_mask();
      const float minus_lse[2] = {stat(0, 0), stat(0, 1)};
#pragma unroll
      for (int r = 0; r < kScores; ++r) scores[r] = exp2_approx(fmaf(scores[r], p.scale_log2, minus_lse[r / 2 % 2]));
      mbarrier_wait(&s.p_empty, (steps & 1) ^ 1);
      store_rounded(s.p, scores, &s.p_full);
      wgmma_wait<0>();
      fence_operand(dp);
    };
    // dS = P (dP - delta), for dk and dq, here and in the other CTA.
    auto make_ds = [&] {
      const u32 slot = slot_of(steps);
      const float delta[2] = {stat(1, 0), stat(1, 1)};
#pragma unroll
      for (int r = 0; r < kScores; ++r) dp[r] = scores[r] * (dp[r] - delta[r / 2 % 2]);
      __syncwarp();
      arrive(&s.dout_empty[dout_ring.slot]);
      dout_ring.advance();
      mbarrier_wait(&s.ds_empty[slot], parity_of(steps) ^ 1);
      store_rounded(s.ds[slot], dp, &s.ds_full[slot]);
      ++steps;
    };
    float dq_first[T.kDqFirst / 2], dq_rest[T.kDqRest / 2];
    auto multiply_dq = [&](const u16* ds, u32 first, u32 rest, bool adds) {
      const u64 a = wgmma_smem_desc(shared_address(ds), 16, 1024);
      const u64 b = wgmma_smem_desc(first, kKeyBlock, 1024), c_rest = wgmma_smem_desc(rest, kKeyBlock, 1024);
#pragma unroll
      for (int c = 0; c < T.cta_keys() / 16; ++c) {
        DqFirst::ss_nn(dq_first, a + in_row(c, kKeyBlock), b + rows_16(c), adds || c > 0);
        DqRest::ss_nn(dq_rest, a + in_row(c, kKeyBlock), c_rest + rows_16(c), adds || c > 0);
      }
    };
    // Of a step, over the keys of both CTAs.
    auto mma_dq = [&](u32 step) {
      const u32 slot = slot_of(step);
      mbarrier_wait(&s.ds_full[slot], parity_of(step));
      mbarrier_wait(&s.pair.ds_landed[slot], parity_of(step));
      discard(dq_first);
      discard(dq_rest);
      wgmma_fence();
      const int first = T.role_dq_column(rank, 0), rest = T.role_dq_column(rank, T.kDqFirst);
      multiply_dq(s.ds[slot], shared_address(s.k) + first / 64 * kKeyBlock,
                  shared_address(s.k) + rest / 64 * kKeyBlock + rest % 64 * 2, false);
      multiply_dq(s.pair.ds[slot], shared_address(s.pair.k), shared_address(s.pair.k) + kKeyBlock, true);
      wgmma_commit();
    };
    auto add_dq = [&](u32 step) {
      fence_operand(dq_first);
      fence_operand(dq_rest);
      arrive(&s.ds_empty[slot_of(step)]);
      if (lane == 0) mbarrier_arrive_at(&s.ds_empty[slot_of(step)], rank ^ 1);
      mbarrier_wait(&s.dq_turn[0], step & 1);
      store_sums(s.dq[0], 0, dq_first);
      store_sums(s.dq[0] + T.kDqFirst / 8 * 128, 0, dq_rest);
      fence_proxy_async();
      __syncwarp();
      arrive(&s.dq_added[0][step % T.dq_threads()]);
    };
    // From dS of a step to that of the next one: nothing is under way where the loop begins again.
    auto step = [&](bool more, bool previous) __attribute__((always_inline)) {
      make_ds();
      at.advance();
      if (previous) mma_dq(steps - 2);
      if (more) {
        mma_s();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (previous) add_dq(steps - 2);
      if (more) {
        mma_dp();
        wgmma_wait<1>();
        make_probabilities();
      }
    };
    const int count = at.left;
    if (warp_any(count > 0)) {
      mma_s();
      mma_dp();
      wgmma_wait<1>();
      make_probabilities();
      if (warp_any(count > 1)) step(true, false);
#pragma unroll 1
      for (int left = count - 1; warp_any(left > 1); --left) step(true, true);
      if (warp_any(count > 1)) {
        step(false, true);
      } else {
        step(false, false);
      }
      mma_dq(steps - 1);
      wgmma_wait<0>();
      add_dq(steps - 1);
    }
    leave_tile<T>(s, kIndex);
  }
}
