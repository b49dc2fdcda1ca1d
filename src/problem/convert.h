// Converts numbers of every dtype to and from float64. Each is rounded once, to nearest, ties to even. The code is
// simple rather than fast. The reference, tools and tests use it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "problem/problem.h"

namespace tandem {

// Returns 2^exponent for an exponent from -1022 to 1023.
inline double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52); }

// 16-bit binary formats differ only in their fraction bits: float16 has 10, and bfloat16 has 7.
template <int kFractionBits>
uint16_t narrow(double x) {
  constexpr int bias = (1 << (14 - kFractionBits)) - 1;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const auto sign = static_cast<uint32_t>(bits >> 48 & 0x8000);
  constexpr uint32_t infinity = uint32_t{2 * bias + 1} << kFractionBits;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity | 1u << (kFractionBits - 1));
  // Subnormals share the least exponent, and therefore its step.
  const int exponent = std::max(static_cast<int>(bits >> 52 & 0x7ff) - 1023, 1 - bias);
  if (exponent > bias) return static_cast<uint16_t>(sign | infinity);
  // Adding 2^52 rounds a smaller number to an integer.
  const double steps = std::fabs(x) * power_of_two(kFractionBits - exponent) + 0x1p52 - 0x1p52;
  // A normal number counts its leading bit in steps, which adds one to the exponent field. A carry adds one more, up to
  // infinity.
  const uint32_t magnitude =
      (static_cast<uint32_t>(exponent + bias - 1) << kFractionBits) + static_cast<uint32_t>(steps);
  return static_cast<uint16_t>(sign | magnitude);
}

template <int kFractionBits>
double widen(uint16_t bits) {
  constexpr int bias = (1 << (14 - kFractionBits)) - 1;
  constexpr int infinity = (2 * bias + 1) << kFractionBits;
  const int magnitude = bits & 0x7fff;
  double x;
  if (magnitude >= infinity) {
    x = magnitude > infinity ? NAN : INFINITY;
  } else if (magnitude < 1 << kFractionBits) {  // zero or subnormal
    x = magnitude * power_of_two(1 - bias - kFractionBits);
  } else {
    x = std::bit_cast<double>((static_cast<uint64_t>(magnitude) << (52 - kFractionBits)) +
                              (static_cast<uint64_t>(1023 - bias) << 52));
  }
  return std::bit_cast<double>(std::bit_cast<uint64_t>(x) | static_cast<uint64_t>(bits & 0x8000) << 48);
}

template <class T>
T read_as(const std::byte* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

inline double load(DType type, const std::byte* at) {
  switch (type) {
    case DType::f64: return read_as<double>(at);
    case DType::f32: return read_as<float>(at);
    case DType::bf16: return widen<7>(read_as<uint16_t>(at));
    case DType::f16: return widen<10>(read_as<uint16_t>(at));
    case DType::boolean: return read_as<uint8_t>(at) != 0;
    case DType::i32: return read_as<int32_t>(at);
    case DType::i64: return static_cast<double>(read_as<int64_t>(at));
  }
  return 0;
}

template <class T>
void write_as(std::byte* at, T x) {
  std::memcpy(at, &x, sizeof x);
}

inline void store(DType type, std::byte* at, double x) {
  switch (type) {
    case DType::f64: return write_as(at, x);
    case DType::f32: return write_as(at, static_cast<float>(x));
    case DType::bf16: return write_as(at, narrow<7>(x));
    case DType::f16: return write_as(at, narrow<10>(x));
    case DType::boolean: return write_as(at, static_cast<uint8_t>(x != 0));
    case DType::i32: return write_as(at, static_cast<int32_t>(x));
    case DType::i64: return write_as(at, static_cast<int64_t>(x));
  }
}

}  // namespace tandem
