// What a computing warpgroup of the Hopper backward does with its 64 keys: probabilities, their derivatives, and its
// parts of dk, dv and dq.
//
// The form of compute() is what ptxas wants, as in the forward: one function with local arrays, whose steps are
// lambdas.
#pragma once
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/shared_plan.cuh"
#include "tile/dropout.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/key_scores.cuh"
#include "tile/pack.cuh"

template <auto T, int n>
TANDEM_DEVICE void pack_all(u32 (&to)[n], const float (&from)[2 * n]) {
#pragma unroll
  for (int r = 0; r < n; ++r) to[r] = pack<T>(from[2 * r], from[2 * r + 1]);
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void compute(const BackwardParams& p, BackwardShared<T>& s, int index) {
  constexpr int kQueries = T.score_queries();
  using ScoreMma = Wgmma<T.f16, kQueries>;
  using DkMma = Wgmma<T.f16, T.dk_columns()>;
  using DvMma = Wgmma<T.f16, T.dv_columns()>;
  using DqMma = Wgmma<T.f16, T.dq_columns()>;
  constexpr u32 kQueryBlock = T.tile_m * 128, kKeyBlock = T.cta_keys() * 128;  // bytes of 64 columns
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int group = p.heads_q / p.heads_k;
  const int rank = rank_of_cta<T>();  // in a pair
  // The warpgroup's own keys, or where all have the same ones its own queries of a step and columns of dk and dv. Bytes
  // of rows are those in each 64 columns.
  const u32 own_keys = T.wide() ? 0 : index * 64 * 128;
  const int first_query = T.wide() ? index * kQueries : 0;
  auto own_columns = [&](int columns, u32 block) {
    const int first = T.wide() ? index * columns : 0;
    return first / 64 * block + first % 64 * 2;
  };

  // Which head and sequence a step is of: who has to know.
  constexpr bool kKnowsHead = T.has_score_mod() || T.dropout;
  Dropout dropout;
  if constexpr (T.dropout) dropout = Dropout(p.dropout);

  Ring<T.q_stages> q_next, q_ring;
  Ring<T.dout_stages> dout_ring;
  u32 steps = 0, dq_steps = 0;
  int ds_slot = 1, ds_before = 0;

  auto arrive = [&](u64* barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };

  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_full, taken & 1);
    const int taken_block = uniform(s.tile.n_block);
    if (taken_block < 0) break;
    const int n_block = taken_block * T.ctas() + rank;  // the CTA's own
    const int m_begin = uniform(s.tile.m_begin), m_end = uniform(s.tile.m_end);
    mbarrier_wait(&s.v_full, taken & 1);

    float dk[T.dk_columns() / 2], dv[T.dv_columns() / 2];
    float scores[kQueries / 2], dp[kQueries / 2];
    u32 probabilities[kQueries / 4], ds[kQueries / 4];
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;

    const SequenceCoords sequence = sequence_coords<T>(p, T.varlen || kKnowsHead ? uniform(s.tile.sequence) : 0);
    const auto band = band_of<T>(p, sequence);
    // m_blocks whose queries all see all of the CTA's keys.
    const int last_key = (n_block + 1) * T.cta_keys() - 1;
    const QueryRange unmasked = band.unmasked_queries(n_block * T.cta_keys(), last_key);
    int unmasked_begin = T.right ? (max(0, unmasked.begin) + T.tile_m - 1) / T.tile_m : 0;
    if (last_key >= sequence.k_len) unmasked_begin = 1 << 30;
    const int unmasked_end = T.left ? unmasked.end / T.tile_m : 1 << 30;

    auto clear = [&](u16* block, int rows, int columns, int used) {
      zero_tail<T>(block, rows, columns, used, kSyncAll, 128 * T.warpgroups);
    };
    clear(s.k, T.cta_keys(), T.head_dim, sequence.k_len - n_block * T.cta_keys());
    clear(s.v, T.cta_keys(), T.head_dim_v, sequence.k_len - n_block * T.cta_keys());
    if constexpr (T.pair)
      clear(s.pair.k, T.cta_keys(), T.pair_columns(), sequence.k_len - (n_block ^ 1) * T.cta_keys());

    int heads = group, first_head = kKnowsHead ? uniform(s.tile.head_k) * group : 0;
    int m_block = m_end - 1, head = first_head;
    [[maybe_unused]] ListedOrNone<T> listed(p, s.tile);
    auto mma_s = [&] {
      mbarrier_wait(&s.q_full[q_next.slot], q_next.parity);
      clear(s.q[q_next.slot], T.tile_m, T.head_dim, sequence.q_len - m_block * T.tile_m);
      const u64 q = wgmma_smem_desc(shared_address(s.q[q_next.slot]) + first_query * 128, 16, 1024);
      discard(scores);
      wgmma_fence();
      const u64 k = wgmma_smem_desc(shared_address(s.k) + own_keys, 16, 1024);
#pragma unroll
      for (int c = 0; c < T.head_dim / 16; ++c)
        ScoreMma::ss_nt(scores, k + in_row(c, kKeyBlock), q + in_row(c, kQueryBlock), c > 0);
      wgmma_commit();
      q_next.advance();
    };
    auto mma_dp = [&] {
      mbarrier_wait(&s.dout_full[dout_ring.slot], dout_ring.parity);
      clear(s.dout[dout_ring.slot], T.tile_m, T.head_dim_v, sequence.q_len - m_block * T.tile_m);
      const u64 dout = wgmma_smem_desc(shared_address(s.dout[dout_ring.slot]) + first_query * 128, 16, 1024);
      discard(dp);
      wgmma_fence();
      const u64 v = wgmma_smem_desc(shared_address(s.v) + own_keys, 16, 1024);
#pragma unroll
      for (int c = 0; c < T.head_dim_v / 16; ++c)
        ScoreMma::ss_nt(dp, v + in_row(c, kKeyBlock), dout + in_row(c, kQueryBlock), c > 0);
      wgmma_commit();
    };
    auto mma_dv = [&] {
      const u32 place = shared_address(s.dout[dout_ring.slot]) + own_columns(T.dv_columns(), kQueryBlock);
      const u64 dout = wgmma_smem_desc(place, kQueryBlock, 1024);
      const u64 p_smem = wgmma_smem_desc(shared_address(s.p), 16, 1024);
      fence_operand(dv);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < T.tile_m / 16; ++c) {
        if constexpr (T.wide()) {
          DvMma::ss_nn(dv, p_smem + in_row(c, kKeyBlock), dout + rows_16(c), true);
        } else {
          DvMma::rs_nn(dv, probabilities + 4 * c, dout + rows_16(c), true);
        }
      }
      wgmma_commit();
    };
    auto mma_dk = [&] {
      const u32 place = shared_address(s.q[q_ring.slot]) + own_columns(T.dk_columns(), kQueryBlock);
      const u64 q = wgmma_smem_desc(place, kQueryBlock, 1024);
      const u64 ds_smem = wgmma_smem_desc(shared_address(s.ds[0]), 16, 1024);
      fence_operand(dk);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < T.tile_m / 16; ++c) {
        if constexpr (T.wide()) {
          DkMma::ss_nn(dk, ds_smem + in_row(c, kKeyBlock), q + rows_16(c), true);
        } else {
          DkMma::rs_nn(dk, ds + 4 * c, q + rows_16(c), true);
        }
      }
      wgmma_commit();
    };
    // dq of these 64 queries and columns, over the CTA's or, of a pair, the other CTA's keys; adds: to what dq is.
    auto mma_dq_of = [&](float(&dq)[T.dq_columns() / 2], u32 ds_of, u32 keys, bool adds) {
      const u64 a = wgmma_smem_desc(ds_of, kKeyBlock, 1024);
      const u64 b = wgmma_smem_desc(keys, kKeyBlock, 1024);
      if (adds) {
        fence_operand(dq);
      } else {
        discard(dq);
      }
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < T.cta_keys() / 16; ++c) DqMma::ss_tn(dq, a + rows_16(c), b + rows_16(c), adds || c > 0);
      wgmma_commit();
    };
    auto mma_dq = [&](float(&dq)[T.dq_columns() / 2], int slot) {
      const int row_part = T.dq_row_parts() == 1 ? 0 : index,
                column = T.dq_row_parts() == 1 ? index * T.dq_columns() : 0;
      mma_dq_of(dq, shared_address(s.ds[slot]) + row_part * kKeyBlock,
                shared_address(s.k) + column / 64 * kKeyBlock + column % 64 * 2, false);
    };
    // Queries that see one of this thread's two keys.
    const int key0 = n_block * T.cta_keys() + (T.wide() ? 0 : index * 64) + warp * 16 + lane / 4;
    auto seen_by = [&](int i) {
      QueryRange range = band.visible_queries(key0 + 8 * i, key0 + 8 * i);
      if (key0 + 8 * i >= sequence.k_len) range.begin = range.end = 1 << 29;
      return range;
    };
    auto is_masked = [&](int m_block) {
      return warp_any(m_block < unmasked_begin || (T.left && m_block >= unmasked_end));
    };
    auto query_of = [&](int m_block, int r) {
      return m_block * T.tile_m + first_query + 2 * (lane & 3) + column_of(r);
    };
    // -infinity where a key is not seen.
    auto apply_mask = [&](int m_block) {
      const QueryRange seen[2] = {seen_by(0), seen_by(1)};
#pragma unroll
      for (int r = 0; r < kQueries / 2; ++r) {
        const QueryRange& by = seen[row_of(r)];
        const int query = query_of(m_block, r);
        if (query < by.begin || (T.left && query >= by.end)) scores[r] = -kInfinity;
      }
    };
    // What a block mask hides, by itself: a mask_mod is asked here alone, so that steps that are seen whole are not
    // longer.
    auto apply_block_mask = [&] {
      const StepState state = step_state<T>(p, sequence, head, m_block, taken_block, rank);
      if (state == StepState::full) return;
#pragma unroll
      for (int r = 0; r < kQueries / 2; ++r) {
        bool visible = false;
        if constexpr (T.mask_mod) {
          const ModPlace at{sequence.sequence,    head,           query_of(m_block, r),
                            key0 + 8 * row_of(r), sequence.q_len, sequence.k_len};
          visible =
              state == StepState::partial && mask_mod<T>(at, static_cast<const ModifiedBackwardParams&>(p).mods.mask);
        }
        if (!visible) scores[r] = -kInfinity;
      }
    };
    // Of a pair of neighbouring columns: -lse in log2 units, or delta.
    auto stat = [&](int which, int pair) {
      const float* const at = s.stats[dout_ring.slot] + which * T.tile_m + first_query + 8 * pair + 2 * (lane & 3);
      return *reinterpret_cast<const float2*>(at);
    };

    // Of a step, drawn while it is multiplied: what of its probabilities has met values.
    constexpr int kGroup = 32;  // registers of which one number tells
    u32 kept[(kQueries / 2 + kGroup - 1) / kGroup];
    auto draw_kept = [&] {
      if constexpr (T.dropout) {
        const int first_key = n_block * T.cta_keys() + (T.wide() ? 0 : index * 64) + warp * 16;
#pragma unroll
        for (int r = 0; r < kQueries / 2; r += kGroup)
          kept[r / kGroup] =
              dropout.by_columns(m_block * T.tile_m + first_query + 2 * r, sequence.sequence * p.heads_q + head,
                                 first_key, min(kGroup, kQueries / 2 - r) / 4, lane);
      }
    };
    auto kept_or_zero = [&](int r, float x) {
      if constexpr (T.dropout) return is_kept(kept[r / kGroup], r % kGroup) ? x : 0.0f;
      return x;
    };

    // Scores become probabilities, in float32 and rounded; where a score is capped, the former times its derivative.
    auto make_probabilities = [&] {
      const HeadScores<T> of_head(p, sequence, head);
      if constexpr (T.softcap) apply_softcap<false>(scores, p);
      if (is_masked(m_block)) apply_mask(m_block);
      if constexpr (T.block_mask) apply_block_mask();
#pragma unroll
      for (int pair = 0; pair < kQueries / 8; ++pair) {
        const float2 minus_lse = stat(0, pair);
        float derivative[4] = {1, 1, 1, 1};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int r = 4 * pair + n;
          const float lse = n & 1 ? minus_lse.y : minus_lse.x;
          if constexpr (T.has_score_mod()) {
            const bool hidden = scores[r] == -kInfinity || lse == -kInfinity;  // or its query is none
            float score = scaled_score<T>(scores[r], p);
            if constexpr (T.softcap) derivative[n] = softcap_derivative(score, p);
            score = of_head(score, p, query_of(m_block, r), key0 + 8 * row_of(r), &derivative[n]);
            scores[r] = hidden ? 0.0f : exp2_approx(score + lse);
          } else {
            scores[r] = exp2_approx(fmaf(scores[r], p.scale_log2, lse));
          }
        }
#pragma unroll
        for (int n = 0; n < 4; n += 2)
          probabilities[2 * pair + n / 2] = pack<T>(kept_or_zero(4 * pair + n, scores[4 * pair + n]),
                                                    kept_or_zero(4 * pair + n + 1, scores[4 * pair + n + 1]));
#pragma unroll
        for (int n = 0; n < 4; ++n) scores[4 * pair + n] = through_scores<T>(scores[4 * pair + n], derivative[n]);
      }
    };

    int count = group * (m_end - m_begin);
    if constexpr (T.block_mask) {
      count = uniform(listed.left), m_block = uniform(listed.m_block), head = uniform(listed.head);
    } else if constexpr (T.split) {
      const KeySteps<T> part(p, s.tile);
      m_block = uniform(part.m_block), count = uniform(part.left), heads = uniform(part.heads());
      head = uniform(part.head), first_head = uniform(part.first_head());
    }
    // Keys in rows, the warpgroup's own rows and columns of them.
    auto store_fragments = [&](u32 to, const u32(&fragments)[kQueries / 4]) {
#pragma unroll
      for (int n = 0; n < kQueries / 16; ++n)
        stmatrix(fragment_at<T>(to + own_keys, first_query / 16 + n),
                 {fragments[4 * n], fragments[4 * n + 1], fragments[4 * n + 2], fragments[4 * n + 3]});
    };
    // dS = P (dP - delta), in place of dP.
    auto make_ds = [&] {
#pragma unroll
      for (int pair = 0; pair < kQueries / 8; ++pair) {
        const float2 delta = stat(1, pair);
#pragma unroll
        for (int r = 4 * pair; r < 4 * pair + 4; ++r) {
          const float of_query = r & 1 ? delta.y : delta.x;
          if constexpr (T.dropout) {
            dp[r] = scores[r] * fmaf(kept_or_zero(r, dp[r]), p.dropout.scale, -of_query);
          } else {
            dp[r] = scores[r] * (dp[r] - of_query);
          }
        }
      }
      fence_operand(dp);
    };
    // dq of a step on its way to the sums in memory (order_dq).
    auto add_dq = [&](const float(&dq)[T.dq_columns() / 2]) {
      mbarrier_wait(&s.dq_turn[index], dq_steps & 1);
      if constexpr (T.staged()) {
        store_sums(s.dq[index], 0, dq);
        fence_proxy_async();
      } else if (warp_any(s.dq_is_first[index])) {
        store_sums(s.dq_to[index], 0, dq);
      } else {
        float4* const to = s.dq_to[index] + threadIdx.x % 128;
#pragma unroll
        for (int r = 0; r < T.dq_columns() / 2; r += 4)
          global_add(to + r / 4 * 128, make_float4(dq[r], dq[r + 1], dq[r + 2], dq[r + 3]));
      }
      __syncwarp();
      arrive(&s.dq_added[index][dq_steps % T.dq_threads()]);
      ++dq_steps;
    };
    // All warpgroups have written dS of the n-th step, and multiplied that of two steps before for dq.
    auto wait_ds = [&](u32 n) { mbarrier_wait(&s.ds_full[n & 1], n >> 1 & 1); };
    auto next_m_block = [&] {
      if constexpr (T.block_mask) {
        listed.advance();
        m_block = uniform(listed.m_block), head = uniform(listed.head);
      } else if constexpr (T.left) {
        if (--m_block < m_begin) m_block = m_end - 1, ++head;
      } else {
        if (++head == first_head + heads) head = first_head, --m_block;
      }
    };
    // Scores have been multiplied, dP is under way.
    auto probabilities_and_dp = [&] {
      fence_operand(scores);
      make_probabilities();
      wgmma_wait<0>();
      fence_operand(dp);
    };
    // What registers allow: the next S under way with dK; and dP too, beside the dS that dK is made of.
    constexpr bool kScoresAhead = T.head_dim <= 64 || !(T.has_score_mod() || T.dropout);
    constexpr bool kDkFirst = T.tile_m > 64 || !kScoresAhead;
    // From dS of a step to S and dP of the next one: nothing is under way where the loop begins again, which is what
    // ptxas wants of registers that products write.
    auto step = [&](bool more, bool previous) __attribute__((always_inline)) {
      make_ds();
      pack_all<T>(ds, dp);
      wait_ds(steps - 1);
      store_fragments(shared_address(s.ds[ds_slot]), ds);
      fence_proxy_async();
      __syncwarp();
      arrive(&s.ds_full[steps & 1]);
      float dq[T.dq_columns() / 2];
      mma_dq(dq, ds_before);
      mma_dv();
      mma_dk();
      wgmma_wait<1>();
      fence_operand(dv);
      fence_operand(dq);
      arrive(&s.dout_empty[dout_ring.slot]);
      dout_ring.advance();
      next_m_block();
      if (kScoresAhead && more) mma_s();
      if (warp_any(previous)) add_dq(dq);
      auto dk_is_made = [&] {
        fence_operand(dk);
        arrive(&s.q_empty[q_ring.slot]);
        q_ring.advance();
      };
      if (more) {
        if constexpr (kDkFirst) {
          wgmma_wait<kScoresAhead ? 1 : 0>();
          dk_is_made();
        }
        if constexpr (!kScoresAhead) mma_s();
        mma_dp();
        draw_kept();
        wgmma_wait<1>();
        if constexpr (!kDkFirst) dk_is_made();
        probabilities_and_dp();
      } else {
        wgmma_wait<0>();
        dk_is_made();
      }
      ++steps;
      ds_before = ds_slot;
      ds_slot = ds_slot + 1 == T.ds_stages() ? 0 : ds_slot + 1;
    };
    // Scores have been multiplied, dP is under way: P to shared memory, dV, and dS.
    auto dv_and_ds = [&] __attribute__((always_inline)) {
      make_probabilities();
      store_fragments(shared_address(s.p), probabilities);
      fence_proxy_async();
      named_sync(kSyncAll, 128 * T.warpgroups);
      mma_dv();
      wgmma_wait<1>();
      fence_operand(dp);
      make_ds();
      wgmma_wait<0>();
      fence_operand(dv);
      arrive(&s.dout_empty[dout_ring.slot]);
      dout_ring.advance();
      pack_all<T>(ds, dp);
    };
    auto wide_step = [&] __attribute__((always_inline)) {
      mma_s();
      mma_dp();
      draw_kept();
      wgmma_wait<1>();
      fence_operand(scores);
      dv_and_ds();
      next_m_block();
      store_fragments(shared_address(s.ds[0]), ds);
      fence_proxy_async();
      named_sync(kSyncAll, 128 * T.warpgroups);
      float dq[T.dq_columns() / 2];
      mma_dq(dq, 0);
      mma_dk();
      wgmma_wait<1>();
      fence_operand(dq);
      add_dq(dq);
      wgmma_wait<0>();
      fence_operand(dk);
      arrive(&s.q_empty[q_ring.slot]);
      q_ring.advance();
      ++steps;
    };
    if constexpr (T.pair) {
      // From scores to those of the next step, which are multiplied while dq is added.
      auto pair_step = [&](bool more) __attribute__((always_inline)) {
        mma_dp();
        draw_kept();
        dv_and_ds();
        mbarrier_wait(&s.pair.ds_taken, (steps & 1) ^ 1);  // that of the step before, so that it has left its place too
        store_fragments(shared_address(s.ds[0]), ds);
        fence_proxy_async();
        named_sync(kSyncAll, 128 * T.warpgroups);
        if (index == 0 && warp == 0 && elect_one()) {
          mbarrier_expect_tx(&s.pair.ds_landed[0], sizeof s.pair.ds[0]);
          bulk_send(s.pair.ds[0], s.ds[0], sizeof s.pair.ds[0], &s.pair.ds_landed[0], rank ^ 1);
        }
        float dq[T.dq_columns() / 2];
        mma_dq_of(dq, shared_address(s.ds[0]), shared_address(s.k) + (rank * T.warpgroups + index) * kKeyBlock, false);
        mma_dk();
        next_m_block();
        mbarrier_wait(&s.pair.ds_landed[0], steps & 1);
        mma_dq_of(dq, shared_address(s.pair.ds[0]), shared_address(s.pair.k) + index * kKeyBlock, true);
        if (more) mma_s();
        wgmma_wait<1>();
        if (!more) wgmma_wait<0>();
        fence_operand(dk);
        fence_operand(dq);
        __syncwarp();
        arrive(&s.q_empty[q_ring.slot]);
        q_ring.advance();
        if (lane == 0) mbarrier_arrive_at(&s.pair.ds_taken, rank ^ 1);
        add_dq(dq);
        if (more) wgmma_wait<0>();
        fence_operand(scores);
        ++steps;
      };
      if (warp_any(count > 0)) {
        mma_s();
        wgmma_wait<0>();
        fence_operand(scores);
#pragma unroll 1
        for (int left = count; warp_any(left > 1); --left) pair_step(true);
        pair_step(false);
      }
    } else if constexpr (T.wide()) {
#pragma unroll 1
      for (int left = count; warp_any(left > 0); --left) wide_step();
    } else if (warp_any(count > 0)) {
      mma_s();
      mma_dp();
      draw_kept();
      wgmma_wait<1>();
      probabilities_and_dp();
#pragma unroll 1
      for (int left = count; warp_any(left > 1); --left) step(true, left < count);
      step(false, count > 1);
      wait_ds(steps - 1);
      float dq[T.dq_columns() / 2];
      mma_dq(dq, ds_before);
      wgmma_wait<0>();
      fence_operand(dq);
      add_dq(dq);
    }

    const KeyEpilogue<T> epilogue(p, s, sequence, index);
    leave_tile<T>(s, index);
    epilogue.template store<false>(dv);
    epilogue.template store<true>(dk);
  }
}
