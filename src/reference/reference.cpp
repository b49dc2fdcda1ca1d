#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "problem/bound_expression.h"
#include "problem/convert.h"
#include "problem/philox.h"

// For one query row i of one sequence and query head, over the keys j it sees:
//
//    t_j  = softmax_scale * q_i . k_j
//    r_j  = softcap * tanh(t_j / softcap)  (or t_j)  + bias_ij - slope * |i + diagonal - j|
//    s_j  = score_mod(r_j)                 (or r_j)
//    lse  = log(exp(sink) + sum_j exp(s_j)),  max_scores = max_j s_j
//    p_j  = exp(s_j - lse)                                 a float64 backward reads lse and out
//    out  = sum_j z_j p_j v_j                                 z_j: 0 when dropped, else 1 / (1 - dropout_p)
//
//    delta   = dout_i . out
//    ds_j    = p_j (z_j dout_i . v_j - delta + dlse)          score_mod's tensors: += ds_j * its derivative
//    dsink  += exp(sink - lse) (dlse - delta)
//    dr_j    = ds_j * score_mod's derivative     (or ds_j)    dbias_ij += dr_j
//    dt_j    = dr_j (1 - tanh^2(t_j / softcap))  (or dr_j)
//    dq_i    = softmax_scale * sum_j dt_j k_j
//    dk_j   += softmax_scale * dt_j q_i
//    dv_j   += z_j p_j dout_i
//
// A key that the row does not see, or whose score is -inf, is skipped instead of multiplied by zero. The pair therefore
// cannot affect a result. A derivative is also never multiplied by a ds_j of 0.

namespace tandem::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Matrix {
  int64_t columns = 0;
  std::vector<double> values;

  Matrix(int64_t rows, int64_t width) : columns(width), values(static_cast<size_t>(rows * width)) {}
  double* row(int64_t i) { return values.data() + i * columns; }
  const double* row(int64_t i) const { return values.data() + i * columns; }
};

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

void add_scaled(double* to, double factor, const double* from, int64_t n) {
  for (int64_t c = 0; c < n; ++c) to[c] += factor * from[c];
}

void load_row(const View& view, const std::byte* from, int64_t n, double* to) {
  for (int64_t c = 0; c < n; ++c) to[c] = load(view.dtype, from + c * size_of(view.dtype));
}

void store_row(const View& view, std::byte* to, int64_t n, const double* from) {
  for (int64_t c = 0; c < n; ++c) store(view.dtype, to + c * size_of(view.dtype), from[c]);
}

// Stores a gradient, or adds it to the stored value.
void put(const Problem& p, DType type, std::byte* to, double gradient) {
  store(type, to, p.accumulate ? load(type, to) + gradient : gradient);
}
void put_row(const Problem& p, const View& view, std::byte* to, int64_t n, const double* from) {
  for (int64_t c = 0; c < n; ++c) put(p, view.dtype, to + c * size_of(view.dtype), from[c]);
}

// The index pair of key j of a sequence for View::at: (sequence, row) if packed or dense, else (page, row).
struct KeyPlace {
  int64_t first, row;
};

KeyPlace place_of_key(const Problem& p, const Sequence& s, int64_t j) {
  const PageTable& t = p.page_table;
  if (!t) return {s.batch_index, s.k_begin + j};
  return {t.at(s.batch_index, j / t.page_size), j % t.page_size};
}

// The value of a score_mod or mask_mod for one entry. Without a modification the value is absent.
class ModOfEntry {
 public:
  ModOfEntry(const ModView& view, std::span<const score_mod::NodeId> outputs) : view_(view) {
    if (view) evaluator_.emplace(view->program->mod.graph, outputs);
  }
  void run(double score, const score_mod::Position& at) { evaluator_->run(score, at, view_->values); }
  double real(score_mod::NodeId node) const { return (*evaluator_)[node].real; }
  int32_t integer(score_mod::NodeId node) const { return (*evaluator_)[node].integer; }

 private:
  const ModView& view_;
  std::optional<score_mod::Evaluator<double>> evaluator_;
};

// All modifications of a problem, at entries of any of its heads.
class Mods {
 public:
  explicit Mods(const Problem& p)
      : p_(p),
        visible_(p.mask_mod, result(p.mask_mod)),
        score_(p.score_mod, result(p.score_mod)),
        slope_(p.score_mod, slope(p.score_mod)),
        captured_(p.score_mod, capturing(p.score_mod)) {}

