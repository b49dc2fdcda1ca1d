// The steps of a computing warpgroup of the Hopper forward, an n_block each: scores, softmax, and the product with the
// values of the step before.
#pragma once
#include "sm90/forward/fragment_scores.cuh"
#include "sm90/forward/work_rows.cuh"
#include "tile/dropout.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/pack.cuh"

// What is the same for all steps.
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

// Which of a step's probabilities meet values, drawn while it is multiplied. Sums are of all of them.
constexpr int kKeptGroup = 32;  // registers of which one number tells
template <Sm90ForwardConfig T>
constexpr int kKeptNumbers = (T.tile_n / 2 + kKeptGroup - 1) / kKeptGroup;

// compute()'s own arrays.
template <Sm90ForwardConfig T>
struct Fragments {
  const typename Warpgroup<T>::QFragments& queries;
  float (&scores)[T.tile_n / 2];
  float (&out)[T.head_dim_v / 2];
  u32 (&probabilities)[T.tile_n / 4];
  u32 (&kept)[kKeptNumbers<T>];
  u32 (&shown)[kShownNumbers<T>];
  const HeldRow<T> (&held)[2];
};

// What a mask_mod needs of rows alone, and of keys alone, the threads of a warpgroup make, one each: of rows where a
// tile begins, of keys there and then a step before they are asked for. In between all of them meet, as they wait for
// their turn; so nobody waits for what the text loads.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_mask_rows(const WorkRows<T>& rows) {
  if constexpr (T.asks_mask()) {
    static_assert(T.pingpong);
    named_sync(Warpgroup<T>::kWarpgroupSync + rows.w.index, 128);  // nobody asks in the tile before
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
// steps: left, with the one that it is of.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_mask_key(const WorkRows<T>& rows, const MaskKey<T>& key, int steps) {
  const int n = threadIdx.x % 128;
  if (n < T.tile_n) rows.w.mask().keys[steps & 1][n / 2].keys[n & 1] = key;
}
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_first_mask_keys(const WorkRows<T>& rows, const NBlockSteps<T>& at, int n_block) {
  if constexpr (T.asks_mask()) {
    if (at.state == StepState::partial) hold_mask_key(rows, mask_key_of(rows, n_block), at.steps);
  }
}

// What the next step's keys hold, on its way while scores are multiplied.
template <Sm90ForwardConfig T>
struct NextMaskKey {
  bool any = false;
  typename OneOf<T.asks_mask(), MaskKey<T>, NoRow>::Type key;

  TANDEM_DEVICE NextMaskKey(const WorkRows<T>& rows, const NBlockSteps<T>& at) {
    if constexpr (T.asks_mask()) {
      any = at.steps > 1 && state_of(at.next, rows.w.index) == StepState::partial;
      if (any) key = mask_key_of(rows, n_block_of(at.next));
    }
  }
  TANDEM_DEVICE void hold(const WorkRows<T>& rows, const NBlockSteps<T>& at) const {
    if constexpr (T.asks_mask()) {
      if (any) hold_mask_key(rows, key, at.steps - 1);
    }
  }
};

template <Sm90ForwardConfig T>
TANDEM_DEVICE void ask_ahead(const Fragments<T>& f, const WorkRows<T>& rows, const NBlockSteps<T>& at, int n_block) {
  if constexpr (asks_ahead<T>()) {
    const int column0 = n_block * T.tile_n + 2 * (rows.w.lane & 3);
    ask_block_mask<T>(f.shown, rows.p, rows.w.mask(), rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0,
                      at.state, at.steps);
  }
}

// Some rows of the warpgroup may not see some of the keys.
template <Sm90ForwardConfig T>
TANDEM_DEVICE bool hides(const NBlockSteps<T>& at, int n_block) {
  return n_block >= at.own.unmasked_end || (T.left && n_block < at.own.unmasked_begin);
}

// Changes and hides scores. masked: some rows may not see some of the keys.
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
TANDEM_DEVICE void draw_kept(u32 (&kept)[kKeptNumbers<T>], const Dropout& dropout, const WorkRows<T>& rows,
                             int n_block) {
  if constexpr (T.dropout) {
    const int lane = rows.w.lane;
    const Row row = rows.own_row(lane >> 1 & 1);
    const u32 head = rows.tile().sequence * rows.p.heads_q + row.head;
#pragma unroll
    for (int r = 0; r < T.tile_n / 2; r += kKeptGroup)
      kept[r / kKeptGroup] =
          dropout.by_rows(row.query, head, n_block * T.tile_n + 2 * r, min(kKeptGroup, T.tile_n / 2 - r) / 4, lane);
  }
}

