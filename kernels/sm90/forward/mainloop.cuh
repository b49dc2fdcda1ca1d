// The main loop of an MMA warpgroup of the Hopper forward. An iteration has one n_block: scores, softmax, and the PV
// product of the preceding iteration.
#pragma once
#include "sm90/forward/n_block_scores.cuh"

// The first iteration of a tile, with its last n_block.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void mainloop_first(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows,
                                  const NBlockSteps<T>& at, int n_block, FragmentSoftmax<T.options.f16>& softmax) {
  const ScoreConstants<T>& constants = f.constants;
  w.wait_k();
  if (T.pingpong) tma_store_wait_read();  // last result; the pingpong order publishes this
  w.pingpong_wait();
  w.mma_qk(f.scores, f.queries);
  w.pingpong_signal();
  draw_dropout_mask(f.keep_mask, constants.dropout, rows, n_block);
  const NextMaskKey<T> next(rows, at);
  ask_ahead(f, rows, at, n_block);
  wgmma_wait<0>();
  fence_operand(f.scores);
  w.release_k();
  mod_and_mask(f, w, rows, at, n_block, true);
  softmax.update_max(f.scores, constants.scale_log2, constants.threshold);
  next.hold(rows, at);
  softmax.template exponentials<0, T.tile_n / 2>(f.scores, constants.scale_log2);
  pack_p(f);
  w.zero_v_tail(rows.tile(), at.all, n_block);
}

// The remaining iterations, each with the PV product of the preceding one.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void mainloop(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows, NBlockSteps<T>& at,
                            int& n_block, FragmentSoftmax<T.options.f16>& softmax) {
  const ScoreConstants<T>& constants = f.constants;
  const Sm90Work& work = rows.work;
  const float scale_log2 = constants.scale_log2, threshold = constants.threshold;
  // Lanes exchange the bits of the dropout mask. An exchange after products stalls until the tensor core has accepted
  // them, so that bits are drawn before p v is issued. At head_dim 64 q k' is too short, and the bits are drawn before
  // the turn. With a block mask the n_block is known only later.
  constexpr bool kDrawsLate = T.options.block_mask, kDrawsFirst = !kDrawsLate && T.head_dim_v <= 64;
  // strict_now() is evaluated after the products are issued. True: every maximum is taken.
  auto step = [&](bool masked, auto strict_now) __attribute__((always_inline)) {
    if constexpr (kDrawsFirst) draw_dropout_mask(f.keep_mask, constants.dropout, rows, n_block);
    w.wait_k();
    w.pingpong_wait();
    w.mma_qk(f.scores, f.queries);
    if constexpr (!kDrawsFirst && !kDrawsLate) draw_dropout_mask(f.keep_mask, constants.dropout, rows, n_block);
    w.wait_v();
    w.mma_pv(f.out, f.probabilities);
    w.pingpong_signal();
    const bool strict = strict_now();
    if (strict) {
      softmax.add_step();
    } else {
      softmax.settle(f.probabilities, scale_log2, threshold, [] { wgmma_wait<0>(); });
    }
    const NextMaskKey<T> next(rows, at);
    ask_ahead(f, rows, at, n_block);
    if constexpr (kDrawsLate) draw_dropout_mask(f.keep_mask, constants.dropout, rows, n_block);
    wgmma_wait<1>();
    fence_operand(f.scores);
    w.release_k();
    // The last factor of a softcap can be merged into the exponentials if no other code reads the scores.
    constexpr bool kCapsLate = T.options.softcap && T.lazy_max() && !T.options.block_mask;
    bool caps_late = false;
    if constexpr (kCapsLate) {
      const float bound = bound_of(f.scores);  // ptxas would spill if this came after `strict`
      const bool masks = masked && hides<T>(at, n_block);
      caps_late = !strict && !__any_sync(~0u, masks || !(bound < rows.p.softcap_near_product));
    }
    if (!caps_late) mod_and_mask(f, w, rows, at, n_block, masked);
    if (strict) softmax.update_max(f.scores, scale_log2, threshold);
    next.hold(rows, at);
    // Some exponentials overlap p v, the rest overlap the packing. ptxas would wait for p v before all exponentials; a
    // branch on the exponentials' sums, which is never taken, prevents that wait.
    constexpr int kAll = T.tile_n / 2, kUnder = T.exp_before_pv_wait();
    if (caps_late) {
      softmax.capped_exponentials(f.scores, rows.p.softcap_near_polynomial);
    } else {
      softmax.template exponentials<0, kCapsLate ? kAll : kUnder>(f.scores, scale_log2);
    }
    fence_operand(f.scores);
    if (kUnder > 0 && softmax.step_sum[0] + softmax.step_sum[1] < 0) asm volatile("nanosleep.u32 0;" ::: "memory");
    wgmma_wait<0>();
    fence_operand(f.out);
    w.release_v();
    if (softmax.rescale) {
#pragma unroll
      for (int i = 0; i < T.head_dim_v / 2; ++i) f.out[i] *= softmax.alpha[row_of(i)];
    }
    if constexpr (!kCapsLate) softmax.template exponentials<kUnder, kAll>(f.scores, scale_log2);
    pack_p(f);
  };
  if constexpr (!T.options.block_mask) --n_block;
  // The first iteration without a mask may be the first in which a row sees a key.
  int strict_end = at.own.begin;
  if (!T.lazy_max() || !warp_any(work.strict))
    strict_end = max(strict_end, T.options.bounded_right ? at.own.unmasked_end - T.lazy_max() : n_block + 1);
  // One loop with a branch compiles faster than two loops. Only narrow results with short iterations use two, because
  // the branch costs 2 % there.
  constexpr bool kMasked = T.options.bounded_left || T.options.bounded_right || T.options.block_mask,
                 kTwoLoops = T.lazy_max() && T.options.bounded_right && !T.options.bounded_left &&
                             !T.options.block_mask && T.head_dim_v <= 64 && T.tile_n <= 64;
  auto is_strict = [&] {
    if (!T.lazy_max()) return true;
    return kMasked ? !kTwoLoops && warp_any(n_block >= strict_end) : warp_any(work.strict);
  };
  if constexpr (kTwoLoops) {
#pragma unroll 1
    for (; warp_any(n_block >= strict_end); --n_block) step(true, [] { return true; });
  }
  if constexpr (T.options.block_mask) {
#pragma unroll 1
    while (warp_any(--at.steps > 0)) {
      step(true, [&] {
        at.shown = at.shown || at.is_whole(n_block);
        n_block = at.read_step(w.index);
        return !T.lazy_max() || warp_any(!at.shown || work.strict);
      });
    }
  } else {
#pragma unroll 1
    for (; warp_any(n_block >= at.own.begin); --n_block)
      step(kMasked && !kTwoLoops, [strict = is_strict()] { return strict; });
  }
}
