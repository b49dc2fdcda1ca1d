#include "cli/plain/plain.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "cli/plain/rows.h"
#include "problem/convert.h"
#include "problem/philox.h"

namespace tandem::plain {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int64_t most_kept_bytes = int64_t{1} << 30;

// The inputs of every step. With enough heads the heads run in parallel, each product on one thread. Otherwise heads
// run one after another, with all threads inside a product and over the rows of a softmax.
struct Setting {
  const Problem& p;
  cpu::Threads& threads;
  const Blas& blas;
  Scratch& scratch;
  DType round_to;  // float32: no rounding
  bool heads_at_once;
  uint32_t noise;

  void each_head(int64_t heads, const std::function<void(int64_t)>& body) const {
    blas.set_threads(heads_at_once ? 1 : threads.count());
    if (heads_at_once) {
      threads.run(static_cast<int32_t>(heads), [&](int32_t head) { body(head); });
    } else {
      for (int64_t head = 0; head < heads; ++head) body(head);
    }
  }

  void each_row(int64_t rows, const std::function<void(int64_t)>& body) const {
    constexpr int64_t block = 16;
    const auto run_block = [&](int64_t n) {
      for (int64_t i = n * block; i < std::min(rows, (n + 1) * block); ++i) body(i);
    };
    const int64_t blocks = (rows + block - 1) / block;
    if (heads_at_once) {
      for (int64_t n = 0; n < blocks; ++n) run_block(n);
    } else {
      threads.run(static_cast<int32_t>(blocks), [&](int32_t n) { run_block(n); });
    }
  }
};

DType rounded_type(const Problem& p, Rounding rounding) { return rounding == Rounding::none ? DType::f32 : p.dtype; }

// The first row of a head's matrix in a tensor.
struct MatrixPlace {
  int64_t batch, row, head;
};

void load_matrix(const View& view, const MatrixPlace& at, int64_t rows, int64_t columns, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    load_row(view.dtype, view.at(at.batch, at.row + i, at.head), columns, to + i * columns);
}

// Stores a matrix. Rows of the tensor beyond the used ones become zero.
void store_matrix(const View& view, const MatrixPlace& at, int64_t used, int64_t rows, int64_t columns,
                  const float* from) {
  const auto [b, row, h] = at;
  for (int64_t i = 0; i < used; ++i) store_row(view.dtype, from + i * columns, columns, view.at(b, row + i, h));
  for (int64_t i = used; i < rows; ++i)
    std::memset(view.at(b, row + i, h), 0, static_cast<size_t>(columns * size_of(view.dtype)));
}

// Changes each number at random by at most that number of float32 roundings. Without noise no number changes.
void disturb(const Setting& c, uint32_t place, int64_t operations, float* row, int64_t n) {
  if (c.noise == 0) return;
  const float most = 0x1p-24f * std::sqrt(static_cast<float>(operations));
  for (int64_t j = 0; j < n; ++j) {
    const Philox4 random = philox4x32({{static_cast<uint32_t>(j), place, 0, 0}}, c.noise, 0, 10);
    row[j] += row[j] * most * (static_cast<float>(random.word[0]) * 0x1p-31f - 1);
  }
}

struct RowOfHead {
  int64_t head, row;
};

// scores[begin, end) of one row, from scaled products to the input of the softmax. slopes, when not null, receives the
// derivative of the softcap.
void finish_scores(const Setting& c, const Sequence& s, const RowOfHead& at, KeySpan keys, float* scores,
                   float* slopes) {
  const auto [h, i] = at;
  const Problem& p = c.p;
  if (p.softcap > 0) {
    const auto cap = static_cast<float>(p.softcap);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const float t = std::tanh(scores[j] / cap);
      scores[j] = cap * t;
      if (slopes) slopes[j] = 1 - t * t;
    }
  }
  if (p.bias) {
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const auto value = static_cast<float>(load(p.bias.dtype, p.bias.at(s.batch_index, h, i, j)));
      scores[j] = !p.bias.boolean() ? scores[j] + value : value != 0 ? scores[j] : -infinity;
    }
  }
  if (p.alibi_slopes) {
    const auto slope = static_cast<float>(load(DType::f32, p.alibi_slopes.at(s.batch_index, h)));
    for (int64_t j = keys.begin; j < keys.end; ++j)
      scores[j] -= slope * static_cast<float>(std::abs(i + s.diagonal - j));
  }
  disturb(c, static_cast<uint32_t>(4 * (h + i)), p.head_dim, scores + keys.begin, keys.end - keys.begin);
}

