// The iterations of an MMA warpgroup of the Hopper forward, one n_block each: scores, softmax, and the PV product of
// the preceding iteration.
#pragma once
#include "device/dropout.cuh"
#include "device/fragment_softmax.cuh"
#include "device/pack.cuh"
#include "sm90/forward/fragment_scores.cuh"
#include "sm90/forward/work_rows.cuh"

// Constants of all iterations.
template <Sm90ForwardConfig T>
struct ScoreConstants {
  const float scale_log2, threshold;
  float bias_factor = 1;
  Dropout dropout;

  TANDEM_DEVICE explicit ScoreConstants(const ForwardParams& p)
      : scale_log2(T.score_mod         ? kLog2e
                   : T.has_score_mod() ? 1.0f
                                       : p.scale_log2),
        threshold(kRescaleThreshold / scale_log2) {
    if constexpr (T.bias != Bias::none) bias_factor = reciprocal(p.scale);
    if constexpr (T.dropout) dropout = Dropout(p.dropout);
  }
};

// The dropout mask of an iteration, drawn during its product. Sums include dropped probabilities.
constexpr int kKeepGroup = 32;  // registers per word of the mask
template <Sm90ForwardConfig T>
constexpr int kKeepMaskWords = (T.tile_n / 2 + kKeepGroup - 1) / kKeepGroup;

// References to compute()'s arrays.
template <Sm90ForwardConfig T>
struct Fragments {
  const typename Warpgroup<T>::QFragments& queries;
  float (&scores)[T.tile_n / 2];
  float (&out)[T.head_dim_v / 2];
  u32 (&probabilities)[T.tile_n / 4];
  u32 (&keep_mask)[kKeepMaskWords<T>];
  u32 (&shown)[kShownNumbers<T>];
  const HeldRow<T> (&held)[2];
};

// Per-row and per-key values of a mask_mod: each thread of a warpgroup evaluates one. Row values are evaluated at the
// start of a tile, key values one iteration ahead. The warpgroup synchronizes in between when it waits for its turn, so
// that no thread waits for these loads.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_mask_rows(const WorkRows<T>& rows) {
  if constexpr (T.evaluates_mask_mod()) {
    static_assert(T.pingpong);
    named_sync(Warpgroup<T>::kWarpgroupSync + rows.w.index, 128);  // the preceding tile's values have been read
    const int row = threadIdx.x % 128;
    const TileCoords tile = rows.tile();
    if (row < 64) rows.w.mask().rows[row] = MaskMod<T>(tile, Row(rows.p, tile, rows.first_row() + row)).row(rows.p);
  }
}
template <Sm90ForwardConfig T>
TANDEM_DEVICE MaskKey<T> mask_key_of(const WorkRows<T>& rows, int n_block) {
  const TileCoords tile = rows.tile();
  return MaskMod<T>(tile, Row(rows.p, tile, 0)).key(rows.p, n_block * T.tile_n + threadIdx.x % 128);
}
// steps: the number of remaining iterations, this one included.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_mask_key(const WorkRows<T>& rows, const MaskKey<T>& key, int steps) {
  const int n = threadIdx.x % 128;
  if (n < T.tile_n) rows.w.mask().keys[steps & 1][n / 2].keys[n & 1] = key;
}
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_first_mask_keys(const WorkRows<T>& rows, const NBlockSteps<T>& at, int n_block) {
  if constexpr (T.evaluates_mask_mod()) {
    if (at.state == BlockState::partial) hold_mask_key(rows, mask_key_of(rows, n_block), at.steps);
  }
}

// Values of the next iteration's keys, loaded while scores are multiplied.
template <Sm90ForwardConfig T>
struct NextMaskKey {
  bool any = false;
  typename OneOf<T.evaluates_mask_mod(), MaskKey<T>, NoRow>::Type key;

  TANDEM_DEVICE NextMaskKey(const WorkRows<T>& rows, const NBlockSteps<T>& at) {
    if constexpr (T.evaluates_mask_mod()) {
      any = at.steps > 1 && state_of(at.next, rows.w.index) == BlockState::partial;
      if (any) key = mask_key_of(rows, n_block_of(at.next));
    }
  }
  TANDEM_DEVICE void hold(const WorkRows<T>& rows, const NBlockSteps<T>& at) const {
    if constexpr (T.evaluates_mask_mod()) {
      if (any) hold_mask_key(rows, key, at.steps - 1);
    }
  }
};

