// The first phase of the backward, on up to kBackwardRows queries: delta, and the sums of rows whose lse is too short.
// Such rows also sum delta from P and dP, as standard attention does: their rounding errors cancel in dP - delta.
//
// Other parts of a sequence may contribute to lse, and another engine may have computed it. A row's sums replace lse
// if both agree. If their digits alone do not show this, a second pass over the keys computes the errors of products.
#pragma once

#include "cpu/backward.h"

namespace tandem::cpu::TANDEM_TARGET {

template <class Mma, class T, int Degree>
class BackwardRows {
  using Tile = Backward<Mma, T, Degree>;
  using Scratch = typename Tile::BackwardScratch;
  using Keys = typename Tile::PanelKeys;
  static constexpr int64_t kPanels = Tile::kPanels, kStride = Tile::kStride;

 public:
  static void run(const Piece& piece, RowTermsView terms, BlockFilter blocks, void* base) {
    BackwardRows rows(piece, blocks, base);
    rows.set_deltas(terms);
    rows.each_tile([&](const Piece& x, int64_t panel, const Keys& keys, const float* scores) {
      const float* dp = rows.multiply_values(x, panel, keys);
      rows.sums_[panel].add(scores, dp, kStride, x.key_end - x.key_begin, rows.unit_.log2);
    });
    if (!rows.decide(terms, true)) return;
    rows.each_tile([&](const Piece& x, int64_t panel, const Keys& keys, const float* scores) {
      rows.add_errors(x, panel, keys, scores);
    });
    rows.decide(terms, false);
  }

 private:
  BackwardRows(const Piece& piece, BlockFilter blocks, void* base)
      : piece_(piece), p_(*piece.problem), blocks_(blocks), unit_(Tile::unit_of(piece)), s_(p_, base) {}

  void set_deltas(RowTermsView terms) {
    begin_ = piece_.key_end, end_ = piece_.key_begin;
    for (int64_t i = 0; i < kPanels && piece_.row_begin + i * kPanel < piece_.row_end; ++i) {
      PanelRows& rows = s_.rows[i];
      fill_rows(piece_, piece_.row_begin + i * kPanel, &rows);
      SumAgain again[kPanel];
      bool any = false;
      float sums_of_outputs[kPanel];
      sum_outputs(rows, sums_of_outputs);
      for (int l = 0; l < rows.count; ++l) {
        terms_of(terms, rows, l) = {sums_of_outputs[l] - dlse_of(rows, l), 0, 0, 0};
        again[l] = sums_again<Degree>(piece_, rows, l);
        any |= again[l] != SumAgain::kNo;
      }
      if (!any) continue;
      pack_queries(i);
      choose_rows(i, again);
      if (!any_wanted(i)) continue;
      pack_gradients(i);
      begin_ = minimum(begin_, rows.begin_min);
      end_ = maximum(end_, rows.end_max);
    }
  }

  // Decides SumAgain::kFewKeys by the scores, from the diagonal on, where masks seldom hide keys.
  void choose_rows(int64_t panel, const SumAgain* again) {
    constexpr int64_t kStep = 32;
    const PanelRows& rows = s_.rows[panel];
    int seen[kPanel] = {};
    const auto undecided = [&] {
      bool any = false;
      for (int l = 0; l < rows.count; ++l) any |= again[l] == SumAgain::kFewKeys && seen[l] < kFewKeys;
      return any;
    };
    const auto count = [&](const Piece& x, int64_t, const Keys&, const float* scores) {
      for (int64_t j = 0; j < x.key_end - x.key_begin; ++j)
        for (int l = 0; l < kPanel; ++l) seen[l] += scores[j * kStride + l] == -kInfinity ? 0 : 1;
    };
    const int64_t first = rows.begin_min / kStep, end = (rows.end_max + kStep - 1) / kStep;
    const int64_t diagonal = minimum(maximum(static_cast<int64_t>(rows.position[0]) / kStep, first), end - 1);
    for (int64_t n = 0; n < end - first && undecided(); ++n) {
      const int64_t step = n <= diagonal - first ? diagonal - n : first + n;
      Piece x = piece_;
      x.key_begin = step * kStep, x.key_end = minimum(piece_.key_end, x.key_begin + kStep);
      if (!blocks_.needed(blocks_.context, x.key_begin)) continue;
      bool packed = false;
      use_tile(x, panel, &packed, count);
    }
    for (int l = 0; l < rows.count; ++l) {
      wanted_[panel][l] = again[l] == SumAgain::kYes || (again[l] == SumAgain::kFewKeys && seen[l] < kFewKeys);
    }
  }

