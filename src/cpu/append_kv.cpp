// Writes new keys and values into a cache, and rotates keys and queries. A row is all heads of one key or query.
#include "problem/append_kv.h"

#include <algorithm>
#include <cstring>

#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "cpu/schedule.h"
#include "problem/convert.h"

namespace tandem::cpu {
namespace {

constexpr int64_t kMaxHeadDim = 512;

// The result of a product in T, which the compiler cannot fuse with a sum.
float product(float a, float b) { return static_cast<float>(static_cast<double>(a) * b); }
double product(double a, double b) { return a * b; }

template <class T>
void load_numbers(DType type, const std::byte* from, int64_t count, T* to) {
  if constexpr (sizeof(T) == sizeof(float)) {
    kernels().load_row(type, from, count, to);
  } else {
    for (int64_t c = 0; c < count; ++c) to[c] = load(type, from + c * size_of(type));
  }
}

template <class T>
void store_numbers(DType type, const T* from, int64_t count, std::byte* to) {
  if constexpr (sizeof(T) == sizeof(float)) {
    kernels().store_row(type, from, count, to);
  } else {
    for (int64_t c = 0; c < count; ++c) store(type, to + c * size_of(type), from[c]);
  }
}

// The numbers of one row of the tables.
template <class T>
class Rotation {
 public:
  Rotation(const AppendKvProblem& p, int64_t position) : p_(p) {
    load_numbers(p.cos.dtype, p.cos.at(position), p.rotary_dim / 2, cos_);
    load_numbers(p.sin.dtype, p.sin.at(position), p.rotary_dim / 2, sin_);
  }

  // Rotates the first rotary_dim elements of `from`; to may be from.
  void apply(const std::byte* from, std::byte* to) const {
    T x[kMaxHeadDim], y[kMaxHeadDim];
    const int64_t pairs = p_.rotary_dim / 2, step = p_.interleaved ? 2 : 1, apart = p_.interleaved ? 1 : pairs;
    load_numbers(p_.dtype, from, p_.rotary_dim, x);
    for (int64_t c = 0; c < pairs; ++c) {
      const T a = x[c * step], b = x[c * step + apart];
      y[c * step] = product(a, cos_[c]) - product(b, sin_[c]);
      y[c * step + apart] = product(a, sin_[c]) + product(b, cos_[c]);
    }
    store_numbers(p_.dtype, y, p_.rotary_dim, to);
  }

 private:
  const AppendKvProblem& p_;
  T cos_[kMaxHeadDim / 2], sin_[kMaxHeadDim / 2];
};

// Copies the heads of a row from one tensor to another, and rotates each.
template <class T>
void rotate_heads(const AppendKvProblem& p, const AppendRow& row, const View& from, const View& to, int64_t heads,
                  bool to_cache) {
  const Rotation<T> rotation(p, row.position);
  const int64_t done = p.rotary_dim * size_of(p.dtype), rest = (p.head_dim - p.rotary_dim) * size_of(p.dtype);
  for (int64_t h = 0; h < heads; ++h) {
    const std::byte* const x = from.at(row.batch, row.row, h);
    std::byte* const y = to_cache ? to.at(row.page, row.place, h) : to.at(row.batch, row.row, h);
    rotation.apply(x, y);
    if (x != y) std::memcpy(y + done, x + done, static_cast<size_t>(rest));
  }
}

void rotate(const AppendKvProblem& p, const AppendRow& row, const View& from, const View& to, int64_t heads,
            bool to_cache) {
  const auto function = p.dtype == DType::f64 ? rotate_heads<double> : rotate_heads<float>;
  function(p, row, from, to, heads, to_cache);
}

void copy(const AppendKvProblem& p, const AppendRow& row, const View& from, const View& to, int64_t dim) {
  const auto bytes = static_cast<size_t>(dim * size_of(p.dtype));
  for (int64_t h = 0; h < p.keys.heads; ++h) {
    std::memcpy(to.at(row.page, row.place, h), from.at(row.batch, row.row, h), bytes);
  }
}

void append(const AppendKvProblem& p, const AppendRow& row) {
  if (p.rotary_dim > 0) {
    rotate(p, row, p.k, p.k_cache, p.keys.heads, true);
  } else {
    copy(p, row, p.k, p.k_cache, p.head_dim);
  }
  copy(p, row, p.v, p.v_cache, p.head_dim_v);
}

}  // namespace

void append_kv(const AppendKvProblem& p, const AppendRows& rows, Threads& threads) {
  const double of_keys = static_cast<double>(rows.keys.size()) * static_cast<double>(p.keys.heads * p.head_dim);
  const double of_queries =
      static_cast<double>(rows.queries.size()) * static_cast<double>(p.queries.heads * p.head_dim);
  const double most = std::min(static_cast<double>(threads.count()), 1 + (of_keys + of_queries) / kWorkPerThread);
  const auto tasks = static_cast<int64_t>(most);
  threads.run(static_cast<int32_t>(tasks), [&](int32_t task) {
    // One task writes all keys of a place, in order, so that the last of them stays.
    for (const AppendRow& row : rows.keys) {
      if ((row.page * p.page_size + row.place) % tasks == task) append(p, row);
    }
    const auto count = static_cast<int64_t>(rows.queries.size());
    for (int64_t n = count * task / tasks; n < count * (task + 1) / tasks; ++n) {
      rotate(p, rows.queries[static_cast<size_t>(n)], p.q, p.q_out, p.queries.heads, false);
    }
  });
}

}  // namespace tandem::cpu