template <Sm90ForwardConfig T>
TANDEM_DEVICE void ask_ahead(const Fragments<T>& f, const WorkRows<T>& rows, const NBlockSteps<T>& at, int n_block) {
  if constexpr (asks_ahead<T>()) {
    const int column0 = n_block * T.tile_n + 2 * (rows.w.lane & 3);
    evaluate_mask_mod<T>(f.shown, rows.p, rows.w.mask(), rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0,
                         at.state, at.steps);
  }
}

// True if some rows of the warpgroup may not see some of the keys.
template <Sm90ForwardConfig T>
TANDEM_DEVICE bool hides(const NBlockSteps<T>& at, int n_block) {
  return n_block >= at.own.unmasked_end || (T.bounded_left && n_block < at.own.unmasked_begin);
}

// Applies score options and masks. masked: some rows may not see some of the keys.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void mod_and_mask(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows,
                                const NBlockSteps<T>& at, int n_block, const ScoreConstants<T>& constants,
                                bool masked) {
  const ForwardParams& p = rows.p;
  const int column0 = n_block * T.tile_n + 2 * (w.lane & 3);
  if constexpr (T.has_score_mod() || T.bias != Bias::none) {
    w.wait_bias();
    apply_score_mod<T>(f.scores, p, rows.tile(), {rows.own_row(0), rows.own_row(1)}, f.held, column0,
                       BiasFragments<T>(w), constants.bias_factor);
    w.release_bias();
  }
  if (masked && warp_any(hides<T>(at, n_block)))
    apply_mask<T>(f.scores, p, rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0);
  if constexpr (T.block_mask)
    apply_block_mask<T>(f.scores, f.shown, p, rows.w.mask(), rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0,
                        at.state, at.steps);
}

template <Sm90ForwardConfig T>
TANDEM_DEVICE void draw_dropout_mask(u32 (&keep_mask)[kKeepMaskWords<T>], const Dropout& dropout,
                                     const WorkRows<T>& rows, int n_block) {
  if constexpr (T.dropout) {
    const int lane = rows.w.lane;
    const Row row = rows.own_row(lane >> 1 & 1);
    const u32 head = rows.tile().sequence * rows.p.heads_q + row.head;
#pragma unroll
    for (int r = 0; r < T.tile_n / 2; r += kKeepGroup)
      keep_mask[r / kKeepGroup] =
          dropout.by_rows(row.query, head, n_block * T.tile_n + 2 * r, min(kKeepGroup, T.tile_n / 2 - r) / 4, lane);
  }
}

template <Sm90ForwardConfig T>
TANDEM_DEVICE void pack_p(const Fragments<T>& f) {
  if constexpr (T.dropout) {
#pragma unroll
    for (int r = 0; r < T.tile_n / 2; ++r)
      f.scores[r] = keep_or_times_zero(f.keep_mask[r / kKeepGroup], Dropout::bit_in_rows(r % kKeepGroup), f.scores[r]);
  }
#pragma unroll
  for (int r = 0; r < T.tile_n / 4; ++r) f.probabilities[r] = pack<T>(f.scores[2 * r], f.scores[2 * r + 1]);
}

// The first iteration of a tile, with its last n_block.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void first_step(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows, const NBlockSteps<T>& at,
                              int n_block, FragmentSoftmax<T.f16>& softmax, const ScoreConstants<T>& constants) {
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
  mod_and_mask(f, w, rows, at, n_block, constants, true);
  softmax.update_max(f.scores, constants.scale_log2, constants.threshold);
  next.hold(rows, at);
  softmax.template exponentials<0, T.tile_n / 2>(f.scores, constants.scale_log2);
  pack_p(f);
  w.zero_v_tail(rows.tile(), at.all, n_block);
}

