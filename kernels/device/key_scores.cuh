// Scores and their derivatives with keys in rows and queries in columns: the same options and masks as in the forward.
#pragma once
#include "device/block_mask.cuh"
#include "device/score_mod.cuh"
#include "device/sequence.cuh"
#include "ptx/warp.cuh"

// The score in log2 units before ALiBi and bias, from a product or, with a softcap, from the result of apply_softcap().
template <auto T>
TANDEM_DEVICE float scaled_score(float x, const BackwardParams& p) {
  return T.options.softcap ? x : x * p.scale_log2;
}
// The derivative of a softcap without the scale: 1 - tanh^2, or 0 for a hidden score, which is -infinity.
TANDEM_DEVICE float softcap_derivative(float score, const BackwardParams& p) {
  const float tanh = score * p.softcap_inverse;
  return fmaxf(fmaf(-tanh, tanh, 1.0f), 0.0f);
}

// Values of a score_mod that depend only on the row. The values are loaded before the scores are ready if all rows of a
// head share them.
template <auto T>
constexpr bool holds_heads() {
  if constexpr (T.options.score_mod) return rows_are_alike<T>();
  return false;
}
template <auto T>
using HeadRow = typename OneOf<holds_heads<T>(), HeldRow<T>, NoRow>::Type;
template <auto T>
TANDEM_DEVICE HeadRow<T> hold_head(const BackwardParams& p, const SequenceCoords& s, int head) {
  if constexpr (holds_heads<T>()) {
    return score_row<T>({s.sequence, head, 0, 0, s.q_len, s.k_len},
                        static_cast<const ModifiedBackwardParams&>(p).mods.score);
  } else {
    return {};
  }
}

// Score options of one head.
template <auto T>
struct HeadScores {
  static constexpr int kBiasBytes = T.options.bias == Bias::boolean ? 1 : T.options.bias == Bias::f32 ? 4 : 2;
  float slope = 0;
  int diagonal = 0, stride = 1;
  const char* bias = nullptr;
  ModPlace place;                       // position without the query and the key
  BlockState state = BlockState::full;  // block mask, unless evaluated separately
  HeadRow<T> held;

  TANDEM_DEVICE HeadScores(const BackwardParams& p, const SequenceCoords& s, int head)
      : HeadScores(p, s, head, hold_head<T>(p, s, head)) {}
  TANDEM_DEVICE HeadScores(const BackwardParams& p, const SequenceCoords& s, int head, const HeadRow<T>& row)
      : held(row) {
    if (T.options.alibi) {
      slope = kLog2e * p.alibi_slopes[s.sequence * p.alibi_batch + head * p.alibi_head];
      diagonal = diagonal_of<T>(p, s);
      if constexpr (T.options.placed) {
        const Place& at = p.places[s.sequence];
        stride = at.stride;
        diagonal = at.first_query + at.diagonal - at.first_key;
      }
    }
    if (T.options.bias != Bias::none)
      bias = static_cast<const char*>(p.bias) + (s.batch * p.bias_batch + head * p.bias_head) * kBiasBytes;
    if (T.options.score_mod || T.options.mask_mod) place = {s.sequence, head, 0, 0, s.q_len, s.k_len};
  }
  // Applies ALiBi, bias and modifications to query0 + n; n is a constant. Beyond the tensor every score is masked, and
  // the last bias is read again. mod_input: the score before the score_mod. derivative: the score_mod's derivative by
  // mod_input.
  TANDEM_DEVICE float operator()(float x, const BackwardParams& p, int query0, int n, int key, float* derivative,
                                 float* mod_input = nullptr) const {
    const int query = query0 + n;
    bool visible = true;
    if (T.options.alibi) {
      const float distance = T.options.placed ? static_cast<float>(diagonal + (query - key) * stride)
                                              : distance_of(query0 + diagonal - key, n);
      x -= slope * fabsf(distance);
    }
    if (T.options.bias != Bias::none) {
      const i64 at = min(query, p.seqlen_q - 1) * p.bias_row + min(key, p.seqlen_k - 1) * p.bias_column;
      if (T.options.bias == Bias::boolean) {
        visible = bias[at] != 0;
      } else {
        x += kLog2e * load_element<T.options.f16>(bias, at, T.options.bias == Bias::f32);
      }
    }
    if (T.options.score_mod || T.options.mask_mod) {
      const ModParams& mods = static_cast<const ModifiedBackwardParams&>(p).mods;
      ModPlace at = place;
      at.q = query;
      at.k = key;
      if constexpr (T.options.score_mod) {
        const float score = kLn2 * x;
        const HeldRow<T> row = row_at(at, mods.score);
        *derivative *= score_slope<T>(score, row, at, mods.score);
        if (mod_input != nullptr) *mod_input = score;
        x = kLog2e * score_mod<T>(score, row, at, mods.score);
      }
      if constexpr (T.options.mask_mod && T.options.block_mask) {
        if (state == BlockState::partial) visible = visible && mask_mod<T>(at, mods.mask);
      } else if constexpr (T.options.mask_mod) {
        visible = visible && mask_mod<T>(at, mods.mask);
      }
    }
    if (T.options.block_mask) visible = visible && (state == BlockState::full || state == BlockState::partial);
    if (T.options.bias == Bias::boolean || T.options.mask_mod || T.options.block_mask) {
      if (!visible) x = -kInfinity;
    }
    return x;
  }

 private:
  TANDEM_DEVICE HeldRow<T> row_at(const ModPlace& at, const ModNames& names) const {
    if constexpr (holds_heads<T>()) {
      return held;
    } else {
      return score_row<T>(at, names);
    }
  }
};

// Returns P times the derivative of its score with a softcap or score_mod: the factor of dP - delta. A P of 0 gives 0,
// even if the derivative is inf or NaN.
template <auto T>
TANDEM_DEVICE float apply_score_derivative(float probability, float derivative) {
  if constexpr (T.options.score_mod) return probability == 0 ? 0.0f : probability * derivative;
  return T.options.softcap ? probability * derivative : probability;
}