float sum_of_rounded(DType type, float* row, int64_t n) {
  round_row(type, row, n);
  float sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += row[j];
  return sum;
}

// Converts the visible scores of one row to probabilities; returns the row's lse.
float softmax_row(const Setting& c, int64_t h, int64_t row, int64_t count, float* visible) {
  const float sink = c.p.sink ? static_cast<float>(load(c.p.sink.dtype, c.p.sink.at(0, h))) : -infinity;
  const float most = std::max(row_max(visible, count), sink);
  if (most == -infinity) {
    std::fill(visible, visible + count, 0.f);
    return -infinity;
  }
  float of_sink = std::exp(sink - most);
  float sum = exp_row(visible, count, most) + of_sink;
  const float factor = 1 / sum;
  if (c.round_to != DType::f32) {
    // The lse belongs to weights in the input type. The probabilities are rounded once, after their division.
    std::vector<float> weights(visible, visible + count);
    round_row(c.round_to, &of_sink, 1);
    sum = sum_of_rounded(c.round_to, weights.data(), count) + of_sink;
  }
  for (int64_t j = 0; j < count; ++j) visible[j] *= factor;
  float lse = most + std::log(sum);
  disturb(c, static_cast<uint32_t>(4 * (h + row) + 1), 3, visible, count);
  disturb(c, static_cast<uint32_t>(4 * (h + row) + 2), 3, &lse, 1);
  return lse;
}

// Computes out[j] = p[j], dropped or scaled. Both may be the same array.
void drop_row(const Problem& p, int64_t sequence_head, int64_t i, int64_t n, const float* from, float* to) {
  const uint32_t threshold = dropout_threshold(p.dropout.p);
  const auto keep_scale = static_cast<float>(1 / (1 - p.dropout.p));
  for (int64_t first = 0; first < n; first += kDropoutGroup) {
    const Philox4 words = dropout_words(p.dropout.seed, p.dropout.offset, static_cast<uint64_t>(sequence_head),
                                        static_cast<uint64_t>(i), static_cast<uint64_t>(first / kDropoutGroup));
    for (int64_t j = first; j < std::min(first + kDropoutGroup, n); ++j)
      to[j] = is_dropped(words, j, threshold) ? 0 : from[j] * keep_scale;
  }
}

// Computes the scores of one head, q_len x k_len. finish(i, visible scores, their number) converts each row to
// probabilities.
template <class Finish>
void probabilities(const Setting& c, const Sequence& s, int64_t h, float* matrix, float* slopes, const Finish& finish) {
  const Problem& p = c.p;
  const int64_t d = p.head_dim, n = s.k_len;
  Scratch::Loan q(c.scratch, s.q_len * d), k(c.scratch, n * d);
  load_matrix(p.q, {s.batch_index, s.q_begin, h}, s.q_len, d, q.data());
  load_matrix(p.k, {s.batch_index, s.k_begin, h / p.group()}, n, d, k.data());
  c.blas.sgemm(false, true, s.q_len, n, d, static_cast<float>(p.softmax_scale), q.data(), d, k.data(), d, 0, matrix, n);
  c.each_row(s.q_len, [&](int64_t i) {
    const KeySpan keys = visible_keys(p, s, i);
    float* row = matrix + i * n;
    finish_scores(c, s, {h, i}, keys, row, slopes ? slopes + i * n : nullptr);
    std::fill(row, row + keys.begin, 0.f);
    std::fill(row + keys.end, row + n, 0.f);
    finish(i, row + keys.begin, keys.end - keys.begin);
  });
}

