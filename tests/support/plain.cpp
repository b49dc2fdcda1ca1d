#include "support/plain.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "problem/bound_expression.h"
#include "problem/convert.h"
#include "problem/philox.h"
#include "support/plain_loops.h"
#include "support/random.h"

namespace tandem::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLargestHalf = 65504;  // rounding a larger number may give infinity: no noise

// Half a unit in the last place of 1, and of the smallest numbers.
struct Format {
  DType type;
  double half_unit, least;
};

constexpr Format format_of(DType t) {
  switch (t) {
    case DType::f64: return {t, 0x1p-53, 0x1p-1022};
    case DType::bf16: return {t, 0x1p-8, 0x1p-134};
    case DType::f16: return {t, 0x1p-11, 0x1p-25};
    default: return {t, 0x1p-24, 0x1p-150};
  }
}

class Arithmetic {
 public:
  Arithmetic(DType input, uint64_t noise)
      : work_(input == DType::f64 ? DType::f64 : DType::f32),
        format_(format_of(work_)),
        noisy_(noise != 0),
        state_(Random(noise).next()) {}

  // x as the result of one operation of the working precision, and as a number of type t.
  double operator()(double x) {
    if (noisy_) return disturb(format_, x);
    return work_ == DType::f64 ? x : static_cast<float>(x);
  }
  double round(DType t, double x) { return noisy_ ? disturb(format_of(t), x) : nearest(t, x); }

  double dot(const double* a, const double* b, int64_t n) {
    double sum = 0;
    if (!noisy_) {
      for (int64_t c = 0; c < n; ++c) sum = (*this)(sum + a[c] * b[c]);
      return sum;
    }
    // Replaces the errors of all products and additions by one error of their variance: half a unit of x is 0.74 |x|
    // 2^-24 on average. A sum of many errors is close to normal, and so is a sum of three: it has values up to 3
    // deviations.
    double squares = 0;
    for (int64_t c = 0; c < n; ++c) {
      const double product = a[c] * b[c];
      sum += product;
      squares += product * product + sum * sum;
    }
    return disturbed({sum, squares});
  }
  // Computes the same products with many rows at once. Each error is drawn when its product is read.
  void dots(const double* a, const Interleaved& rows, int64_t begin, int64_t end, std::vector<Dot>& all) const {
    all.resize(static_cast<size_t>(rows.count() + kLanes));
    loops().dots(a, rows, begin, end, noisy_ || work_ == DType::f64 ? Rounding::none : Rounding::f32, all.data());
  }
  double disturbed(const Dot& dot) {
    if (!noisy_) return dot.sum;
    return dot.sum + std::sqrt(dot.squares) * (work_ == DType::f64 ? 0.43 * 0x1p-53 : 0.43 * 0x1p-24) *
                         (signed_unit() + signed_unit() + signed_unit());
  }
  void add_scaled(double* to, double factor, const double* from, int64_t n) {
    if (!noisy_ && work_ == DType::f64) {
      for (int64_t c = 0; c < n; ++c) to[c] += factor * from[c];
      return;
    }
    if (!noisy_) return loops().add_rounded(to, factor, from, n);
    int64_t c = loops().add_scaled(to, factor, from, n, {format_.half_unit, format_.least, kLargestHalf}, &state_);
    for (; c < n; ++c) to[c] = disturb(format_, to[c] + factor * from[c]);
  }

 private:
  static double nearest(DType t, double x) {
    switch (t) {
      case DType::f32: return static_cast<float>(x);
      case DType::bf16: return widen<7>(narrow<7>(x));
      case DType::f16: return widen<10>(narrow<10>(x));
      default: return x;
    }
  }
  double disturb(const Format& f, double x) {
    if (x == 0) return x;
    if (!(std::fabs(x) < kLargestHalf)) return nearest(f.type, x);
    const double power =
        std::bit_cast<double>(std::bit_cast<uint64_t>(x) & uint64_t{0x7ff} << 52);  // the number below |x|
    return x + std::max(power * f.half_unit, f.least) * signed_unit();
  }
  // Returns a number in [-1, 1) from a linear congruential generator, because standard attention needs millions of
  // numbers.
  double signed_unit() {
    state_ = state_ * kFactor + kAddend;
    return 2 * std::bit_cast<double>(state_ >> 12 | uint64_t{1023} << 52) - 3;
  }

