#include "context_parallel/rows.h"

#include <cstring>

#include "problem/convert.h"

namespace tandem::context_parallel {

View compact_view(std::byte* data, DType dtype, const RowShape& shape) {
  return {.data = data, .dtype = dtype, .batch = 0, .row = shape.heads * shape.dim, .head = shape.dim, .present = true};
}

void copy_rows(const View& from, const View& to, const RowShape& s) {
  const auto bytes = static_cast<size_t>(s.dim * size_of(from.dtype));
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t head = 0; head < s.heads; ++head) std::memcpy(to.at(0, row, head), from.at(0, row, head), bytes);
  }
}

void add_rows(const View& from, const View& to, const RowShape& s) {
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t head = 0; head < s.heads; ++head) {
      const auto* x = reinterpret_cast<const float*>(from.at(0, row, head));
      auto* sum = reinterpret_cast<float*>(to.at(0, row, head));
      for (int64_t c = 0; c < s.dim; ++c) sum[c] += x[c];
    }
  }
}

void fill_rows(const View& v, const RowShape& s, double value) {
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t head = 0; head < s.heads; ++head) {
      for (int64_t c = 0; c < s.dim; ++c) store(v.dtype, v.at(0, row, head) + c * size_of(v.dtype), value);
    }
  }
}

}  // namespace tandem::context_parallel
