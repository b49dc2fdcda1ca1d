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

// A float32 lse is off by up to |lse| 2^-24, and so is every probability of the row. Standard attention has no such
// error if one key dominates the row. In a broad row, whose lse is near log(keys), the sums over many rows hide the
// error. Few rows hide no error, so that their limit in float32 is lower.
template <int Degree>
inline bool is_lse_too_short(const Piece& piece, const PanelRows& rows, int lane) {
  constexpr float kExactEnough = Degree == 6 ? 4.0f : Degree == 4 ? 256.0f : 2048.0f;
  constexpr float kExactInFewRows = Degree == 6 ? 1.0f : kExactEnough;
  constexpr float kBroadMax = 16.0f, kBroadMargin = 2.0f;
  constexpr int64_t kManyRows = 256;
  const bool has_few_rows = piece.sequence.q_len * piece.heads < kManyRows;
  const float lse = lse_of(piece, rows, lane), magnitude = lse < 0 ? -lse : lse;
  if (!(magnitude >= (has_few_rows ? kExactInFewRows : kExactEnough) && magnitude < kInfinity)) return false;
  if (lse < 0 || lse >= kBroadMax || has_few_rows) return true;
  return exp2f((lse - kBroadMargin) * kLog2e) >= static_cast<float>(rows.key_end[lane] - rows.key_begin[lane]);
}

// The largest score and the sum of each lane so far. The maximum is exact.
struct ExactSums {
  float max[kPanel], sum[kPanel];

  ExactSums() {
    for (int i = 0; i < kPanel; ++i) max[i] = -kInfinity, sum[i] = 0;
  }

  void add(const float* scores, int64_t stride, int64_t count, float factor) {
    const VF f = set(factor);
    for (int h = 0; h < kPanel; h += kLanes) {
      const VF old = load(max + h);
      VF top = old;
      for (int64_t j = 0; j < count; ++j) top = hn::Max(top, load(scores + j * stride + h));
      const VF from = finite_max(top);
      ProbabilitySum<6> terms;
      for (int64_t j = 0; j < count; ++j) terms.add(exp2<6>(hn::Mul(hn::Sub(load(scores + j * stride + h), from), f)));
      const VF alpha = exp2<6>(hn::Mul(hn::Sub(old, from), f));
      store(hn::MulAdd(load(sum + h), alpha, terms.sum()), sum + h);
      store(top, max + h);
    }
  }
};

// Decides whether these sums are the row's sums, because other parts of a sequence may contribute to lse. A row's sums
// are complete if they agree with lse to the precision of float32 scores. The products may have had another order when
// lse was computed.
inline void set_sums(const Piece& piece, const PanelRows& rows, int lane, double unit, const ExactSums& sums,
                     RowTerms* terms) {
  constexpr double kLog2E = 1.44269504088896340736, kPrecision = 0x1p-20;
  const double lse = lse_of(piece, rows, lane), sink = sink_of(*piece.problem, rows.head[lane]);
  const double max = sums.max[lane] * unit, top = max > sink ? max : sink;
  if (!(top > -kInfinity && top < kInfinity)) return;
  const auto of_keys = exp2f(static_cast<float>((max - top) * kLog2E));
  const auto of_sink = sink == -kInfinity ? 0.0f : exp2f(static_cast<float>((sink - top) * kLog2E));
  const float sum = sums.sum[lane] * of_keys + of_sink;
  const double off = top + log(sum) - lse;
  if (!((off < 0 ? -off : off) <= kPrecision * (lse < 0 ? -lse : lse))) return;
  terms->max = sums.max[lane];
  terms->inverse_sum = of_keys / sum;
  terms->sink = of_sink / sum;
}

}  // namespace tandem::cpu::TANDEM_TARGET