  DType work_;
  Format format_;
  bool noisy_;
  uint64_t state_;
};

using Rows = std::vector<std::vector<double>>;

struct Score {
  int64_t j;
  double s, capped, z;
  double unmodified;
};

// Evaluates an expression in the working precision, with each operation rounded to nearest.
class ModFormula {
 public:
  ModFormula(const ModView& view, std::span<const score_mod::NodeId> outputs, bool wide) : view_(view) {
    if (!view) return;
    if (wide) {
      wide_.emplace(view->program->mod.graph, outputs);
    } else {
      narrow_.emplace(view->program->mod.graph, outputs);
    }
  }
  void run(double score, const score_mod::Position& at) {
    if (wide_) wide_->run(score, at, view_->values);
    if (narrow_) narrow_->run(static_cast<float>(score), at, view_->values);
  }
  double real(score_mod::NodeId node) const { return wide_ ? (*wide_)[node].real : (*narrow_)[node].real; }
  int32_t integer(score_mod::NodeId node) const { return wide_ ? (*wide_)[node].integer : (*narrow_)[node].integer; }

 private:
  const ModView& view_;
  std::optional<score_mod::Evaluator<double>> wide_;
  std::optional<score_mod::Evaluator<float>> narrow_;
};

std::span<const score_mod::NodeId> result_of(const ModView& view) {
  return view ? std::span(&view->program->mod.result, 1) : std::span<const score_mod::NodeId>();
}
std::span<const score_mod::NodeId> slope_of(const ModView& view) {
  return view ? std::span(&view->program->gradient.score, 1) : std::span<const score_mod::NodeId>();
}
std::span<const score_mod::NodeId> capturing_of(const ModView& view) {
  return view ? std::span(view->program->capturing) : std::span<const score_mod::NodeId>();
}

class Plain {
 public:
  Plain(const Problem& problem, const Problem& rounded, uint64_t noise)
      : p(problem),
        types(rounded),
        fl(problem.dtype, noise),
        visible_(p.mask_mod, result_of(p.mask_mod), p.dtype == DType::f64),
        score_(p.score_mod, result_of(p.score_mod), p.dtype == DType::f64),
        slope_(p.score_mod, slope_of(p.score_mod), p.dtype == DType::f64),
        capturing_(p.score_mod, capturing_of(p.score_mod), p.dtype == DType::f64) {}

