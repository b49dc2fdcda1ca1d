// The scores of an n_block in the Hopper forward: score options, masks, dropout, and the rounding of P.
#pragma once
#include "device/dropout.cuh"
#include "device/fragment_softmax.cuh"
#include "device/pack.cuh"
#include "sm90/forward/fragment_scores.cuh"
#include "sm90/forward/mask_mod_values.cuh"
#include "sm90/forward/work_rows.cuh"

// Constants of all iterations.
template <Sm90ForwardConfig T>
struct ScoreConstants {
  const float scale_log2, threshold;
  float bias_factor = 1;
  Dropout dropout;

  TANDEM_DEVICE explicit ScoreConstants(const ForwardParams& p)
      : scale_log2(T.options.score_mod ? kLog2e
                   : T.has_score_mod() ? 1.0f
                                       : p.scale_log2),
        threshold(kRescaleThreshold / scale_log2) {
    if constexpr (T.options.bias != Bias::none) bias_factor = reciprocal(p.scale);
    if constexpr (T.options.dropout) dropout = Dropout(p.dropout);
  }
};

// The dropout mask of an iteration, drawn during its product. Sums include dropped probabilities.
constexpr int kKeepGroup = 32;  // registers per word of the mask
template <Sm90ForwardConfig T>
constexpr int kKeepMaskWords = (T.tile_n / 2 + kKeepGroup - 1) / kKeepGroup;

// References to the arrays of compute(), and constants.
template <Sm90ForwardConfig T>
struct Fragments {
  const typename Warpgroup<T>::QFragments& queries;
  float (&scores)[T.tile_n / 2];
  float (&out)[T.head_dim_v / 2];
  u32 (&probabilities)[T.tile_n / 4];
  u32 (&keep_mask)[kKeepMaskWords<T>];
  u32 (&shown)[kShownNumbers<T>];
  const HeldRow<T> (&held)[2];
  const ScoreConstants<T>& constants;
};

template <Sm90ForwardConfig T>
TANDEM_DEVICE void ask_ahead(const Fragments<T>& f, const WorkRows<T>& rows, const NBlockSteps<T>& at, int n_block) {
  if constexpr (asks_ahead<T>()) {
    const int column0 = n_block * T.tile_n + 2 * (rows.w.lane & 3);
    evaluate_mask_mod<T>(f.shown, {rows.p, rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0}, rows.w.mask(),
                         at.state, at.steps);
  }
}

// Returns true if some rows of the warpgroup may not see some of the keys.
template <Sm90ForwardConfig T>
TANDEM_DEVICE bool hides(const NBlockSteps<T>& at, int n_block) {
  return n_block >= at.own.unmasked_end || (T.options.bounded_left && n_block < at.own.unmasked_begin);
}

// Applies score options and masks. masked: some rows may not see some of the keys.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void mod_and_mask(const Fragments<T>& f, Warpgroup<T>& w, const WorkRows<T>& rows,
                                const NBlockSteps<T>& at, int n_block, bool masked) {
  const ForwardParams& p = rows.p;
  const int column0 = n_block * T.tile_n + 2 * (w.lane & 3);
  if constexpr (T.has_score_mod() || T.options.bias != Bias::none) {
    w.wait_bias();
    apply_score_mod<T>(f.scores, {p, rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0}, f.held,
                       BiasFragments<T>(w), f.constants.bias_factor);
    w.release_bias();
  }
  if (masked && warp_any(hides<T>(at, n_block)))
    apply_mask<T>(f.scores, p, rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0);
  if constexpr (T.options.block_mask)
    apply_block_mask<T>(f.scores, f.shown, {p, rows.tile(), {rows.own_row(0), rows.own_row(1)}, column0}, rows.w.mask(),
                        at.state, at.steps);
}

template <Sm90ForwardConfig T>
TANDEM_DEVICE void draw_dropout_mask(u32 (&keep_mask)[kKeepMaskWords<T>], const Dropout& dropout,
                                     const WorkRows<T>& rows, int n_block) {
  if constexpr (T.options.dropout) {
    const int lane = rows.w.lane;
    const Row row = rows.own_row(lane >> 1 & 1);
    const auto head = dropout_head<T>(rows.p, rows.tile().sequence, row.head);
#pragma unroll
    for (int r = 0; r < T.tile_n / 2; r += kKeepGroup)
      keep_mask[r / kKeepGroup] =
          dropout.by_rows(row.query, head, n_block * T.tile_n + 2 * r, min(kKeepGroup, T.tile_n / 2 - r) / 4, lane);
  }
}

template <Sm90ForwardConfig T>
TANDEM_DEVICE void pack_p(const Fragments<T>& f) {
  if constexpr (T.options.dropout) {
#pragma unroll
    for (int r = 0; r < T.tile_n / 2; ++r)
      f.scores[r] = keep_or_times_zero(f.keep_mask[r / kKeepGroup], Dropout::bit_in_rows(r % kKeepGroup), f.scores[r]);
  }
#pragma unroll
  for (int r = 0; r < T.tile_n / 4; ++r) f.probabilities[r] = pack<T>(f.scores[2 * r], f.scores[2 * r + 1]);
}