  // Computes sum(dout * out) of a panel's rows, in the order of dP: a row with one dominant float key has dS = 0.
  void sum_outputs(const PanelRows& rows, float* to) {
    const Sequence& q = piece_.sequence;
    const int64_t width = s_.v_columns, size = kPanel * width;
    float *out = s_.by_row, *dout = out + size, *out_across = dout + size, *dout_across = out_across + size;
    std::memset(out, 0, static_cast<size_t>(2 * size) * sizeof(float));
    for (int l = 0; l < rows.count; ++l) {
      const T* g = Tile::dout_row(p_, q, rows.query[l], rows.head[l], s_.dout_rows);
      load_row(g, p_.head_dim_v, width, dout + l * width);
      with_row_of<T>(p_.out, q, q.q_begin, rows.query[l], rows.head[l],
                     [&](const auto* o) { load_row(o, p_.head_dim_v, width, out + l * width); });
    }
    transpose(out, width, kPanel, width, out_across, kPanel);
    transpose(dout, width, kPanel, width, dout_across, kPanel);
    VF sum0 = hn::Zero(FTag()), sum1 = sum0;
    for (int64_t at = 0; at < p_.head_dim_v * kPanel; at += kPanel) {
      sum0 = hn::MulAdd(load(out_across + at), load(dout_across + at), sum0);
      sum1 = hn::MulAdd(load(out_across + at + kLanes), load(dout_across + at + kLanes), sum1);
    }
    store(sum0, to), store(sum1, to + kLanes);
  }

  float dlse_of(const PanelRows& rows, int lane) const {
    return p_.dlse.present ? *value_of(p_.dlse, piece_, rows, lane) : 0;
  }
  const T* query(const PanelRows& rows, int lane) const {
    return row_of<T>(p_.q, piece_.sequence, piece_.sequence.q_begin, rows.query[lane], rows.head[lane]);
  }
  const T* key(int64_t at) const {
    return row_of<T>(p_.k, piece_.sequence, piece_.sequence.k_begin, at, piece_.head_k);
  }
  bool any_wanted(int64_t panel) const {
    bool any = false;
    for (const bool wanted : wanted_[panel]) any |= wanted;
    return any;
  }

  void pack_queries(int64_t panel) {
    const PanelRows& rows = s_.rows[panel];
    const T* queries[kPanel];
    for (int l = 0; l < rows.count; ++l) queries[l] = query(rows, l);
    Tile::pack_queries(piece_, rows, panel, queries, s_);
  }

  void pack_gradients(int64_t panel) {
    const PanelRows& rows = s_.rows[panel];
    const T* gradients[kPanel];
    for (int l = 0; l < rows.count; ++l) {
      gradients[l] = Tile::dout_row(p_, piece_.sequence, rows.query[l], rows.head[l], s_.dout_rows + l * p_.head_dim_v);
    }
    pack_panel<Mma, T>({gradients, rows.count}, p_.head_dim_v, 1.0, s_.row, s_.dout + panel * s_.v_words * kPanel);
  }

  // Returns dP of a panel's keys, with the bits of the tiles' dP.
  const float* multiply_values(const Piece& x, int64_t panel, const Keys& keys) {
    const int64_t block = x.key_begin - keys.begin, end = minimum(piece_.key_end, block + kBackwardKeys);
    for (int64_t j = block; values_of_ != block && j < end; ++j) {
      row_words(row_of<T>(p_.v, piece_.sequence, piece_.sequence.k_begin, j, piece_.head_k), p_.head_dim_v, s_.v_stride,
                s_.v + (j - block) * s_.v_stride);
    }
    values_of_ = block;
    float* dp = s_.dscores + keys.begin * kStride + panel * kPanel;
    gemm<Mma>(x.key_end - x.key_begin, {s_.v + keys.begin * s_.v_stride, s_.v_stride, 1},
              s_.dout + panel * s_.v_words * kPanel, words<Mma>(p_.head_dim_v), {dp, kStride, false});
    return dp;
  }

  // Calls use(piece of the keys, panel, keys, scores) for every block of keys and every panel with a wanted row.
  template <class F>
  void each_tile(F&& use) {
    Piece block = piece_;
    for (block.key_begin = begin_ / kBackwardKeys * kBackwardKeys; block.key_begin < end_;
         block.key_begin += kBackwardKeys) {
      if (!blocks_.needed(blocks_.context, block.key_begin)) continue;
      block.key_end = minimum(piece_.key_end, block.key_begin + kBackwardKeys);
      bool packed = false;
      for (int64_t i = 0; i < kPanels; ++i)
        if (any_wanted(i)) use_tile(block, i, &packed, use);
    }
  }