// The remaining iterations, each with the PV product of the preceding one.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void steady_steps(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows, NBlockSteps<T>& at,
                                int& n_block, FragmentSoftmax<T.f16>& softmax, const ScoreConstants<T>& constants) {
  const Sm90Work& work = rows.work;
  const float scale_log2 = constants.scale_log2, threshold = constants.threshold;
  // Lanes exchange the bits of the dropout mask. An exchange after products stalls until the tensor core has accepted
  // them, so that bits are drawn before p v is issued. At head_dim 64 q k' is too short for that, and they are drawn
  // before the turn. With a block mask the n_block is known only later.
  constexpr bool kDrawsLate = T.block_mask, kDrawsFirst = !kDrawsLate && T.head_dim_v <= 64;
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
    constexpr bool kCapsLate = T.softcap && T.lazy_max() && !T.block_mask;
    bool caps_late = false;
    if constexpr (kCapsLate) {
      const float bound = bound_of(f.scores);  // after the evaluation of `strict` ptxas would spill
      const bool masks = masked && hides<T>(at, n_block);
      caps_late = !strict && !__any_sync(~0u, masks || !(bound < rows.p.softcap_near_product));
    }
    if (!caps_late) mod_and_mask(f, w, rows, at, n_block, constants, masked);
    if (strict) softmax.update_max(f.scores, scale_log2, threshold);
    next.hold(rows, at);
    // Some exponentials overlap p v, the rest overlap the packing. ptxas would wait for p v before all of them; a
    // branch on their sums, which is never taken, prevents that.
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
  if constexpr (!T.block_mask) --n_block;
  // The first iteration without a mask may be the first in which a row sees a key.
  int strict_end = at.own.begin;
  if (!T.lazy_max() || !warp_any(work.strict))
    strict_end = max(strict_end, T.bounded_right ? at.own.unmasked_end - T.lazy_max() : n_block + 1);
  // One loop with a branch compiles faster than two loops. Only narrow results with short iterations use two, because
  // the branch costs 2 % there.
  constexpr bool kMasked = T.bounded_left || T.bounded_right || T.block_mask,
                 kTwoLoops = T.lazy_max() && T.bounded_right && !T.bounded_left && !T.block_mask &&
                             T.head_dim_v <= 64 && T.tile_n <= 64;
  auto is_strict = [&] {
    if (!T.lazy_max()) return true;
    return kMasked ? !kTwoLoops && warp_any(n_block >= strict_end) : warp_any(work.strict);
  };
  if constexpr (kTwoLoops) {
#pragma unroll 1
    for (; warp_any(n_block >= strict_end); --n_block) step(true, [] { return true; });
  }
  if constexpr (T.block_mask) {
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

// The PV product of the last iteration. Meanwhile the sums are reduced to the factor of the result.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void finish(const Fragments<T>& f, float (&inverse)[2], Warpgroup<T>& w, const WorkRows<T>& rows,
                          FragmentSoftmax<T.f16>& softmax) {
  const ForwardParams& p = rows.p;
  if (!T.q_in_registers()) w.release_q();
  w.wait_v();
  w.mma_pv(f.out, f.probabilities);
  if (T.lazy_max()) {
    softmax.settle_last(f.probabilities, [] { wgmma_wait<0>(); });
  } else {
    softmax.add_step();
  }
  softmax.reduce_sum();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Row row = rows.own_row(i);
    const RowFinal end = finalize_row<T>(p, row, rows.is_used(i), softmax.sum[i], softmax.row_max[i]);
    inverse[i] = end.inverse;
    if constexpr (T.dropout) inverse[i] *= p.dropout.scale;
    if (p.lse && (w.lane & 3) == 0 && row.query < rows.tile().q_rows) store_lse(p, rows.tile(), row, end.lse);
  }
  wgmma_wait<0>();
  fence_operand(f.out);
  // The largest probabilities times large values may overflow too. This is tested before the last values are released,
  // because afterwards all tiles count as complete.
  if (T.lazy_max() && softmax.outgrown && !warp_any(rows.work.strict)) {
    const bool used[2] = {rows.is_used(0), rows.is_used(1)};
    bool lost = (used[0] && softmax.overflowed(0)) || (used[1] && softmax.overflowed(1));
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) lost |= used[row_of(i)] && !(fabsf(f.out[i]) < kInfinity);
    if (warp_any(lost)) w.request_retry();
  }
  w.release_v();
}