  bool visible(const score_mod::Position& at) {
    if (p_.block_mask) {
      const BlockState state = p_.block_mask.at(at.batch, at.head, at.q, at.k);
      if (state != BlockState::partial) return state == BlockState::full;
    }
    if (!p_.mask_mod) return true;
    visible_.run(0, at);
    return visible_.integer(p_.mask_mod->program->mod.result) != 0;
  }
  double score(double r, const score_mod::Position& at) {
    if (!p_.score_mod) return r;
    score_.run(r, at);
    return score_.real(p_.score_mod->program->mod.result);
  }
  // Multiplies ds by the modification's derivative.
  double back(double ds, double r, const score_mod::Position& at) {
    if (!p_.score_mod || ds == 0) return ds;
    slope_.run(r, at);
    return ds * slope_.real(p_.score_mod->program->gradient.score);
  }
  // Adds ds times the derivatives with respect to captured values to the table of captured gradients.
  void capture(double ds, double r, const score_mod::Position& at, double* table) {
    if (ds == 0) return;
    captured_.run(r, at);
    for (const score_mod::Capture& capture : p_.score_mod->program->captures) {
      const CapturedGradient& gradient = p_.score_mod->gradients[static_cast<size_t>(capture.tensor)];
      if (!gradient.to) continue;
      int32_t indices[score_mod::kMaxRank];
      for (int i = 0; i < capture.rank; ++i) indices[i] = captured_.integer(capture.indices[i]);
      table[gradient.cell(indices, capture.rank)] += ds * captured_.real(capture.derivative);
    }
  }

 private:
  using Nodes = std::span<const score_mod::NodeId>;
  static Nodes result(const ModView& view) { return view ? Nodes(&view->program->mod.result, 1) : Nodes(); }
  static Nodes slope(const ModView& view) { return view ? Nodes(&view->program->gradient.score, 1) : Nodes(); }
  static Nodes capturing(const ModView& view) { return view ? Nodes(view->program->capturing) : Nodes(); }

  const Problem& p_;
  ModOfEntry visible_, score_, slope_, captured_;
};

// The inputs of one query head of one sequence, in float64.
struct Head {
  const Problem& p;
  Sequence s;
  int64_t head;
  Matrix q, k, v, dout, out;  // out: only of a float64 backward
  mutable Mods mod;           // evaluates in place

  Head(const Problem& problem, int64_t b, int64_t query_head, bool backward)
      : p(problem),
        s(sequence_of(problem, b)),
        head(query_head),
        q(s.q_len, p.head_dim),
        k(s.k_len, p.head_dim),
        v(s.k_len, p.head_dim_v),
        dout(backward ? s.q_len : 0, p.head_dim_v),
        out(backward && reads_results() ? s.q_len : 0, p.head_dim_v),
        mod(problem) {
    for (int64_t i = 0; i < s.q_len; ++i) {
      load_row(p.q, p.q.at(b, s.q_begin + i, head), p.head_dim, q.row(i));
      if (backward) load_row(p.dout, p.dout.at(b, s.q_begin + i, head), p.head_dim_v, dout.row(i));
      if (backward && reads_results()) load_row(p.out, p.out.at(b, s.q_begin + i, head), p.head_dim_v, out.row(i));
    }
    for (int64_t j = p.page_table ? first_visible_key(p, s) : 0; j < s.k_len; ++j) {
      const KeyPlace at = place_of_key(p, s, j);
      load_row(p.k, p.k.at(at.first, at.row, head / p.group()), p.head_dim, k.row(j));
      load_row(p.v, p.v.at(at.first, at.row, head / p.group()), p.head_dim_v, v.row(j));
    }
  }

  score_mod::Position at(int64_t i, int64_t j) const {
    return {.batch = static_cast<int32_t>(s.batch_index),
            .head = static_cast<int32_t>(head),
            .q = static_cast<int32_t>(i),
            .k = static_cast<int32_t>(j),
            .seqlen_q = static_cast<int32_t>(s.q_len),
            .seqlen_k = static_cast<int32_t>(s.k_len)};
  }