void forward_head(const Setting& c, int64_t b, int64_t h, float* kept) {
  const Problem& p = c.p;
  const Sequence s = sequence_of(p, b);
  const int64_t n = s.k_len, dv = p.head_dim_v;
  Scratch::Loan own(c.scratch, kept ? 0 : s.q_len * n), lse(c.scratch, s.q_len);
  float* matrix = kept ? kept : own.data();
  probabilities(c, s, h, matrix, nullptr,
                [&](int64_t i, float* row, int64_t count) { lse.data()[i] = softmax_row(c, h, i, count, row); });
  c.each_row(s.q_len, [&](int64_t i) {
    if (p.dropout) drop_row(p, b * p.heads_q + h, i, n, matrix + i * n, matrix + i * n);
    round_row(c.round_to, matrix + i * n, n);
  });
  Scratch::Loan v(c.scratch, n * dv), out(c.scratch, s.q_len * dv);
  load_matrix(p.v, {s.batch_index, s.k_begin, h / p.group()}, n, dv, v.data());
  c.blas.sgemm(false, false, s.q_len, dv, n, 1, matrix, n, v.data(), dv, 0, out.data(), dv);
  store_matrix(p.out, {s.batch_index, s.q_begin, h}, s.q_len, s.q_rows, dv, out.data());
  for (int64_t i = 0; p.lse && i < s.q_rows; ++i)
    store(p.lse.dtype, p.lse.at(s.batch_index, s.q_begin + i, h), i < s.q_len ? lse.data()[i] : -infinity);
}

// Sums to which several heads add.
struct Shared {
  std::mutex mutex;
  std::vector<float> bias, sink;
};

void add_bias_gradient(const Problem& p, const Sequence& s, int64_t h, const float* gradient, Shared& shared) {
  const std::lock_guard lock(shared.mutex);
  const int64_t* shape = p.dbias.shape;
  const int64_t first = ((shape[0] > 1 ? s.batch_index : 0) * shape[1] + (shape[1] > 1 ? h : 0)) * shape[2];
  for (int64_t i = 0; i < s.q_len; ++i) {
    float* row = shared.bias.data() + (first + (shape[2] > 1 ? i : 0)) * shape[3];
    for (int64_t j = 0; j < s.k_len; ++j) row[shape[3] > 1 ? j : 0] += gradient[i * s.k_len + j];
  }
}

// Replaces dP of one row by dS. delta: dout . out - dlse of the row.
void score_gradient_row(const Setting& c, const RowOfHead& at, int64_t n, const float* p, float delta,
                        float* gradient) {
  const auto [sequence_head, i] = at;
  disturb(c, static_cast<uint32_t>(4 * (sequence_head + i) + 1), c.p.head_dim_v, gradient, n);
  if (c.p.dropout) drop_row(c.p, sequence_head, i, n, gradient, gradient);
  for (int64_t j = 0; j < n; ++j) gradient[j] = p[j] == 0 ? 0 : p[j] * (gradient[j] - delta);
}

// Computes dout . out - dlse for every row.
void deltas(const Setting& c, const Sequence& s, int64_t h, const float* dout, float* delta) {
  const Problem& p = c.p;
  const int64_t d_v = p.head_dim_v;
  Scratch::Loan out(c.scratch, s.q_len * d_v);
  load_matrix(p.out, {s.batch_index, s.q_begin, h}, s.q_len, d_v, out.data());
  for (int64_t i = 0; i < s.q_len; ++i) {
    const std::byte* dlse = p.dlse ? p.dlse.at(s.batch_index, s.q_begin + i, h) : nullptr;
    delta[i] = dot_row(dout + i * d_v, out.data() + i * d_v, d_v) -
               (dlse ? static_cast<float>(load(p.dlse.dtype, dlse)) : 0.f);
  }
}

// Returns the sink's probability times -delta, summed over all rows.
float sink_gradient(const Setting& c, const Sequence& s, int64_t h, const float* lse, const float* delta) {
  const auto sink = static_cast<float>(load(c.p.sink.dtype, c.p.sink.at(0, h)));
  float sum = 0;
  for (int64_t i = 0; i < s.q_len; ++i) {
    float probability = lse[i] == -infinity ? 0 : std::exp(sink - lse[i]);
    round_row(c.round_to, &probability, 1);
    sum -= probability * delta[i];
  }
  return sum;
}

// dk (n x d) and dv (n x dv) of a key head.
struct KeyGradients {
  float *dk, *dv;
};

