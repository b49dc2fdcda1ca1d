// Score options applied to a product before the softmax, other than its scale: softcap, ALiBi, bias. The functions
// process rows; the kernel maps registers to rows.
#pragma once
#include "config/score_options.h"
#include "device/mod_functions.cuh"
#include "device/row.cuh"
#include "ptx/float2.cuh"

// softcap * tanh(score / softcap) in log2 units, from products, by an odd polynomial. packed: two products per
// instruction (Blackwell).
template <bool packed, int terms, int n>
TANDEM_DEVICE void softcap_within(float (&x)[n], const float (&polynomial)[terms]) {
  auto capped = [&](auto product, const auto& of) {
    const auto square = product * product;
    auto quotient = of(polynomial[terms - 1]);
#pragma unroll
    for (int term = terms - 2; term >= 0; --term) quotient = fma(quotient, square, of(polynomial[term]));
    return product * quotient;
  };
#pragma unroll
  for (int i = 0; i < n; i += packed ? 2 : 1) {
    if constexpr (packed) {
      split(capped(float2_of(x[i], x[i + 1]), [](float c) { return float2_of(c); }), &x[i], &x[i + 1]);
    } else {
      x[i] = capped(x[i], [](float c) { return c; });
    }
  }
}

// A bound between the largest |x| and twice that value. The function adds pairs, which halves the work.
template <int n>
TANDEM_DEVICE float bound_of(const float (&x)[n]) {
  auto sum = [&](int i) { return __float_as_int(fabsf(x[i]) + fabsf(x[i + 1])); };
  int largest[2] = {0, 0};  // two chains, because one would wait for earlier results
#pragma unroll
  for (int i = 0; i < n; i += 4) largest[i / 4 & 1] = max(max(sum(i), sum(i + 2)), largest[i / 4 & 1]);
  return __int_as_float(max(largest[0], largest[1]));
}

// Applies a softcap to any products. Within the cap a polynomial of degree 11 is within 3.2e-7 of the cap; within 0.28
// of the cap degree 5 suffices. Beyond the cap two operations of the exponential unit are needed. Only warps with such
// a score use the operations, because that unit is busy (tanh.approx has only eleven bits).
template <bool packed, int n>
TANDEM_DEVICE void apply_softcap(float (&x)[n], const ForwardParams& p) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) largest = fmaxf(largest, fabsf(x[i]));
  if (!__any_sync(~0u, !(largest < p.softcap_near_product))) {
    softcap_within<packed>(x, p.softcap_near_polynomial);
  } else if (!__any_sync(~0u, !(largest < p.softcap_product))) {
    softcap_within<packed>(x, p.softcap_polynomial);
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      float within[1] = {x[i]};
      softcap_within<false>(within, p.softcap_polynomial);
      const float any =
          fmaf(-2 * p.softcap_log2, reciprocal(1.0f + exp2_approx(x[i] * p.scale_softcap)), p.softcap_log2);
      x[i] = fabsf(x[i]) < p.softcap_product ? within[0] : any;
    }
  }
}

// Returns from + more; more is a constant. The exponential unit also converts integers to floats and has no time for
// one conversion per score. One conversion of `from` therefore serves several scores.
TANDEM_DEVICE float distance_of(int from, int more) { return static_cast<float>(from) + static_cast<float>(more); }

// With a block mask, MaskMod evaluates the mask_mod separately, in partial blocks.
template <auto T>
constexpr bool mask_mod_of_all() {
  return T.options.mask_mod && !T.options.block_mask;
}

// Preloaded values of a row for a score_mod, or nothing.
struct NoRow {};
template <auto T>
using HeldRow = typename OneOf<T.options.score_mod, ScoreRow<T>, NoRow>::Type;
template <auto T>
TANDEM_DEVICE HeldRow<T> hold_row(const ForwardParams& p, const TileCoords& t, const Row& row) {
  if constexpr (T.options.score_mod) {
    const ModPlace place{t.sequence, row.head, row.query, 0, t.q_len, t.k_len};
    return score_row<T>(place, static_cast<const ModifiedForwardParams&>(p).mods.score);
  } else {
    return {};
  }
}

