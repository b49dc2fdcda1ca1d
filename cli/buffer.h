// Buffer: a compact tensor that owns its memory.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cli/io/tensor.h"
#include "problem/problem.h"
#include "tandem/tandem.hpp"

namespace tandem::tool {

class Buffer {
 public:
  Buffer() = default;
  // Allocates without initialising the elements.
  Buffer(DType dtype, std::vector<int64_t> shape);

  // A buffer with only type and shape, for calls that are checked or planned, but not run.
  static Buffer without_memory(DType dtype, std::vector<int64_t> shape);

  explicit operator bool() const { return !shape_.empty(); }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * size_of(dtype_); }
  std::byte* data() const { return data_.get(); }

  double get(int64_t i) const;
  void set(int64_t i, double value) const;

  Tensor tensor() const;  // for a call; empty without a buffer
  io::FileTensor view(const std::string& name) const;
  Buffer converted(DType dtype) const;

 private:
  void set_shape(DType dtype, std::vector<int64_t> shape);

  struct Free {
    void operator()(std::byte* memory) const;
  };
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_;
  int64_t count_ = 0;
  std::unique_ptr<std::byte[], Free> data_;
};

using Random = std::mt19937_64;

// Standard normal numbers times scale. A seed gives the same numbers on every machine.
Buffer random_buffer(Random& random, DType dtype, std::vector<int64_t> shape, double scale = 1);

// Returns a copy of a tensor of a file. Unsupported types throw InputError; raw16 needs raw16_is_bf16.
Buffer buffer_from(const io::FileTensor& view, const std::string& what, bool raw16_is_bf16);

DType dtype_from(const std::string& name);  // "f32", "bf16", "f16", "f64"; throws io::InputError
std::string short_name(DType dtype);        // the inverse of dtype_from()

}  // namespace tandem::tool