// Computes dq of one query head, and adds the head to dk and dv.
void backward_head(const Setting& c, int64_t b, int64_t h, float* kept, const KeyGradients& to, Shared& shared) {
  const Problem& p = c.p;
  const Sequence s = sequence_of(p, b);
  const int64_t m = s.q_len, n = s.k_len, d = p.head_dim, d_v = p.head_dim_v;
  const bool capped = p.softcap > 0;
  Scratch::Loan own(c.scratch, kept ? 0 : m * n), gradient(c.scratch, m * n), slopes(c.scratch, capped ? m * n : 0);
  Scratch::Loan lse(c.scratch, m), delta(c.scratch, m), dout(c.scratch, m * d_v), v(c.scratch, n * d_v);
  float* matrix = kept ? kept : own.data();
  for (int64_t i = 0; i < m; ++i)
    lse.data()[i] = static_cast<float>(load(p.lse.dtype, p.lse.at(s.batch_index, s.q_begin + i, h)));
  if (!kept) {
    probabilities(c, s, h, matrix, capped ? slopes.data() : nullptr, [&](int64_t i, float* row, int64_t count) {
      // Probabilities are normalised by their sum, because a rounded lse would add an error that standard attention
      // does not have.
      softmax_row(c, h, i, count, row);
      round_row(c.round_to, row, count);
    });
  }
  load_matrix(p.dout, {s.batch_index, s.q_begin, h}, m, d_v, dout.data());
  load_matrix(p.v, {s.batch_index, s.k_begin, h / p.group()}, n, d_v, v.data());

  const float* dropped = matrix;
  if (p.dropout) {
    c.each_row(m, [&](int64_t i) {
      drop_row(p, b * p.heads_q + h, i, n, matrix + i * n, gradient.data() + i * n);
      round_row(c.round_to, gradient.data() + i * n, n);
    });
    dropped = gradient.data();
  }
  c.blas.sgemm(true, false, n, d_v, m, 1, dropped, n, dout.data(), d_v, 1, to.dv, d_v);
  c.blas.sgemm(false, true, m, n, d_v, 1, dout.data(), d_v, v.data(), d_v, 0, gradient.data(), n);

  deltas(c, s, h, dout.data(), delta.data());
  c.each_row(m, [&](int64_t i) {
    score_gradient_row(c, {b * p.heads_q + h, i}, n, matrix + i * n, delta.data()[i], gradient.data() + i * n);
  });
  if (p.dbias) add_bias_gradient(p, s, h, gradient.data(), shared);
  if (p.dsink) {
    const std::lock_guard lock(shared.mutex);
    shared.sink[static_cast<size_t>(h)] += sink_gradient(c, s, h, lse.data(), delta.data());
  }
  c.each_row(m, [&](int64_t i) {
    float* row = gradient.data() + i * n;
    const KeySpan keys = visible_keys(p, s, i);  // slopes are set for visible keys alone
    for (int64_t j = keys.begin; capped && j < keys.end; ++j) row[j] *= slopes.data()[i * n + j];
    round_row(c.round_to, row, n);
  });

  Scratch::Loan other(c.scratch, std::max(m, n) * d), dq(c.scratch, m * d);
  const auto scale = static_cast<float>(p.softmax_scale);
  if (p.dq) {
    load_matrix(p.k, {s.batch_index, s.k_begin, h / p.group()}, n, d, other.data());
    c.blas.sgemm(false, false, m, d, n, scale, gradient.data(), n, other.data(), d, 0, dq.data(), d);
    store_matrix(p.dq, {s.batch_index, s.q_begin, h}, m, s.q_rows, d, dq.data());
  }
  if (p.dk) {
    load_matrix(p.q, {s.batch_index, s.q_begin, h}, m, d, other.data());
    c.blas.sgemm(true, false, n, d, m, scale, gradient.data(), n, other.data(), d, 1, to.dk, d);
  }
}

