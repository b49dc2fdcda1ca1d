// The rows of one CPU target. targets.cpp includes it once per target: formats.h explains the linkage.
#pragma once

#include <cmath>
#include <cstdint>

#include "vgpu/src/units/formats.h"
#include "vgpu/src/units/tiny.h"

namespace tandem::vgpu::units {
namespace {

// Applies f to each lane. Two loops keep the sources intact while the destination, which may be a source, is written.
template <class F>
inline void map(const float* a, float* d, F f) {
  float result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = f(a[i]);
  for (int i = 0; i < kLanes; ++i) d[i] = result[i];
}
template <class F>
inline void map(const float* a, const float* b, float* d, F f) {
  float result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = f(a[i], b[i]);
  for (int i = 0; i < kLanes; ++i) d[i] = result[i];
}
template <class F>
inline void map(const float* a, const float* b, const float* c, float* d, F f) {
  float result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = f(a[i], b[i], c[i]);
  for (int i = 0; i < kLanes; ++i) d[i] = result[i];
}

template <bool Ftz>
inline float input(float x) {
  return value(Ftz ? flushed(bits(x)) : bits(x));
}
template <bool Ftz>
inline float output(float x) {
  const uint32_t u = canonical(bits(x));
  return value(Ftz ? flushed(u) : u);
}

// ---- Exact rounding ----
// A result is computed in float64, rounded to odd (the last bit is set if bits were lost), and rounded once more to
// float32. 53 bits suffice for the same result as a single rounding.

// u: the bits of a float64. The result's magnitude is at least the exact one if shrink, else at most.
inline double to_odd(uint64_t u, bool inexact, bool shrink) {
  const uint64_t all = 0 - static_cast<uint64_t>(inexact);
  return value((((u - static_cast<uint64_t>(shrink)) | 1) & all) | (u & ~all));
}
inline double add_to_odd(double a, double b) {
  const double s = a + b, part = s - a;
  const double error = (a - (s - part)) + (b - part);
  return to_odd(bits(s), error < 0 || error > 0, ((bits(error) ^ bits(s)) >> 63) != 0);
}
// Corrects q, the quotient a / b or the root of a. Truncated to 26 bits, q has an exact product with b or itself, which
// is compared with a.
inline constexpr uint64_t kCut = (uint64_t{1} << 27) - 1;
inline double cut(double q) { return value(bits(q) & ~kCut); }
inline double correct_to_odd(double q, double product, double a) {
  const double p = product < 0 ? -product : product, m = a < 0 ? -a : a;
  // Infinite, zero and NaN results are not changed.
  const bool ordinary = bits(q) << 1 != 0 && (bits(q) & 0x7ff0000000000000) != 0x7ff0000000000000;
  const bool odd = (p < m || p > m) && ordinary;
  return to_odd(bits(cut(q)), odd, p > m);
}
inline double div_to_odd(double a, double b) {
  const double q = a / b;
  return correct_to_odd(q, cut(q) * b, a);
}
inline double sqrt_to_odd(double a) {
  const double q = __builtin_sqrt(a);
  return correct_to_odd(q, cut(q) * cut(q), a);
}

template <Rounding R>
inline float narrow(double x) {
  const auto f = static_cast<float>(x);
  const auto back = static_cast<double>(f);
  const uint32_t u = bits(f);
  const uint32_t negative = mask((u & kSign) != 0), above = mask(back > x), below = mask(back < x);
  // In the bit pattern, minus one is a step towards zero and plus one a step away from it.
  if constexpr (R == Rounding::rz) return value(u - (((above & ~negative) | (below & negative)) & 1));
  if constexpr (R == Rounding::rm) return value(u + (above & (~negative | 1)));
  if constexpr (R == Rounding::rp) return value(u + (below & (negative | 1)));
  return f;
}
// Rounds to odd in float32, too. f16 and bf16 are then rounded from it.
inline float narrow_to_odd(double x) {
  const float f = narrow<Rounding::rz>(x);
  const auto back = static_cast<double>(f);
  return value(bits(f) | (mask(back < x || back > x) & 1));
}

template <Rounding R, bool Ftz>
inline float output(double x) {
  const uint32_t u = canonical(bits(narrow<R>(x)));
  return value(Ftz ? u & (kSign | ~mask(is_tiny<R>(x))) : u);
}

// A sum of exactly zero is -0 when rounding down, unless both terms are +0.
template <Rounding R, bool Ftz>
inline float sum(double a, double b) {
  const float f = output<R, Ftz>(add_to_odd(a, b));
  if constexpr (R == Rounding::rm) {
    const auto sign = static_cast<uint32_t>((bits(a) | bits(b)) >> 32) & kSign;
    return value(bits(f) | (mask(a + b == 0) & sign));
  }
  return f;
}
template <Rounding R, bool Ftz>
inline float product_sum(float a, float b, float c) {
  return sum<R, Ftz>(static_cast<double>(a) * static_cast<double>(b), static_cast<double>(c));
}

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float fused(float a, float b, float c) { return product_sum<Rounding::rn, false>(a, b, c); }
#endif

template <Rounding R, bool Ftz>
void add(const float* a, const float* b, float* d) {
  map(a, b, d, [](float x, float y) {
    x = input<Ftz>(x), y = input<Ftz>(y);
    if constexpr (R == Rounding::rn) return output<Ftz>(x + y);
    return sum<R, Ftz>(static_cast<double>(x), static_cast<double>(y));
  });
}
// Rounds to nearest in float32, by scaling the operands up, because scaled results are far from the smallest exponent.
inline constexpr float kLift = 0x1p64f;
inline float flushed_if_tiny(float result, float lifted) {
  const float magnitude = lifted < 0 ? -lifted : lifted;
  return value(canonical(bits(result)) & (kSign | ~mask(magnitude < 0x1p-62f)));
}
template <Rounding R, bool Ftz>
void mul(const float* a, const float* b, float* d) {
  map(a, b, d, [](float x, float y) {
    x = input<Ftz>(x), y = input<Ftz>(y);
    if constexpr (R != Rounding::rn) return output<R, Ftz>(static_cast<double>(x) * static_cast<double>(y));
    return Ftz ? flushed_if_tiny(x * y, x * kLift * y) : output<false>(x * y);
  });
}
template <Rounding R, bool Ftz>
void fma(const float* a, const float* b, const float* c, float* d) {
  map(a, b, c, d, [](float x, float y, float z) {
    x = input<Ftz>(x), y = input<Ftz>(y), z = input<Ftz>(z);
    if constexpr (R != Rounding::rn) return product_sum<R, Ftz>(x, y, z);
    return Ftz ? flushed_if_tiny(fused(x, y, z), fused(x * kLift, y, z * kLift)) : output<false>(fused(x, y, z));
  });
}
template <Rounding R, bool Ftz>
void div(const float* a, const float* b, float* d) {
  map(a, b, d, [](float x, float y) {
    x = input<Ftz>(x), y = input<Ftz>(y);
    return output<R, Ftz>(div_to_odd(static_cast<double>(x), static_cast<double>(y)));
  });
}
template <Rounding R, bool Ftz>
void rcp(const float* a, float* d) {
  map(a, d, [](float x) { return output<R, Ftz>(div_to_odd(1.0, static_cast<double>(input<Ftz>(x)))); });
}
template <Rounding R, bool Ftz>
void sqrt(const float* a, float* d) {
  map(a, d, [](float x) { return output<R, Ftz>(sqrt_to_odd(static_cast<double>(input<Ftz>(x)))); });
}

inline void saturate(const float* a, float* d) {
  map(a, d, [](float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; });
}

// ---- Minimum and maximum ----
template <bool Max, bool Propagate>
inline float chosen(float x, float y) {
  const uint32_t x_nan = mask(x != x), y_nan = mask(y != y);
  // Equal numbers differ at most in the sign of zero.
  const uint32_t equal = Max ? bits(x) & bits(y) : bits(x) | bits(y);
  uint32_t u = pick(Max ? x > y : x < y, bits(x), bits(y));
  u = pick(x == y, equal, u);
  u = pick(x_nan, bits(y), pick(y_nan, bits(x), u));
  return value(pick(Propagate ? x_nan | y_nan : x_nan & y_nan, kNaN, u));
}
template <bool Max, bool Propagate, bool Ftz>
void choose(const float* a, const float* b, float* d) {
  map(a, b, d, [](float x, float y) { return chosen<Max, Propagate>(input<Ftz>(x), input<Ftz>(y)); });
}

}  // namespace
}  // namespace tandem::vgpu::units