  // packed: the block's keys are packed.
  template <class F>
  void use_tile(const Piece& block, int64_t panel, bool* packed, F&& use) {
    const Keys keys = Tile::panel_keys(block, panel, s_);
    if (!keys) return;
    for (int64_t j = block.key_begin; !*packed && piece_.streamed_rows == 0 && j < block.key_end; ++j)
      row_words(key(j), p_.head_dim, s_.k_stride, s_.k + (j - block.key_begin) * s_.k_stride);
    *packed = true;
    const Piece x = Tile::piece_of(block, keys);
    float* scores = s_.scores + keys.begin * kStride + panel * kPanel;
    Tile::multiply_keys(x, panel, keys.begin, s_);
    finish_scores({x, s_.rows[panel], x.key_begin, x.key_end - x.key_begin, scores, kStride}, unit_, keys.options);
    use(x, panel, keys, scores);
  }

  // Sets the terms of wanted rows whose sums agree with lse. Returns true if rows for a second pass remain wanted.
  bool decide(RowTermsView terms, bool first) {
    bool any = false;
    for (int64_t i = 0; i < kPanels; ++i) {
      for (int l = 0; l < kPanel; ++l) {
        if (!wanted_[i][l]) continue;
        const RowSum sum(piece_, s_.rows[i], l, unit_.stored, sums_[i]);
        wanted_[i][l] = first && sum.is_near();
        if (!sum.agrees(first ? 0 : errors_[i][l])) {
          any |= wanted_[i][l];
          continue;
        }
        RowTerms& row = terms_of(terms, s_.rows[i], l);
        row.max = sums_[i].max[l], row.inverse_sum = sum.of_keys / sum.sum, row.sink = sum.of_sink / sum.sum;
        const float of_dp = sums_[i].of_dp[l] * row.inverse_sum;
        if (p_.dropout.p == 0 && sum.is_whole() && __builtin_isfinite(of_dp))
          row.delta = of_dp - dlse_of(s_.rows[i], l);
        wanted_[i][l] = false;
      }
    }
    return any;
  }

  // Adds P dscore/dproduct (error of the product) of every key to the errors of the panel's rows.
  void add_errors(const Piece& x, int64_t panel, const Keys& keys, const float* scores) {
    const PanelRows& rows = s_.rows[panel];
    const int64_t count = x.key_end - x.key_begin;
    float* errors = s_.dscores + keys.begin * kStride + panel * kPanel;
    for (int l = 0; l < kPanel; ++l) {
      for (int64_t j = 0; j < count; ++j) errors[j * kStride + l] = 0;
      if (!wanted_[panel][l]) continue;
      const RowSum sum(piece_, rows, l, unit_.stored, sums_[panel]);
      for (int64_t j = 0; j < count; ++j) {
        constexpr float kNoWeight = 0x1p-16f;
        const float p = exp2f((scores[j * kStride + l] - sums_[panel].max[l]) * unit_.log2) * sum.of_keys / sum.sum;
        if (p > kNoWeight)
          errors[j * kStride + l] = p * static_cast<float>(product_error(query(rows, l), key(x.key_begin + j)));
      }
    }
    if (p_.score_mod.present) Tile::through_mod(x, panel, keys, nullptr, s_);
    if (p_.softcap != 0) Tile::through_softcap(x, panel, keys, s_);
    for (int64_t j = 0; j < count; ++j)
      for (int l = 0; l < kPanel; ++l) errors_[panel][l] += __builtin_fabs(errors[j * kStride + l]);
  }

  // Each of a product's partial sums is rounded by a relative error of at most u = 2^-24, 0.43 u on average. Two such
  // products differ by less than 3 u sqrt(sum of squared partial sums), 5 standard deviations of independent errors.
  double product_error(const T* q, const T* k) const {
    double sum = 0, squares = 0;
    for (int64_t c = 0; c < p_.head_dim; c += kLanes) {
      float a[kLanes], b[kLanes];
      const int64_t count = minimum(kLanes, p_.head_dim - c);
      load_row(q + c, count, kLanes, a), load_row(k + c, count, kLanes, b);
      for (int64_t n = 0; n < count; ++n) {
        sum += static_cast<double>(a[n]) * b[n];
        squares += sum * sum;
      }
    }
    return 3 * 0x1p-24 * __builtin_fabs(p_.softmax_scale) * sqrt(squares);
  }

  const Piece& piece_;
  const Problem& p_;
  const BlockFilter blocks_;
  const ScoreUnit unit_;
  Scratch s_;
  int64_t begin_ = 0, end_ = 0;  // the keys that a wanted row may see
  int64_t values_of_ = -1;       // the first key of the block whose values are packed
  bool wanted_[kPanels][kPanel] = {};
  ExactSums sums_[kPanels];
  double errors_[kPanels][kPanel] = {};
};

}  // namespace tandem::cpu::TANDEM_TARGET