// Computes one key head: its query heads one after the other, with sums in float32.
void backward_group(const Setting& c, int64_t b, int64_t h_k, const std::function<float*(int64_t h)>& kept,
                    Shared& shared) {
  const Problem& p = c.p;
  const Sequence s = sequence_of(p, b);
  Scratch::Loan dk(c.scratch, s.k_len * p.head_dim), dv(c.scratch, s.k_len * p.head_dim_v);
  std::fill_n(dk.data(), s.k_len * p.head_dim, 0.f);
  std::fill_n(dv.data(), s.k_len * p.head_dim_v, 0.f);
  for (int64_t h = h_k * p.group(); h < (h_k + 1) * p.group(); ++h)
    backward_head(c, b, h, kept(h), {dk.data(), dv.data()}, shared);
  if (p.dk) store_matrix(p.dk, {s.batch_index, s.k_begin, h_k}, s.k_len, s.k_rows, p.head_dim, dk.data());
  if (p.dv) store_matrix(p.dv, {s.batch_index, s.k_begin, h_k}, s.k_len, s.k_rows, p.head_dim_v, dv.data());
}

float* kept_head(std::vector<float>& kept, const Problem& p, int64_t b, int64_t h) {
  return kept.empty() ? nullptr : kept.data() + (b * p.heads_q + h) * p.seqlen_q * p.seqlen_k;
}

}  // namespace

Scratch::Loan::Loan(Scratch& owner, int64_t count) : owner_(owner), capacity_(count) {
  {
    const std::lock_guard lock(owner_.mutex_);
    auto best = owner_.free_.end();
    for (auto it = owner_.free_.begin(); it != owner_.free_.end(); ++it) {
      if (it->first >= count && (best == owner_.free_.end() || it->first < best->first)) best = it;
    }
    if (best != owner_.free_.end()) {
      capacity_ = best->first;
      memory_ = std::move(best->second);
      owner_.free_.erase(best);
      return;
    }
  }
  memory_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
  owner_.bytes_ += count * static_cast<int64_t>(sizeof(float));
}

Scratch::Loan::~Loan() {
  const std::lock_guard lock(owner_.mutex_);
  owner_.free_.emplace_back(capacity_, std::move(memory_));
}

void Plain::forward(const Problem& p) {
  const int64_t heads = p.batch * p.heads_q, kept = heads * p.seqlen_q * p.seqlen_k;
  const bool keep = rounding_ == Rounding::none && !p.dropout && p.softcap == 0 &&
                    kept * static_cast<int64_t>(sizeof(float)) <= most_kept_bytes;
  kept_.resize(keep ? static_cast<size_t>(kept) : 0);
  const Setting c{p, threads_, blas_, scratch_, rounded_type(p, rounding_), heads >= threads_.count(), noise_};
  c.each_head(heads, [&](int64_t n) {
    const int64_t b = n / p.heads_q, h = n % p.heads_q;
    forward_head(c, b, h, kept_head(kept_, p, b, h));
  });
}

void Plain::backward(const Problem& p) {
  Shared shared;
  if (p.dbias) {
    const int64_t* shape = p.dbias.shape;
    shared.bias.resize(static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
  }
  shared.sink.resize(static_cast<size_t>(p.heads_q));
  const uint32_t noise = noise_ == 0 ? 0 : ~noise_;  // the backward has separate noise
  const bool heads_at_once = p.batch * p.heads_k >= threads_.count();
  const Setting c{p, threads_, blas_, scratch_, rounded_type(p, rounding_), heads_at_once, noise};
  c.each_head(p.batch * p.heads_k, [&](int64_t n) {
    const int64_t b = n / p.heads_k;
    backward_group(
        c, b, n % p.heads_k, [&](int64_t h) { return kept_head(kept_, p, b, h); }, shared);
  });
  for (int64_t h = 0; p.dsink && h < p.heads_q; ++h)
    store(p.dsink.dtype, p.dsink.at(0, h), shared.sink[static_cast<size_t>(h)]);
  size_t n = 0;
  if (!p.dbias) return;
  for (int64_t b = 0; b < p.dbias.shape[0]; ++b) {
    for (int64_t h = 0; h < p.dbias.shape[1]; ++h) {
      for (int64_t i = 0; i < p.dbias.shape[2]; ++i) {
        for (int64_t j = 0; j < p.dbias.shape[3]; ++j) store(p.dbias.dtype, p.dbias.at(b, h, i, j), shared.bias[n++]);
      }
    }
  }
}

}  // namespace tandem::plain
