// What a computing warpgroup of the Hopper forward does: scores, softmax, result, tile after tile.
//
// The form of compute() is what ptxas wants (docs/lab/hopper-forward.md): one function with local arrays, whose steps
// are lambdas. The same steps as members of a struct come out with other address arithmetic in the main loop.
#pragma once
#include "sm90/forward/fragment_scores.cuh"
#include "sm90/forward/warpgroup.cuh"
#include "tile/dropout.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/pack.cuh"
#include "tile/row.cuh"

template <Sm90ForwardConfig T>
TANDEM_DEVICE void compute(const ForwardParams& p, ForwardShared<T>& s, int index) {
  const float scale_log2 = T.has_score_mod() ? 1.0f : p.scale_log2, threshold = kRescaleThreshold / scale_log2;
  Warpgroup<T> w(p, s, index);
  Dropout dropout;
  if constexpr (T.dropout) dropout = Dropout(p.dropout);
  if (index == T.warpgroups - 1) {
    w.pingpong_signal();
    w.o_smem_release();
  }

  // (With another form of loop ring slots leave the uniform registers.)
  for (int n = w.next_work_tile(); n >= 0; n = w.next_work_tile()) {
    const Work& work = w.work();
    // Read when it is needed, but where registers abound: then at once, which is 2 % where tiles are short.
    constexpr bool kAtOnce = !T.varlen && T.registers() > 160;
    const TileCoords known = kAtOnce ? work.tile<T>(p) : TileCoords();
    auto tile = [&] { return kAtOnce ? known : work.tile<T>(p); };
    typename Warpgroup<T>::QFragments queries;
    if constexpr (T.q_in_registers()) {
      w.load_q(queries);
      __syncwarp();
      w.release_q();
    }
    const NBlockRange n_blocks = n_block_range<T>(p, tile());
    // Of the warpgroup: its first row, and how many of the sequence there are from it on. Worked out where they are
    // needed, as the rows of this thread are: they are not worth registers through the main loop.
    auto first_row = [&] { return tile().m_block * T.tile_m() + index * 64; };
    auto rows_left = [&] { return (tile().q_rows << log2_of(p.pack_gqa)) - first_row(); };
    auto own_row = [&](int i) {
      int row = first_row() + w.warp * 16 + w.lane / 4 + 8 * i;
      asm volatile("" : "+r"(row));
      return Row(p, tile(), row);
    };

    NBlockRange own = n_blocks;
    if constexpr (T.left || T.right) {
      own = n_block_range<T>(p, tile(), first_row(), 64);
      own.begin = max(own.begin, n_blocks.begin);
      own.end = max(own.end, own.begin + 1);
    }
    const bool no_rows = warp_any(rows_left() <= 0);  // the sequence ended in the warpgroups before
    const int visible_end = no_rows ? n_blocks.begin : own.end;
    int n_block = n_blocks.end - 1;
    // Of a block mask: how many steps there are with this one, the next, and whether one has shown each row of the
    // warpgroup some key.
    [[maybe_unused]] const int* next_step = nullptr;
    [[maybe_unused]] int steps = 0, ahead = 0;
    [[maybe_unused]] StepState state = StepState::full;
    [[maybe_unused]] bool shown = false;
    auto read_step = [&] {
      const u32 bits = uniform(ahead);
      n_block = n_block_of(bits);
      state = state_of(bits, index);
      if (steps > 1) ahead = *next_step++;
    };
    // It hides nothing.
    auto is_whole = [&] {
      return state == StepState::full && n_block < own.unmasked_end && (!T.left || n_block >= own.unmasked_begin);
    };
    if constexpr (T.block_mask) {
      next_step = steps_of<T>(p, tile());
      steps = uniform(*next_step);
      next_step += kStepHeader;
      ahead = *next_step++;
      read_step();
#pragma unroll 1
      while (warp_any(no_rows ? steps > 0 : steps > 1 && state == StepState::absent)) {
        w.skip_n_block(tile(), n_blocks, n_block);
        if (--steps > 0) read_step();
      }
    } else {
#pragma unroll 1
      for (; warp_any(n_block >= visible_end); --n_block) w.skip_n_block(tile(), n_blocks, n_block);
    }
    if (no_rows) {
      if constexpr (!T.q_in_registers()) {
        __syncwarp();
        w.release_q();
      }
      w.o_smem_acquire();
      w.o_smem_release();
      continue;
    }

    float scores[T.tile_n / 2], out[T.head_dim_v / 2];
    u32 probabilities[T.tile_n / 4];
    FragmentSoftmax<T.f16> softmax;
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] = 0;

    // To scores. masked: some rows may not see some of the keys.
    auto mod_and_mask = [&](bool masked) {
      const int column0 = n_block * T.tile_n + 2 * (w.lane & 3);
      if constexpr (T.has_score_mod()) apply_score_mod<T>(scores, p, tile(), {own_row(0), own_row(1)}, column0);
      if constexpr (T.block_mask) apply_block_mask<T>(scores, p, tile(), {own_row(0), own_row(1)}, column0, state);
      if (masked && warp_any(n_block >= own.unmasked_end || (T.left && n_block < own.unmasked_begin)))
        apply_mask<T>(scores, p, tile(), {own_row(0), own_row(1)}, column0);
    };
    // Of a step, drawn while it is multiplied: what of its probabilities meets values. Sums are of all of them.
    constexpr int kGroup = 32;  // registers of which one number tells
    u32 kept[(T.tile_n / 2 + kGroup - 1) / kGroup];
    auto draw_kept = [&] {
      if constexpr (T.dropout) {
        const Row row = own_row(w.lane & 1);
        const u32 head = tile().sequence * p.heads_q + row.head;
#pragma unroll
        for (int r = 0; r < T.tile_n / 2; r += kGroup)
          kept[r / kGroup] =
              dropout.by_rows(row.query, head, n_block * T.tile_n + 2 * r, min(kGroup, T.tile_n / 2 - r) / 4, w.lane);
      }
    };
    auto pack_p = [&] {
      if constexpr (T.dropout) {
#pragma unroll
        for (int r = 0; r < T.tile_n / 2; ++r) scores[r] = is_kept(kept[r / kGroup], r % kGroup) ? scores[r] : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < T.tile_n / 4; ++r) probabilities[r] = pack<T>(scores[2 * r], scores[2 * r + 1]);
    };

    // Whether row i of this thread is a query of the sequence: others hold anything, and must not count.
    auto is_used = [&](int i) { return !T.varlen || own_row(i).query < tile().q_len; };

    w.wait_k();
    if (T.pingpong) tma_store_wait_read();  // of the last result; all know of it by the turn
    w.pingpong_wait();
    w.mma_qk(scores, queries);
    w.pingpong_signal();
    draw_kept();
    wgmma_wait<0>();
    fence_operand(scores);
    w.release_k();
    mod_and_mask(true);
    softmax.update_max(scores, scale_log2, threshold);
    softmax.exponentials<0, T.tile_n / 2>(scores, scale_log2);
    pack_p();
    w.zero_v_tail(tile(), n_blocks, n_block);

    auto steady = [&](bool masked, bool strict) __attribute__((always_inline)) {
      w.wait_k();
      w.pingpong_wait();
      w.mma_qk(scores, queries);
      w.wait_v();
      w.mma_pv(out, probabilities);
      w.pingpong_signal();
      if (strict) {
        softmax.add_step();
      } else {
        softmax.settle(probabilities, scale_log2, threshold, [] { wgmma_wait<0>(); });
      }
      draw_kept();
      wgmma_wait<1>();
      fence_operand(scores);
      w.release_k();
      mod_and_mask(masked);
      if (strict) softmax.update_max(scores, scale_log2, threshold);
      // Some exponentials run under p v, the others beside the packing. ptxas would wait for p v before them all: a
      // branch that asks for their sums (and is never taken) keeps it from that.
      constexpr int kAll = T.tile_n / 2, kUnder = T.exps_under_pv();
      softmax.exponentials<0, kUnder>(scores, scale_log2);
      fence_operand(scores);
      if (kUnder > 0 && softmax.step_sum[0] + softmax.step_sum[1] < 0) asm volatile("nanosleep.u32 0;" ::: "memory");
      wgmma_wait<0>();
      fence_operand(out);
      w.release_v();
      if (softmax.rescale) {
#pragma unroll
        for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] *= softmax.alpha[row_of(i)];
      }
      softmax.exponentials<kUnder, kAll>(scores, scale_log2);
      pack_p();
    };
    if constexpr (!T.block_mask) --n_block;
    // The first step that hides nothing may be the first in which a row sees a key.
    int strict_end = own.begin;
    if (!T.lazy_max() || !warp_any(work.strict))
      strict_end = max(strict_end, T.right ? own.unmasked_end - T.lazy_max() : n_block + 1);
    // A step is long, and so is its compilation: one copy asks what it has to do. Only where results are narrow
    // and steps short does asking cost 2 %.
    constexpr bool kMasked = T.left || T.right || T.block_mask, kTwoLoops = T.lazy_max() && T.right && !T.left &&
                                                                            !T.block_mask && T.head_dim_v <= 64 &&
                                                                            T.tile_n <= 64;
    auto is_strict = [&] {
      if (!T.lazy_max()) return true;
      return kMasked ? !kTwoLoops && warp_any(n_block >= strict_end) : warp_any(work.strict);
    };
    if constexpr (kTwoLoops) {
#pragma unroll 1
      for (; warp_any(n_block >= strict_end); --n_block) steady(true, true);
    }
    if constexpr (T.block_mask) {
#pragma unroll 1
      while (warp_any(--steps > 0)) {
        shown = shown || is_whole();
        read_step();
        steady(true, !T.lazy_max() || warp_any(!shown || !is_whole() || work.strict));
      }
    } else {
#pragma unroll 1
      for (; warp_any(n_block >= own.begin); --n_block) steady(kMasked && !kTwoLoops, is_strict());
    }

    if (!T.q_in_registers()) w.release_q();
    w.wait_v();
    w.mma_pv(out, probabilities);
    if (T.lazy_max()) {
      softmax.settle_last(probabilities, [] { wgmma_wait<0>(); });
    } else {
      softmax.add_step();
    }
    // What the sums come to is worked out under that product.
    softmax.reduce_sum();
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row = own_row(i);
      const RowFinal end = finalize_row<T>(p, row, is_used(i), softmax.sum[i], softmax.row_max[i]);
      inverse[i] = end.inverse;
      if constexpr (T.dropout) inverse[i] *= p.dropout.scale;
      if (p.lse && (w.lane & 3) == 0 && row.query < tile().q_rows) store_lse(p, tile(), row, end.lse);
    }
    wgmma_wait<0>();
    fence_operand(out);
    // Probabilities that are as large as they may become, times large values, may come to infinity, too. It is asked
    // for before the last values are given up: then all tiles are done.
    if (T.lazy_max() && softmax.outgrown && !warp_any(work.strict)) {
      const bool used[2] = {is_used(0), is_used(1)};
      bool lost = (used[0] && softmax.overflowed(0)) || (used[1] && softmax.overflowed(1));
#pragma unroll
      for (int i = 0; i < T.head_dim_v / 2; ++i) lost |= used[row_of(i)] && !(fabsf(out[i]) < kInfinity);
      if (warp_any(lost)) w.request_retry();
    }
    w.release_v();

    if constexpr (T.left && !T.block_mask) {
#pragma unroll 1
      for (; warp_any(n_block >= n_blocks.begin); --n_block) w.skip_n_block(tile(), n_blocks, n_block);
    }

    if constexpr (T.f32_out) {
      w.store_f32(out, inverse, tile(), {own_row(0), own_row(1)});
    } else {
      w.store(out, inverse, tile(), first_row(), rows_left(), work.strict);
    }
  }
  tma_store_wait();
}
