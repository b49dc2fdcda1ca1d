// A tensor with guard bands, owned by a test. Margins before and after the tensor, and the gaps of its strides, are
// NaN; a check finds writes to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "problem/convert.h"
#include "problem/problem.h"

namespace tandem::test {

// The memory layout of a tensor. Bits may be combined.
enum Layout : int64_t {
  kCompact = 0,
  kGaps = 1,        // unused elements (default 3) after each innermost run
  kHeadsFirst = 2,  // as (batch, heads, seqlen, head_dim)
};

class Tensor {
 public:
  Tensor() = default;  // absent
  Tensor(DType dtype, std::vector<int64_t> shape, int64_t layout = kCompact, int64_t margin = 32, int64_t gap = 3);

  explicit operator bool() const { return present_; }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  int64_t size() const;

  // Elements in row-major order of the shape, for any layout.
  std::byte* element(int64_t n);
  const std::byte* element(int64_t n) const { return const_cast<Tensor*>(this)->element(n); }
  double get(int64_t n) const { return load(dtype_, element(n)); }
  void set(int64_t n, double x) { store(dtype_, element(n), x); }
  std::vector<double> values() const;

  std::span<std::byte> storage() { return storage_; }  // guards included; its offset of element 0 is in describe()

  void fill_nan();                  // every byte 0xff, guards included: NaN in every float format
  bool guards_intact() const;       // no byte outside the elements has changed since fill_nan
  uint64_t fingerprint() const;     // hash of every byte, guards included
  const tandem_tensor* describe();  // NULL when absent; valid while the tensor is not moved

 private:
  int64_t offset(int64_t n) const;

  bool present_ = false, compact_ = true;
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_, strides_;
  int64_t margin_ = 0;
  std::vector<std::byte> storage_;
  tandem_tensor description_{};
};

}  // namespace tandem::test