  void forward() {
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads_q; ++h) forward_head(b, h);
    }
  }

  void backward() {
    if (p.dbias) dbias_.assign(static_cast<size_t>(planes() * p.dbias.shape[2] * p.dbias.shape[3]), 0);
    dsink_.assign(static_cast<size_t>(p.heads_q), 0);
    if (p.score_mod) captured_.assign(static_cast<size_t>(p.score_mod->cells), 0);
    for (int64_t h = 0; h < p.heads_k; ++h) {
      dk_.clear();
      dv_.clear();
      for (int64_t b = 0; b < p.batch; ++b) backward_group(b, h);
      if (p.page_table) store_keys(h, 0, p.page_table.pages * p.page_table.page_size);
    }
    for (int64_t h = 0; p.dsink && h < p.heads_q; ++h)
      put_gradient(p.dsink.at(0, h), types.dsink.dtype, dsink_[static_cast<size_t>(h)]);
    if (p.dbias) store_dbias();
    if (p.score_mod) store_captured();
  }

 private:
  int64_t planes() const { return p.dbias.shape[0] * p.dbias.shape[1]; }

  void put(std::byte* at, DType rounded_to, double x) { write_as<double>(at, fl.round(rounded_to, x)); }
  // Stores a gradient, or adds it to the old value.
  void put_gradient(std::byte* at, DType rounded_to, double x) {
    put(at, rounded_to, p.accumulate ? fl(read_as<double>(at) + x) : x);
  }

  std::vector<double> read(const View& view, const std::byte* at, int64_t n) {
    std::vector<double> row(static_cast<size_t>(n));
    const auto of = [&](auto type) {  // each type has its own loop
      for (int64_t c = 0; c < n; ++c) row[static_cast<size_t>(c)] = load(type(), at + c * size_of(type()));
    };
    switch (view.dtype) {
      case DType::bf16: of(std::integral_constant<DType, DType::bf16>()); break;
      case DType::f16: of(std::integral_constant<DType, DType::f16>()); break;
      case DType::f32: of(std::integral_constant<DType, DType::f32>()); break;
      default: of([type = view.dtype] { return type; });
    }
    return row;
  }

  void read_head(int64_t b, int64_t h) {
    s_ = sequence_of(p, b);
    q_.clear();
    k_.clear();
    v_.clear();
    for (int64_t i = 0; i < s_.q_len; ++i) q_.push_back(read(p.q, p.q.at(b, s_.q_begin + i, h), p.head_dim));
    const PageTable& t = p.page_table;
    for (int64_t j = 0; j < s_.k_len; ++j) {
      if (t && j < first_visible_key(p, s_)) {
        k_.emplace_back(p.head_dim);
        v_.emplace_back(p.head_dim_v);
        continue;
      }
      const int64_t page = t ? t.at(b, j / t.page_size) : b;
      const int64_t row = t ? j % t.page_size : s_.k_begin + j;
      k_.push_back(read(p.k, p.k.at(page, row, h / p.group()), p.head_dim));
      v_.push_back(read(p.v, p.v.at(page, row, h / p.group()), p.head_dim_v));
    }
    keys_.set(k_, p.head_dim);
    if (p.pass == TANDEM_BACKWARD) values_.set(v_, p.head_dim_v);
  }

  double keep(int64_t h, int64_t i, int64_t j) {
    if (!p.dropout) return 1;
    const tandem_place place = place_of(p, s_);
    const int64_t row = place.first_query + i * place.stride, column = place.first_key + j * place.stride;
    const auto sequence_head = static_cast<uint64_t>(place.document * place.heads_q + place.first_head + h);
    const Philox4 words = dropout_words(p.dropout.seed, p.dropout.offset, sequence_head, static_cast<uint64_t>(row),
                                        static_cast<uint64_t>(column / kDropoutGroup));
    return is_dropped(words, column, dropout_threshold(p.dropout.p)) ? 0 : fl(1 / (1 - p.dropout.p));
  }

  score_mod::Position at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return {.batch = static_cast<int32_t>(b),
            .head = static_cast<int32_t>(h),
            .q = static_cast<int32_t>(i),
            .k = static_cast<int32_t>(j),
            .seqlen_q = static_cast<int32_t>(s_.q_len),
            .seqlen_k = static_cast<int32_t>(s_.k_len)};
  }
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) {
    if (p.block_mask) {
      const BlockState state = p.block_mask.at(b, h, i, j);
      if (state != BlockState::partial) return state == BlockState::full;
    }
    if (!p.mask_mod) return true;
    visible_.run(0, at(b, h, i, j));
    return visible_.integer(p.mask_mod->program->mod.result) != 0;
  }

  std::vector<Score> scores(int64_t b, int64_t h, int64_t i) {
    const KeySpan range = visible_keys(p, s_, i);
    const double scale = fl(p.softmax_scale), cap = fl(p.softcap);
    std::vector<Score> row;
    fl.dots(q_[static_cast<size_t>(i)].data(), keys_, range.begin, range.end, products_);
    for (int64_t j = range.begin; j < range.end; ++j) {
      if (p.bias.boolean() && load(DType::boolean, p.bias.at(b, h, i, j)) == 0) continue;
      if (!visible(b, h, i, j)) continue;
      double s = fl(scale * fl.disturbed(products_[static_cast<size_t>(j)]));
      double capped = 0;
      if (p.softcap > 0) {
        capped = fl(std::tanh(fl(s / cap)));
        s = fl(cap * capped);
      }
      if (p.bias && !p.bias.boolean()) s = fl(s + load(p.bias.dtype, p.bias.at(b, h, i, j)));
      if (p.alibi_slopes) {
        const tandem_place place = place_of(p, s_);
        const int64_t first = int64_t{place.first_query} + place.diagonal - place.first_key;
        const double distance = std::fabs(static_cast<double>(first + (i - j) * place.stride));
        s = fl(s - fl(load(p.alibi_slopes.dtype, p.alibi_slopes.at(b, h)) * distance));
      }
      const double unmodified = s;
      if (p.score_mod) {
        score_.run(s, at(b, h, i, j));
        s = fl(score_.real(p.score_mod->program->mod.result));
      }
      if (s != -kInfinity) row.push_back({j, s, capped, keep(h, i, j), unmodified});
    }
    return row;
  }

  void forward_head(int64_t b, int64_t h) {
    read_head(b, h);
    for (int64_t i = 0; i < s_.q_rows; ++i) {
      std::vector<double> out(static_cast<size_t>(p.head_dim_v), 0);
      double lse = -kInfinity, largest_score = -kInfinity;
      if (i < s_.q_len) {
        const std::vector<Score> row = scores(b, h, i);
        const double sink = p.sink ? load(p.sink.dtype, p.sink.at(b, h)) : -kInfinity;
        double largest = sink, sum = 0, rounded_sum = 0;
        for (const Score& e : row) {
          largest = std::max(largest, e.s);
          if (e.s > largest_score || std::isnan(e.s)) largest_score = e.s;
        }
        if (sink != -kInfinity) {
          sum = fl(std::exp(fl(sink - largest)));
          rounded_sum = fl.round(p.dtype, sum);
        }
        std::vector<double> probability;
        for (const Score& e : row) {
          probability.push_back(fl(std::exp(fl(e.s - largest))));
          sum = fl(sum + probability.back());
          rounded_sum = fl(rounded_sum + fl.round(p.dtype, probability.back()));
        }
        if (largest != -kInfinity) lse = fl(largest + fl(std::log(rounded_sum)));
        for (size_t n = 0; n < row.size(); ++n) {
          const double weight = fl.round(p.dtype, fl(row[n].z * fl(probability[n] / sum)));
          fl.add_scaled(out.data(), weight, v_[static_cast<size_t>(row[n].j)].data(), p.head_dim_v);
        }
      }
      for (int64_t c = 0; c < p.head_dim_v; ++c) {
        put(p.out.at(b, s_.q_begin + i, h) + c * 8, types.out.dtype, out[static_cast<size_t>(c)]);
      }
      const DType per_row = p.dtype == DType::f64 ? DType::f64 : DType::f32;
      if (p.lse) put(p.lse.at(b, s_.q_begin + i, h), per_row, lse);
      if (p.max_scores) put(p.max_scores.at(b, s_.q_begin + i, h), per_row, largest_score);
    }
  }

  void backward_group(int64_t b, int64_t head_k) {
    s_ = sequence_of(p, b);
    const int64_t rows = p.page_table ? p.page_table.pages * p.page_table.page_size : s_.k_rows;
    if (!p.page_table) dk_.clear(), dv_.clear();
    dk_.resize(static_cast<size_t>(rows), std::vector<double>(static_cast<size_t>(p.head_dim)));
    dv_.resize(static_cast<size_t>(rows), std::vector<double>(static_cast<size_t>(p.head_dim_v)));
    for (int64_t h = head_k * p.group(); h < (head_k + 1) * p.group(); ++h) {
      read_head(b, h);
      for (int64_t i = 0; i < s_.q_rows; ++i) {
        std::vector<double> dq(static_cast<size_t>(p.head_dim), 0);
        if (i < s_.q_len) backward_row(b, h, i, dq);
        for (int64_t c = 0; p.dq && c < p.head_dim; ++c) {
          put_gradient(p.dq.at(b, s_.q_begin + i, h) + c * 8, types.dq.dtype,
                       fl(fl(p.softmax_scale) * dq[static_cast<size_t>(c)]));
        }
      }
    }
    if (!p.page_table) store_keys(head_k, s_.k_begin, rows);
  }

  void store_keys(int64_t head_k, int64_t begin, int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) {
      const int64_t first = p.page_table ? j / p.page_table.page_size : s_.batch_index;
      const int64_t row = p.page_table ? j % p.page_table.page_size : begin + j;
      for (int64_t c = 0; p.dk && c < p.head_dim; ++c) {
        put_gradient(p.dk.at(first, row, head_k) + c * 8, types.dk.dtype,
                     fl(fl(p.softmax_scale) * dk_[static_cast<size_t>(j)][static_cast<size_t>(c)]));
      }
      for (int64_t c = 0; p.dv && c < p.head_dim_v; ++c) {
        put_gradient(p.dv.at(first, row, head_k) + c * 8, types.dv.dtype,
                     dv_[static_cast<size_t>(j)][static_cast<size_t>(c)]);
      }
    }
  }

  // A probability is exp(score - from) / sum.
  struct Normaliser {
    double from, sum;
  };
  Normaliser normalise(const std::vector<Score>& row, int64_t b, int64_t h, double lse) {
    if (p.dtype != DType::f32 && p.dtype != DType::f64) return {lse, 1};
    const double sink = p.sink ? load(p.sink.dtype, p.sink.at(b, h)) : -kInfinity;
    double from = sink, sum = 0;
    for (const Score& e : row) from = std::max(from, e.s);
    if (sink != -kInfinity) sum = fl(std::exp(fl(sink - from)));
    for (const Score& e : row) sum = fl(sum + fl(std::exp(fl(e.s - from))));
    return {from, sum};
  }

  void backward_row(int64_t b, int64_t h, int64_t i, std::vector<double>& dq) {
    const std::vector<double> out = read(p.out, p.out.at(b, s_.q_begin + i, h), p.head_dim_v);
    std::vector<double> dout = read(p.dout, p.dout.at(b, s_.q_begin + i, h), p.head_dim_v);
    if (p.dout.dtype != p.dtype) {  // products of 16-bit inputs cannot read float32
      for (double& x : dout) x = fl.round(p.dtype, x);
    }
    const double lse = load(p.lse.dtype, p.lse.at(b, s_.q_begin + i, h));
    const double dlse = p.dlse ? load(p.dlse.dtype, p.dlse.at(b, s_.q_begin + i, h)) : 0;
    const double delta = fl(fl.dot(dout.data(), out.data(), p.head_dim_v) - dlse);
    const std::vector<double>& q = q_[static_cast<size_t>(i)];
    const std::vector<Score> row = scores(b, h, i);
    if (!row.empty()) fl.dots(dout.data(), values_, row.front().j, row.back().j + 1, products_);
    const Normaliser normaliser = normalise(row, b, h, lse);
    for (const Score& e : row) {
      const auto j = static_cast<size_t>(e.j);
      const PageTable& t = p.page_table;
      const auto key = t ? static_cast<size_t>(t.at(b, e.j / t.page_size) * t.page_size + e.j % t.page_size) : j;
      const double probability = fl.round(p.dtype, fl(fl(std::exp(fl(e.s - normaliser.from))) / normaliser.sum));
      const double dp = fl(e.z * fl.disturbed(products_[j]));
      const double gradient = fl(probability * fl(dp - delta));
      const double ds = through_mod(gradient, e, at(b, h, i, e.j));
      const double dt = p.softcap > 0 ? fl(ds * fl(1 - e.capped * e.capped)) : ds;
      const double rounded = fl.round(p.dtype, dt);
      fl.add_scaled(dq.data(), rounded, k_[j].data(), p.head_dim);
      fl.add_scaled(dk_[key].data(), rounded, q.data(), p.head_dim);
      fl.add_scaled(dv_[key].data(), fl.round(p.dtype, fl(e.z * probability)), dout.data(), p.head_dim_v);
      if (p.dbias) {
        double& sum = dbias_[static_cast<size_t>(bias_index(b, h, i, e.j))];
        sum = fl(sum + ds);
      }
    }
    if (p.sink && lse != -kInfinity) {
      const double score = load(p.sink.dtype, p.sink.at(b, h));
      const double probability = fl.round(p.dtype, fl(fl(std::exp(fl(score - normaliser.from))) / normaliser.sum));
      double& sum = dsink_[static_cast<size_t>(h)];
      sum = fl(sum - probability * delta);
    }
  }

  double through_mod(double ds, const Score& e, const score_mod::Position& position) {
    if (!p.score_mod || ds == 0) return ds;
    const score_mod::Program& program = *p.score_mod->program;
    if (p.score_mod->cells > 0) {
      capturing_.run(e.unmodified, position);
      for (const score_mod::Capture& capture : program.captures) {
        const CapturedGradient& gradient = p.score_mod->gradients[static_cast<size_t>(capture.tensor)];
        if (!gradient.to) continue;
        int32_t indices[score_mod::kMaxRank];
        for (int n = 0; n < capture.rank; ++n) indices[n] = capturing_.integer(capture.indices[n]);
        double& sum = captured_[static_cast<size_t>(gradient.cell(indices, capture.rank))];
        sum = fl(sum + fl(ds * fl(capturing_.real(capture.derivative))));
      }
    }
    slope_.run(e.unmodified, position);
    return fl(ds * fl(slope_.real(program.gradient.score)));
  }

  void store_captured() {
    each_captured(*types.score_mod.read,
                  [&](const BiasView& to, const std::byte*, int64_t cell) { captured_types_[cell] = to.dtype; });
    each_captured(*p.score_mod.read, [&](const BiasView&, std::byte* to, int64_t cell) {
      put_gradient(to, captured_types_[cell], captured_[static_cast<size_t>(cell)]);
    });
  }

  int64_t bias_index(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t* n = p.dbias.shape;
    return ((b % n[0] * n[1] + h % n[1]) * n[2] + i % n[2]) * n[3] + j % n[3];
  }

  void store_dbias() {
    const int64_t* n = p.dbias.shape;
    for (int64_t b = 0; b < n[0]; ++b) {
      for (int64_t h = 0; h < n[1]; ++h) {
        for (int64_t i = 0; i < n[2]; ++i) {
          for (int64_t j = 0; j < n[3]; ++j) {
            put_gradient(p.dbias.at(b, h, i, j), types.dbias.dtype,
                         dbias_[static_cast<size_t>(bias_index(b, h, i, j))]);
          }
        }
      }
    }
  }

  const Problem &p, &types;
  Arithmetic fl;
  Sequence s_;
  Rows q_, k_, v_, dk_, dv_;
  Interleaved keys_, values_;
  std::vector<Dot> products_;  // products of one row with the interleaved rows
  ModFormula visible_, score_, slope_, capturing_;
  std::vector<double> dbias_, dsink_, captured_;
  std::map<int64_t, DType> captured_types_;  // by cell
};

}  // namespace

void plain(const Problem& p, const Problem& rounded, uint64_t noise) {
  Plain formula(p, rounded, noise);
  if (p.pass == TANDEM_FORWARD) {
    formula.forward();
  } else {
    formula.backward();
  }
}

}  // namespace tandem::test