  // A float64 backward reads out and lse, to which other parts of the keys may contribute. As a test's reference the
  // backward computes them again, because shorter types round them.
  bool reads_results() const { return p.dtype == DType::f64; }
  double lse(int64_t i) const { return load(p.lse.dtype, p.lse.at(s.batch_index, s.q_begin + i, head)); }
  double dlse(int64_t i) const {
    return p.dlse ? load(p.dlse.dtype, p.dlse.at(s.batch_index, s.q_begin + i, head)) : 0;
  }
};

// One key that a row sees.
struct ScoreEntry {
  int64_t j;
  double capped;  // tanh(t / softcap) with a softcap
  double r;       // the input of score_mod
  double s;
  double p;
  double z;
};

struct Row {
  std::vector<ScoreEntry> entries;
  double lse = -kInfinity;
  double p_sink = 0;
};

double keep_factor(const Problem& p, const Sequence& s, int64_t head, int64_t i, int64_t j) {
  if (!p.dropout) return 1;
  const tandem_place place = place_of(p, s);
  const auto sequence_head = static_cast<uint64_t>(place.document * place.heads_q + place.first_head + head);
  const int64_t row = place.first_query + i * place.stride, column = place.first_key + j * place.stride;
  const Philox4 words = dropout_words(p.dropout.seed, p.dropout.offset, sequence_head, static_cast<uint64_t>(row),
                                      static_cast<uint64_t>(column / kDropoutGroup));
  return is_dropped(words, column, dropout_threshold(p.dropout.p)) ? 0 : 1 / (1 - p.dropout.p);
}

Row make_row(const Head& h, int64_t i) {
  const Problem& p = h.p;
  const int64_t b = h.s.batch_index;
  const double sink = p.sink ? load(p.sink.dtype, p.sink.at(b, h.head)) : -kInfinity;
  const double slope = p.alibi_slopes ? load(p.alibi_slopes.dtype, p.alibi_slopes.at(b, h.head)) : 0;
  const KeySpan visible = visible_keys(p, h.s, i);
  const tandem_place place = place_of(p, h.s);
  const int64_t first_distance = int64_t{place.first_query} + place.diagonal - place.first_key;

  Row row;
  double largest = sink;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    const double bias = p.bias ? load(p.bias.dtype, p.bias.at(b, h.head, i, j)) : 0;
    if ((p.bias.boolean() && bias == 0) || !h.mod.visible(h.at(i, j))) continue;
    const double t = p.softmax_scale * dot(h.q.row(i), h.k.row(j), p.head_dim);
    const double capped = p.softcap > 0 ? std::tanh(t / p.softcap) : 0;
    double r = p.softcap > 0 ? p.softcap * capped : t;
    if (!p.bias.boolean()) r += bias;
    if (p.alibi_slopes) r -= slope * std::fabs(static_cast<double>(first_distance + (i - j) * place.stride));
    const double s = h.mod.score(r, h.at(i, j));
    if (s == -kInfinity) continue;
    row.entries.push_back({j, capped, r, s, 0, keep_factor(p, h.s, h.head, i, j)});
    largest = std::fmax(largest, s);
  }
  if (row.entries.empty() && sink == -kInfinity) return row;

  double sum = p.sink ? std::exp(sink - largest) : 0;
  for (const ScoreEntry& e : row.entries) sum += std::exp(e.s - largest);
  row.lse = largest + std::log(sum);
  for (ScoreEntry& e : row.entries) e.p = std::exp(e.s - largest) / sum;
  if (p.sink) row.p_sink = std::exp(sink - largest) / sum;
  return row;
}

Row make_backward_row(const Head& h, int64_t i) {
  Row row = make_row(h, i);
  if (!h.reads_results()) return row;
  const double lse = h.lse(i);
  if (lse == row.lse) return row;
  const auto probability = [lse](double s) { return lse == -kInfinity ? 0 : std::exp(s - lse); };
  for (ScoreEntry& e : row.entries) e.p = probability(e.s);
  if (h.p.sink) row.p_sink = probability(load(h.p.sink.dtype, h.p.sink.at(h.s.batch_index, h.head)));
  return row;
}

double largest_score(const Row& row) {
  double largest = -kInfinity;
  for (const ScoreEntry& e : row.entries) largest = e.s > largest || std::isnan(e.s) ? e.s : largest;  // NaN stays
  return largest;
}

// ds_j and dr_j of every entry of a row, and delta.
struct ScoreGradients {
  std::vector<double> ds, dr;
  double delta = 0;

