// Rows of tensors: parts of a View, and memory that an execution owns.
#pragma once

#include <cstddef>
#include <vector>

#include "problem/problem.h"

namespace tandem::context_parallel {

// The sizes of a tensor of rows. lse has dim 1.
struct RowShape {
  int64_t rows = 0, heads = 0, dim = 0;

  int64_t bytes(DType dtype) const { return rows * heads * dim * size_of(dtype); }
};

// Returns the view from a row or a head on. An absent view stays absent.
inline View from_row(View v, int64_t row) {
  if (v) v.data += row * v.row * size_of(v.dtype);
  return v;
}
inline View from_head(View v, int64_t head) {
  if (v) v.data += head * v.head * size_of(v.dtype);
  return v;
}
inline HeadView from_head(HeadView v, int64_t head) {
  if (v) v.data += head * v.head * size_of(v.dtype);
  return v;
}

// Lays a compact tensor over memory.
View compact_view(std::byte* data, DType dtype, const RowShape& shape);

void copy_rows(const View& from, const View& to, const RowShape& shape);  // the types are equal
void add_rows(const View& from, const View& to, const RowShape& shape);   // both are float32
void fill_rows(const View& v, const RowShape& shape, double value);

// Zeros at first.
class RowBuffer {
 public:
  RowBuffer() = default;
  RowBuffer(DType dtype, const RowShape& shape)
      : shape_(shape), dtype_(dtype), memory_(static_cast<size_t>(shape.bytes(dtype))) {}

  View view() { return compact_view(memory_.data(), dtype_, shape_); }
  const RowShape& shape() const { return shape_; }

 private:
  RowShape shape_;
  DType dtype_ = DType::f32;
  std::vector<std::byte> memory_;
};

}  // namespace tandem::context_parallel
