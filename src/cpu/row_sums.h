// Probabilities of the backward: e^(score - lse), or e^(score - max) / sum where a float32 lse is too short for a row.
#pragma once

#include "cpu/forward.h"

namespace tandem::cpu::TANDEM_TARGET {

inline RowTerms& terms_of(RowTermsView terms, const PanelRows& rows, int lane) {
  return terms.data[rows.query[lane] * terms.query_stride + rows.head[lane] * terms.head_stride];
}
inline const float* value_of(const View& view, const Piece& piece, const PanelRows& rows, int lane) {
  return row_of<float>(view, piece.sequence, piece.sequence.q_begin, rows.query[lane], rows.head[lane]);
}
inline float lse_of(const Piece& piece, const PanelRows& rows, int lane) {
  return *value_of(piece.problem->lse, piece, rows, lane);
}

// How a score becomes a probability, per lane. Lanes with an lse: e^(score - lse). All other lanes: e^(score - max) /
// sum.
template <int Degree>
struct Probabilities {
  float lse[kPanel];  // unit of stored scores; inf (P = 0) for a row without keys
  float max[kPanel], inverse_sum[kPanel], delta[kPanel];
  bool summed = false;  // any lane has a sum

  Probabilities(const Piece& piece, const PanelRows& rows, double unit, RowTermsView terms) {
    for (int i = 0; i < kPanel; ++i) {
      lse[i] = kInfinity, max[i] = inverse_sum[i] = delta[i] = 0;
      if (i >= rows.count) continue;
      const RowTerms& row = terms_of(terms, rows, i);
      const float l = lse_of(piece, rows, i);
      if (l != -kInfinity) lse[i] = static_cast<float>(l / unit);
      max[i] = row.max, inverse_sum[i] = row.inverse_sum, delta[i] = row.delta;
      summed |= row.inverse_sum != 0;
    }
  }

  VF operator()(const float* score, int h, VF factor) const {
    return exp2<Degree>(hn::Mul(hn::Sub(load(score + h), load(lse + h)), factor));
  }
  // The same for both kinds of lanes.
  VF of_any(const float* score, int h, VF factor) const {
    const VF inverse = load(inverse_sum + h);
    const auto lse_alone = hn::Eq(inverse, hn::Zero(FTag()));
    const VF from = select(lse_alone, load(lse + h), load(max + h));
    const VF x = exp2<Degree>(hn::Mul(hn::Sub(load(score + h), from), factor));
    return select(lse_alone, x, hn::Mul(x, inverse));
  }
};

// The answer for a row. kFewKeys: the row is summed again if it sees fewer keys than the constant.
enum class SumAgain { kNo, kFewKeys, kYes };
constexpr int kFewKeys = 16;

// A float32 lse is off by up to |lse| 2^-24 and by the errors of its scores, and so is every probability of the row.
// Standard attention has no such error if one key dominates the row. In a broad row, whose lse is near log(keys), the
// sums over many rows hide the error. 16-bit probabilities hide the error of a small lse.
template <int Degree>
inline SumAgain sums_again(const Piece& piece, const PanelRows& rows, int lane) {
  constexpr float kExactEnough = Degree == 6 ? 0.0f : Degree == 4 ? 256.0f : 2048.0f;
  constexpr float kBroadMax = 16.0f, kBroadMargin = 2.0f;
  constexpr int64_t kManyRows = 256;
  const Problem& p = *piece.problem;
  const float lse = lse_of(piece, rows, lane), magnitude = lse < 0 ? -lse : lse;
  if (!(magnitude >= kExactEnough && magnitude < kInfinity)) return SumAgain::kNo;
  if (lse < 0 || lse >= kBroadMax || piece.sequence.q_len * piece.heads < kManyRows) return SumAgain::kYes;
  const int32_t keys = rows.key_end[lane] - rows.key_begin[lane];
  if (keys < kFewKeys || exp2f((lse - kBroadMargin) * kLog2e) >= static_cast<float>(keys)) return SumAgain::kYes;
  return p.masked() || p.bias.present || p.score_mod.present ? SumAgain::kFewKeys : SumAgain::kNo;
}

// The largest score and the sums of each lane so far. The maximum is exact.
struct ExactSums {
  float max[kPanel], sum[kPanel];
  float of_dp[kPanel];  // the sum of e^(score - max) dP

