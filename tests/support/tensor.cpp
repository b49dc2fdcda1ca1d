#include "support/tensor.h"

#include <algorithm>
#include <numeric>

namespace tandem::test {

Tensor::Tensor(DType dtype, std::vector<int64_t> shape, int64_t layout, int64_t margin, int64_t gap)
    : present_(true),
      compact_(layout == kCompact),
      dtype_(dtype),
      shape_(std::move(shape)),
      strides_(shape_.size(), 1),
      margin_(margin) {
  const size_t rank = shape_.size();
  std::vector<size_t> inner_first(rank);
  for (size_t n = 0; n < rank; ++n) inner_first[n] = rank - 1 - n;
  if ((layout & kHeadsFirst) && rank >= 3) std::swap(inner_first[1], inner_first[2]);
  int64_t step = 1;
  for (size_t n = 0; n < rank; ++n) {
    strides_[inner_first[n]] = step;
    step *= std::max<int64_t>(shape_[inner_first[n]], 1);
    if (n == 0 && (layout & kGaps) && rank > 1) step += gap;
  }
  storage_.resize(static_cast<size_t>((step + 2 * margin_) * size_of(dtype_)));
  fill_nan();
}

int64_t Tensor::size() const {
  return std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, [](int64_t a, int64_t b) { return a * b; });
}

int64_t Tensor::offset(int64_t n) const {
  int64_t at = margin_;
  for (size_t dim = shape_.size(); dim-- > 0;) {
    const int64_t length = std::max<int64_t>(shape_[dim], 1);  // callers use element(0) of an empty tensor
    at += n % length * strides_[dim];
    n /= length;
  }
  return at;
}

std::byte* Tensor::element(int64_t n) { return storage_.data() + offset(n) * size_of(dtype_); }

std::vector<double> Tensor::values() const {
  std::vector<double> all(static_cast<size_t>(size()));
  for (size_t n = 0; n < all.size(); ++n) all[n] = get(static_cast<int64_t>(n));
  return all;
}

void Tensor::fill_nan() { std::fill(storage_.begin(), storage_.end(), std::byte{0xff}); }

bool Tensor::guards_intact() const {
  std::vector<std::byte> rest = storage_;
  for (int64_t n = 0; n < size(); ++n)
    std::fill_n(rest.begin() + offset(n) * size_of(dtype_), size_of(dtype_), std::byte{0xff});
  return std::all_of(rest.begin(), rest.end(), [](std::byte b) { return b == std::byte{0xff}; });
}

uint64_t Tensor::fingerprint() const {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (std::byte b : storage_) hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001b3u;
  return hash;
}

const tandem_tensor* Tensor::describe() {
  if (!present_) return nullptr;
  static constexpr tandem_dtype kCodes[] = {{TANDEM_FLOAT, 64, 1}, {TANDEM_FLOAT, 32, 1}, {TANDEM_BFLOAT, 16, 1},
                                            {TANDEM_FLOAT, 16, 1}, {TANDEM_BOOL, 8, 1},   {TANDEM_INT, 32, 1},
                                            {TANDEM_INT, 64, 1}};
  description_ = {};
  description_.data = storage_.data();
  description_.byte_offset = static_cast<uint64_t>(margin_ * size_of(dtype_));
  description_.device = {TANDEM_CPU, 0};
  description_.ndim = static_cast<int32_t>(shape_.size());
  description_.dtype = kCodes[static_cast<int>(dtype_)];
  description_.shape = shape_.data();
  description_.strides = compact_ ? nullptr : strides_.data();
  return &description_;
}

}  // namespace tandem::test
