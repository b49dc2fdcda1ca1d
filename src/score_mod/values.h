// What the names of a text stand for in one call: scalars, and tensors in the host's memory.
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
  std::vector<double> scalars;  // an int's, a bool's (0 or 1) and a float's alike
  std::vector<TensorView> tensors;
};

constexpr Type type_of(Element element) {
  return element == Element::boolean                          ? Type::boolean
         : element == Element::i64 || element == Element::i32 ? Type::integer
                                                              : Type::real;
}

// The element that indices name, each clamped to its dimension. An int64 beyond int's range is the nearest int.
int64_t offset_of(const TensorView& tensor, std::span<const int32_t> indices);
double read(const TensorView& tensor, int64_t offset);

// Whether they are those that a text was read with: as many, of these types and ranks, with elements to read.
Status check_values(const Signature& signature, const Values& values);

}  // namespace tandem::score_mod
