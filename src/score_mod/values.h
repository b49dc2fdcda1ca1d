// The values of an expression's names in one call: scalars, and tensors in host memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "score_mod/op.h"
#include "score_mod/tensor_view.h"

namespace tandem::score_mod {

struct Signature;

struct Values {
  std::vector<double> scalars;  // any type as double; a bool is 0 or 1
  std::vector<TensorView> tensors;
};

constexpr Type type_of(Element element) {
  return element == Element::boolean                          ? Type::boolean
         : element == Element::i64 || element == Element::i32 ? Type::integer
                                                              : Type::real;
}

// Returns the offset of the element at these indices, each clamped to its dimension. An int64 beyond int's range is
// clamped to int.
int64_t offset_of(const TensorView& tensor, std::span<const int32_t> indices);
double read(const TensorView& tensor, int64_t offset);

// Checks that the values match the signature: the same number, types and ranks, and at least one element per tensor.
Status check_values(const Signature& signature, const Values& values);

}  // namespace tandem::score_mod