template <Sm90ForwardConfig T>
TANDEM_DEVICE void pack_p(const Fragments<T>& f) {
  if constexpr (T.dropout) {
#pragma unroll
    for (int r = 0; r < T.tile_n / 2; ++r)
      f.scores[r] = kept_or_times_zero(f.kept[r / kKeptGroup], Dropout::bit_in_rows(r % kKeptGroup), f.scores[r]);
  }
#pragma unroll
  for (int r = 0; r < T.tile_n / 4; ++r) f.probabilities[r] = pack<T>(f.scores[2 * r], f.scores[2 * r + 1]);
}

// The last n_block, with which a tile begins.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void first_step(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows, const NBlockSteps<T>& at,
                              int n_block, FragmentSoftmax<T.f16>& softmax, const ScoreConstants<T>& constants) {
  w.wait_k();
  if (T.pingpong) tma_store_wait_read();  // of the last result; all know of it by the turn
  w.pingpong_wait();
  w.mma_qk(f.scores, f.queries);
  w.pingpong_signal();
  draw_kept(f.kept, constants.dropout, rows, n_block);
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

// All others, each with the values of the step before.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void steady_steps(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows, NBlockSteps<T>& at,
                                int& n_block, FragmentSoftmax<T.f16>& softmax, const ScoreConstants<T>& constants) {
  const Work& work = rows.work;
  const float scale_log2 = constants.scale_log2, threshold = constants.threshold;
  // Lanes exchange the bits of what dropout keeps, and what they exchange behind products waits until the tensor core
  // has taken them: so bits are drawn before p v is issued. At head_dim 64 q k' is not as long as that: before the
  // turn. Only the list of a block mask's steps says, a little later, which n_block this is.
  constexpr bool kDrawsLate = T.block_mask, kDrawsFirst = !kDrawsLate && T.head_dim_v <= 64;
  // strict_now(), asked when the products are under way: every maximum is taken.
  auto step = [&](bool masked, auto strict_now) __attribute__((always_inline)) {
    if constexpr (kDrawsFirst) draw_kept(f.kept, constants.dropout, rows, n_block);
    w.wait_k();
    w.pingpong_wait();
    w.mma_qk(f.scores, f.queries);
    if constexpr (!kDrawsFirst && !kDrawsLate) draw_kept(f.kept, constants.dropout, rows, n_block);
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
    if constexpr (kDrawsLate) draw_kept(f.kept, constants.dropout, rows, n_block);
    wgmma_wait<1>();
    fence_operand(f.scores);
    w.release_k();
    // A softcap's last factor may join what is subtracted from scores, where nobody else looks at them.
    constexpr bool kCapsLate = T.softcap && T.lazy_max() && !T.block_mask;
    bool caps_late = false;
    if constexpr (kCapsLate) {
      const float bound = bound_of(f.scores);  // before `strict` is asked: behind it ptxas would spill
      const bool masks = masked && hides<T>(at, n_block);
      caps_late = !strict && !__any_sync(~0u, masks || !(bound < rows.p.softcap_near_product));
    }
    if (!caps_late) mod_and_mask(f, w, rows, at, n_block, constants, masked);
    if (strict) softmax.update_max(f.scores, scale_log2, threshold);
    next.hold(rows, at);
    // Some exponentials run under p v, the others beside the packing. ptxas would wait for p v before them all: a
    // branch that asks for their sums (and is never taken) keeps it from that.
    constexpr int kAll = T.tile_n / 2, kUnder = T.exps_under_pv();
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
  // The first step that hides nothing may be the first in which a row sees a key.
  int strict_end = at.own.begin;
  if (!T.lazy_max() || !warp_any(work.strict))
    strict_end = max(strict_end, T.right ? at.own.unmasked_end - T.lazy_max() : n_block + 1);
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

// The values of the last step, and under their product what the sums come to: by what the result is multiplied.
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
  // Probabilities that are as large as they may become, times large values, may come to infinity, too. It is asked
  // for before the last values are given up: then all tiles are done.
  if (T.lazy_max() && softmax.outgrown && !warp_any(rows.work.strict)) {
    const bool used[2] = {rows.is_used(0), rows.is_used(1)};
    bool lost = (used[0] && softmax.overflowed(0)) || (used[1] && softmax.overflowed(1));
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) lost |= used[row_of(i)] && !(fabsf(f.out[i]) < kInfinity);
    if (warp_any(lost)) w.request_retry();
  }
  w.release_v();
}