  ScoreGradients(const Head& h, int64_t i, const Row& row) : ds(row.entries.size()), dr(row.entries.size()) {
    for (size_t n = 0; n < ds.size(); ++n) {
      const ScoreEntry& e = row.entries[n];
      ds[n] = e.z == 0 ? 0 : e.z * dot(h.dout.row(i), h.v.row(e.j), h.p.head_dim_v);
      delta += e.p * ds[n];
    }
    if (h.reads_results()) delta = dot(h.dout.row(i), h.out.row(i), h.p.head_dim_v);
    for (size_t n = 0; n < ds.size(); ++n) {
      const ScoreEntry& e = row.entries[n];
      ds[n] = e.p * (ds[n] - delta + h.dlse(i));
      dr[n] = h.mod.back(ds[n], e.r, h.at(i, e.j));
    }
  }
};

void forward_head(const Problem& p, int64_t b, int64_t head) {
  const Head h(p, b, head, false);
  std::vector<double> out(static_cast<size_t>(p.head_dim_v));
  for (int64_t i = 0; i < h.s.q_rows; ++i) {
    const Row row = i < h.s.q_len ? make_row(h, i) : Row{};
    std::fill(out.begin(), out.end(), 0.0);
    for (const ScoreEntry& e : row.entries) {
      if (e.z != 0) add_scaled(out.data(), e.z * e.p, h.v.row(e.j), p.head_dim_v);
    }
    store_row(p.out, p.out.at(b, h.s.q_begin + i, head), p.head_dim_v, out.data());
    if (p.lse) store(p.lse.dtype, p.lse.at(b, h.s.q_begin + i, head), row.lse);
    if (p.max_scores) store(p.max_scores.dtype, p.max_scores.at(b, h.s.q_begin + i, head), largest_score(row));
  }
}

// Computes dq of the query heads that share a key head, and this sequence's part of dsink. Adds to dk and dv, which
// have one row per key of the sequence, or per row of all pages.
void backward_group(const Problem& p, const Sequence& s, int64_t head_k, Matrix& dk, Matrix& dv, double* dsink) {
  const int64_t b = s.batch_index;
  std::vector<double> dq(static_cast<size_t>(p.head_dim));
  for (int64_t head = head_k * p.group(); head < (head_k + 1) * p.group(); ++head) {
    const Head h(p, b, head, true);
    for (int64_t i = 0; i < s.q_rows; ++i) {
      std::fill(dq.begin(), dq.end(), 0.0);
      if (i < s.q_len) {
        const Row row = make_backward_row(h, i);
        const ScoreGradients g(h, i, row);
        for (size_t n = 0; n < row.entries.size(); ++n) {
          const ScoreEntry& e = row.entries[n];
          const double dt = p.softmax_scale * (p.softcap > 0 ? g.dr[n] * (1 - e.capped * e.capped) : g.dr[n]);
          const KeyPlace at = place_of_key(p, s, e.j);
          const int64_t key = p.page_table ? at.first * p.page_table.page_size + at.row : e.j;
          add_scaled(dq.data(), dt, h.k.row(e.j), p.head_dim);
          add_scaled(dk.row(key), dt, h.q.row(i), p.head_dim);
          if (e.z != 0) add_scaled(dv.row(key), e.z * e.p, h.dout.row(i), p.head_dim_v);
        }
        if (row.p_sink > 0) dsink[head] += row.p_sink * (h.dlse(i) - g.delta);
      }
      if (p.dq) put_row(p, p.dq, p.dq.at(b, s.q_begin + i, head), p.head_dim, dq.data());
    }
  }
}

void store_keys(const Problem& p, const KeyPlace& begin, int64_t rows, int64_t head_k, const double* dk,
                const double* dv) {
  for (int64_t j = 0; j < rows; ++j, dk += p.head_dim, dv += p.head_dim_v) {
    if (p.dk) put_row(p, p.dk, p.dk.at(begin.first, begin.row + j, head_k), p.head_dim, dk);
    if (p.dv) put_row(p, p.dv, p.dv.at(begin.first, begin.row + j, head_k), p.head_dim_v, dv);
  }
}