  ExactSums() {
    for (int i = 0; i < kPanel; ++i) max[i] = -kInfinity, sum[i] = of_dp[i] = 0;
  }

  // dp: in the layout of scores.
  void add(const float* scores, const float* dp, int64_t stride, int64_t count, float factor) {
    const VF f = set(factor), zero = hn::Zero(FTag());
    for (int h = 0; h < kPanel; h += kLanes) {
      const VF old = load(max + h);
      VF top = old;
      for (int64_t j = 0; j < count; ++j) top = hn::Max(top, load(scores + j * stride + h));
      const VF from = finite_max(top);
      ProbabilitySum<6> terms, products;
      for (int64_t j = 0; j < count; ++j) {
        const VF x = exp2<6>(hn::Mul(hn::Sub(load(scores + j * stride + h), from), f));
        terms.add(x);
        // dP of a hidden key may be inf or NaN.
        products.add(hn::Mul(x, select(hn::Eq(x, zero), zero, load(dp + j * stride + h))));
      }
      const VF alpha = exp2<6>(hn::Mul(hn::Sub(old, from), f));
      store(hn::MulAdd(load(sum + h), alpha, terms.sum()), sum + h);
      store(hn::MulAdd(load(of_dp + h), alpha, products.sum()), of_dp + h);
      store(top, max + h);
    }
  }
};

// The sum of a row's exponentials over its keys and the sink, in units of e^(their maximum), next to the row's lse.
struct RowSum {
  float sum, of_keys, of_sink;  // of_keys: converts a sum in units of e^max
  double lse, off;              // off: the log of this sum minus lse; NaN: no sum

  RowSum(const Piece& piece, const PanelRows& rows, int lane, double unit, const ExactSums& sums) {
    constexpr double kLog2E = 1.44269504088896340736;
    const double sink = sink_of(*piece.problem, rows.head[lane]);
    const double max = sums.max[lane] * unit, top = max > sink ? max : sink;
    of_keys = exp2f(static_cast<float>((max - top) * kLog2E));
    of_sink = sink == -kInfinity ? 0.0f : exp2f(static_cast<float>((sink - top) * kLog2E));
    sum = sums.sum[lane] * of_keys + of_sink;
    lse = lse_of(piece, rows, lane);
    off = top + log(sum) - lse;
  }

  // Three decisions need three bounds of |off|, with u = 2^-24. The bound of is_whole() would make agrees() repeat a
  // pass for roundings. The bound of agrees() would let is_whole() accept rows that lack keys, and is_near() refuse all
  // rows.

  // True if the sum may replace lse, which changes P by |off|. Roundings of scores and sum give 16 u |lse| + 4 u.
  // error: the effect of errors of the scores' products.
  bool agrees(double error) const { return __builtin_fabs(off) <= 0x1p-20 * __builtin_fabs(lse) + 0x1p-22 + error; }
  // True if P dP may give delta. Keys that the sum lacks weigh at most |off|, but all of dP - delta may depend on them.
  // Roundings of lse and sum give 2 u (1 + |lse|).
  bool is_whole() const { return __builtin_fabs(off) <= 0x1p-23 * (1 + __builtin_fabs(lse)); }
  // True if a second pass may find errors of products that explain |off|. Beyond 2^16 u (1 + |lse|) the scores would
  // have lost 16 of 24 bits, and the row mostly lacks keys.
  bool is_near() const { return __builtin_fabs(off) <= 0x1p-8 * (1 + __builtin_fabs(lse)); }
};

}  // namespace tandem::cpu::TANDEM_TARGET