// The value of a bias for a score: a number, or visibility.
template <auto T>
using BiasValue = typename OneOf<T.options.bias == Bias::boolean, bool, float>::Type;
template <auto T>
TANDEM_DEVICE BiasValue<T> bias_value(const char* at) {
  if (T.options.bias == Bias::boolean) return *at != 0;
  return load_element<T.options.f16>(at, 0, T.options.bias == Bias::f32);
}
// Adds a bias to a product before the scale if no other option applies: a number times 1 / scale, or -infinity. This
// requires a scale close to 1; other scales use scale_outside_exp2.
template <auto T>
TANDEM_DEVICE float with_bias(float product, BiasValue<T> bias, float by) {
  if (T.options.bias == Bias::boolean) return bias ? product : -kInfinity;
  return fmaf(bias, by, product);
}

// Computes a row's scores in log2 units from products (with a softcap: from apply_softcap()'s results). Beyond the
// tensor every score is masked, and the last bias is read again, because branches per element compile slowly. natural:
// scores are in natural units, because an expression computed them; the factor of the exponentials converts them.
template <auto T, bool natural = false>
struct ScoreMod {
  static constexpr float kUnit = natural ? 1.0f : kLog2e;
  static constexpr int kBiasBytes = bytes_of(T.options.bias);
  float slope;
  int diagonal;      // column on the row's diagonal; placed: its position
  int stride;        // placed: distance of neighbouring keys
  const char* bias;  // the row's bias
  i64 bias_stride;   // bytes per column
  ModPlace place;    // position without the key
  HeldRow<T> held;

  ScoreMod() = default;
  TANDEM_DEVICE ScoreMod(const ForwardParams& p, const TileCoords& t, const Row& row)
      : ScoreMod(p, t, row, hold_row<T>(p, t, row)) {}
  TANDEM_DEVICE ScoreMod(const ForwardParams& p, const TileCoords& t, const Row& row, const HeldRow<T>& held_row)
      : held(held_row) {
    if (T.options.alibi) {
      slope = kUnit * p.alibi_slopes[t.sequence * p.alibi_batch + row.head * p.alibi_head];
      diagonal = row.query + diagonal_of<T>(p, t);
      if constexpr (T.options.placed) {
        const Place& at = p.places[t.sequence];
        stride = at.stride;
        diagonal = at.first_query + row.query * at.stride + at.diagonal - at.first_key;
      }
    }
    if (T.options.bias != Bias::none) {
      const i64 at = t.batch * p.bias_batch + row.head * p.bias_head + min(row.query, p.seqlen_q - 1) * p.bias_row;
      bias = static_cast<const char*>(p.bias) + at * kBiasBytes;
      bias_stride = p.bias_column * kBiasBytes;
    }
    if (T.options.score_mod || T.options.mask_mod) place = {t.sequence, row.head, row.query, 0, t.q_len, t.k_len};
  }
  TANDEM_DEVICE BiasValue<T> bias_at(const ForwardParams& p, int column) const {
    if (T.options.bias == Bias::none) return {};
    return bias_value<T>(bias + min(column, p.seqlen_k - 1) * bias_stride);
  }
  // Applies the options to column0 + n; n is a constant.
  TANDEM_DEVICE float operator()(float x, const ForwardParams& p, int column0, int n) const {
    return (*this)(x, p, column0, n, bias_at(p, column0 + n));
  }
  TANDEM_DEVICE float operator()(float x, const ForwardParams& p, int column0, int n, BiasValue<T> of_bias) const {
    const int column = column0 + n;
    bool visible = true;
    if (!T.options.softcap) {
      x *= natural ? kLn2 * p.scale_log2 : p.scale_log2;
    } else if (natural) {
      x *= kLn2;
    }
    if (T.options.alibi) {
      x -= slope * fabsf(T.options.placed ? static_cast<float>(diagonal - column * stride)
                                          : distance_of(diagonal - column0, -n));
    }
    if (T.options.bias == Bias::boolean) {
      visible = of_bias;
    } else if (T.options.bias != Bias::none) {
      x += kUnit * of_bias;
    }
    if (T.options.score_mod || T.options.mask_mod) {
      const ModParams& mods = static_cast<const ModifiedForwardParams&>(p).mods;
      ModPlace at = place;
      at.k = column;
      if constexpr (T.options.score_mod)
        x = natural ? score_mod<T>(x, held, at, mods.score) : kLog2e * score_mod<T>(kLn2 * x, held, at, mods.score);
      if constexpr (mask_mod_of_all<T>()) visible = visible && mask_mod<T>(at, mods.mask);
    }
    if (T.options.bias == Bias::boolean || mask_mod_of_all<T>()) {
      if (!visible) x = -kInfinity;
    }
    return x;
  }
};
