#include "score_mod/values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/text.h"
#include "score_mod/arithmetic.h"
#include "score_mod/lexer.h"
#include "score_mod/parser.h"

namespace tandem::score_mod {
namespace {

template <class T>
T read_as(const TensorView& tensor, int64_t offset) {
  T value;
  std::memcpy(&value, tensor.data + offset * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

double widen_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(fraction + 1024, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

Status check_tensor(const Name& name, const TensorView& tensor) {
  if (type_of(tensor.element) != name.type || tensor.rank != name.rank) {
    return Status::invalid(str_cat(quote(name.name), " must be ", name_of(name.type), " of ", name.rank,
                                   " dimensions, not ", name_of(type_of(tensor.element)), " of ", tensor.rank,
                                   ": convert or reshape the tensor"));
  }
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.size[i] < 1) {
      return Status::invalid(str_cat(quote(name.name), " has no elements (dimension ", i, " is ", tensor.size[i],
                                     ") and must have one: pass a tensor with elements"));
    }
  }
  return {};
}

}  // namespace

int64_t offset_of(const TensorView& tensor, std::span<const int32_t> indices) {
  int64_t offset = 0;
  for (size_t i = 0; i < indices.size(); ++i) offset += clamp_index(indices[i], tensor.size[i]) * tensor.stride[i];
  return offset;
}

double read(const TensorView& tensor, int64_t offset) {
  switch (tensor.element) {
    case Element::f64: return read_as<double>(tensor, offset);
    case Element::f32: return read_as<float>(tensor, offset);
    case Element::bf16: return std::bit_cast<float>(static_cast<uint32_t>(read_as<uint16_t>(tensor, offset)) << 16);
    case Element::f16: return widen_half(read_as<uint16_t>(tensor, offset));
    case Element::i64:
      return static_cast<double>(std::clamp<int64_t>(read_as<int64_t>(tensor, offset), INT32_MIN, INT32_MAX));
    case Element::i32: return read_as<int32_t>(tensor, offset);
    case Element::boolean: return read_as<uint8_t>(tensor, offset) != 0;
  }
  return 0;
}

Status check_values(const Signature& signature, const Values& values) {
  if (values.scalars.size() != signature.scalars.size() || values.tensors.size() != signature.tensors.size()) {
    return Status::invalid(str_cat("the expression was parsed with ", signature.scalars.size(), " scalars and ",
                                   signature.tensors.size(), " tensors, and ", values.scalars.size(), " and ",
                                   values.tensors.size(), " are given: pass as many as the expression has"));
  }
  for (size_t i = 0; i < values.scalars.size(); ++i) {
    const double value = values.scalars[i];
    const bool is_int = value >= INT32_MIN && value <= INT32_MAX && value == std::trunc(value);
    if (signature.scalars[i].type == Type::real || is_int) continue;
    return Status::invalid(str_cat(quote(signature.scalars[i].name), " (", value,
                                   ") must be an integer of 32 bits: pass a smaller or rounded number"));
  }
  for (size_t i = 0; i < values.tensors.size(); ++i) TANDEM_TRY(check_tensor(signature.tensors[i], values.tensors[i]));
  return {};
}

}  // namespace tandem::score_mod