// Sequences are added in order, because they may share pages.
void backward_pages(const Problem& p, int64_t head_k, Matrix& dsink) {
  const PageTable& t = p.page_table;
  Matrix dk(t.pages * t.page_size, p.head_dim), dv(t.pages * t.page_size, p.head_dim_v);
  for (int64_t b = 0; b < p.batch; ++b) backward_group(p, sequence_of(p, b), head_k, dk, dv, dsink.row(b));
  for (int64_t page = 0; page < t.pages; ++page) {
    store_keys(p, {page, 0}, t.page_size, head_k, dk.row(page * t.page_size), dv.row(page * t.page_size));
  }
}

// One (batch, head) plane of dbias: the sum of ds over all entries that read that plane of bias.
void backward_bias(const Problem& p, int64_t plane_b, int64_t plane_h) {
  const int64_t* shape = p.dbias.shape;
  Matrix sum(shape[2], shape[3]);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t head = 0; head < p.heads_q; ++head) {
      if ((shape[0] > 1 && b != plane_b) || (shape[1] > 1 && head != plane_h)) continue;
      const Head h(p, b, head, true);
      for (int64_t i = 0; i < h.s.q_len; ++i) {
        const Row row = make_backward_row(h, i);
        const ScoreGradients g(h, i, row);
        for (size_t n = 0; n < row.entries.size(); ++n) {
          sum.row(shape[2] > 1 ? i : 0)[shape[3] > 1 ? row.entries[n].j : 0] += g.dr[n];
        }
      }
    }
  }
  for (int64_t i = 0; i < shape[2]; ++i) {
    for (int64_t j = 0; j < shape[3]; ++j) put(p, p.dbias.dtype, p.dbias.at(plane_b, plane_h, i, j), sum.row(i)[j]);
  }
}

// The gradients of the tensors that score_mod reads: sums over all entries, in order.
void backward_captured(const Problem& p) {
  std::vector<double> table(static_cast<size_t>(p.score_mod->cells));
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t head = 0; head < p.heads_q; ++head) {
      const Head h(p, b, head, true);
      for (int64_t i = 0; i < h.s.q_len; ++i) {
        const Row row = make_backward_row(h, i);
        const ScoreGradients g(h, i, row);
        for (size_t n = 0; n < row.entries.size(); ++n) {
          h.mod.capture(g.ds[n], row.entries[n].r, h.at(i, row.entries[n].j), table.data());
        }
      }
    }
  }
  each_captured(*p.score_mod.read, [&](const BiasView& to, std::byte* at, int64_t cell) {
    put(p, to.dtype, at, table[static_cast<size_t>(cell)]);
  });
}

}  // namespace

void serial(int64_t tasks, const std::function<void(int64_t)>& body) {
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

void forward(const Problem& p, const ParallelFor& parallel_for) {
  parallel_for(p.batch * p.heads_q, [&p](int64_t task) { forward_head(p, task / p.heads_q, task % p.heads_q); });
}

void backward(const Problem& p, const ParallelFor& parallel_for) {
  Matrix dsink(p.batch, p.heads_q);  // one row per sequence, summed in order below
  if (p.page_table) {
    parallel_for(p.heads_k, [&](int64_t head_k) { backward_pages(p, head_k, dsink); });
  } else {
    parallel_for(p.batch * p.heads_k, [&](int64_t task) {
      const Sequence s = sequence_of(p, task / p.heads_k);
      const int64_t head_k = task % p.heads_k;
      Matrix dk(s.k_rows, p.head_dim), dv(s.k_rows, p.head_dim_v);
      backward_group(p, s, head_k, dk, dv, dsink.row(s.batch_index));
      store_keys(p, {s.batch_index, s.k_begin}, s.k_rows, head_k, dk.row(0), dv.row(0));
    });
  }
  if (p.dsink) {
    for (int64_t head = 0; head < p.heads_q; ++head) {
      double sum = 0;
      for (int64_t b = 0; b < p.batch; ++b) sum += dsink.row(b)[head];
      put(p, p.dsink.dtype, p.dsink.at(0, head), sum);
    }
  }
  if (p.dbias) {
    const int64_t planes = p.dbias.shape[0] * p.dbias.shape[1];
    parallel_for(planes, [&p](int64_t task) { backward_bias(p, task / p.dbias.shape[1], task % p.dbias.shape[1]); });
  }
  if (p.score_mod && p.score_mod->cells > 0) backward_captured(p);
}

}  // namespace tandem::reference
