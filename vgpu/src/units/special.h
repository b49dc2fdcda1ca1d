// Approximate functions of one CPU target, computed in float64 without contraction. The errors are far below the GPU's
// bounds and the same on every CPU. targets.cpp includes it once per target: formats.h explains the linkage.
#pragma once

#include <cstdint>

#include "vgpu/src/units/rows.h"

namespace tandem::vgpu::units {
namespace {

inline constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52: adding a number rounds it to an integer

// 2^x for |x| < 1000: x = n + r / ln 2, Taylor series of e^r, error 2^-42.
inline double exp2_of(double x) {
  const double shifted = x + kRounder;
  const double r = (x - (shifted - kRounder)) * 0.69314718055994530942;
  double p = 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return p * value((bits(shifted) + 1023) << 52);
}

// 2^x as the nearest float32. Beyond [-160, 140] the result is 0 or infinity.
inline float exp2_of(float x) {
  const float low = x < -160.0f ? -160.0f : x;
  const float clamped = low > 140.0f ? 140.0f : low;
  return x != x ? x : static_cast<float>(exp2_of(static_cast<double>(clamped)));
}
template <bool Ftz>
void ex2_approx(const float* a, float* d) {
  map(a, d, [](float x) { return output<Ftz>(exp2_of(input<Ftz>(x))); });
}

// log2(x) = e + log2(m), m in [sqrt(1/2), sqrt(2)): the series of atanh((m - 1) / (m + 1)), error 2^-50.
inline double log2_of(double x) {
  constexpr uint64_t root_half = 0x3fe6a09e667f3bcd;
  const uint64_t u = bits(x);
  const uint64_t biased = (u - root_half + (1024ull << 52)) >> 52;  // e + 1024
  const double e = value(biased | 0x4330000000000000) - 4503599627371520.0;
  const double m = value(u - ((biased - 1024) << 52));
  const double s = (m - 1.0) / (m + 1.0), t = s * s;
  double p = 1.0 / 17;
  p = p * t + 1.0 / 15;
  p = p * t + 1.0 / 13;
  p = p * t + 1.0 / 11;
  p = p * t + 1.0 / 9;
  p = p * t + 1.0 / 7;
  p = p * t + 1.0 / 5;
  p = p * t + 1.0 / 3;
  p = p * t + 1.0;
  return e + p * (s * 2.8853900817779268147);
}
template <bool Ftz>
void lg2_approx(const float* a, float* d) {
  map(a, d, [](float x) {
    x = input<Ftz>(x);
    const auto result = static_cast<float>(log2_of(static_cast<double>(x)));
    const float special = x == 0 ? value(kInfinity | kSign) : x > 0 ? x : value(kNaN);  // 0, +infinity, the rest
    return output<Ftz>(x > 0 && bits(x) < kInfinity ? result : special);
  });
}

template <bool Ftz>
void rsqrt_approx(const float* a, float* d) {
  map(a, d, [](float x) {
    x = input<Ftz>(x);
    const auto result = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
    return output<Ftz>(result);
  });
}

// Reduces by quarter turns: 4 x / 2 pi = n + f, |f| <= 1/2.
template <bool Ftz, bool Cosine>
inline float circular(float x) {
  x = input<Ftz>(x);
  const double turns = static_cast<double>(x) * 0.63661977236758134308;
  const bool large = turns > 1e15 || turns < -1e15;  // no fraction left
  const double shifted = (large ? 0.0 : turns) + kRounder;
  const double f = ((large ? 0.0 : turns) - (shifted - kRounder)) * 1.5707963267948966192;
  const uint64_t quarter = bits(shifted) + (Cosine ? 1 : 0);
  const double t = f * f;
  double s = -1.0 / 39916800;
  s = s * t + 1.0 / 362880;
  s = s * t - 1.0 / 5040;
  s = s * t + 1.0 / 120;
  s = s * t - 1.0 / 6;
  s = s * t * f + f;
  double c = 1.0 / 479001600;
  c = c * t - 1.0 / 3628800;
  c = c * t + 1.0 / 40320;
  c = c * t - 1.0 / 720;
  c = c * t + 1.0 / 24;
  c = c * t - 0.5;
  c = c * t + 1.0;
  const uint64_t u = bits((quarter & 1) != 0 ? c : s) ^ ((quarter & 2) << 62);
  const auto result = static_cast<float>(value(u));
  const float whole = (bits(x) & ~kSign) < kInfinity ? result : value(kNaN);
  // The sum with kRounder loses the sign of zero, and multiplication loses the last bits of the smallest numbers.
  return output<Ftz>(!Cosine && (bits(x) & ~kSign) < 0x20000000 ? x : whole);
}
template <bool Ftz>
void sin_approx(const float* a, float* d) {
  map(a, d, [](float x) { return circular<Ftz, false>(x); });
}
template <bool Ftz>
void cos_approx(const float* a, float* d) {
  map(a, d, [](float x) { return circular<Ftz, true>(x); });
}

// tanh = 1 - 2 / (e^2x + 1). Near zero the difference loses digits, so that x - x^3 / 3 is used.
inline float tanh_of(float x) {
  const float magnitude = value(bits(x) & ~kSign);
  const double m = static_cast<double>(magnitude > 20.0f ? 20.0f : magnitude);
  const double large = 1.0 - 2.0 / (exp2_of(m * 2.8853900817779268147) + 1.0);
  const double small = m - m * m * m * (1.0 / 3);
  const auto result = static_cast<float>(magnitude < 0.0005f ? small : large);
  return x != x ? x : value(bits(result) | (bits(x) & kSign));
}
inline void tanh_approx(const float* a, float* d) {
  map(a, d, [](float x) { return output<false>(tanh_of(x)); });
}

template <bool Ftz>
void rcp_approx(const float* a, float* d) {
  map(a, d, [](float x) { return output<Ftz>(static_cast<float>(1.0 / static_cast<double>(input<Ftz>(x)))); });
}
template <bool Ftz>
void sqrt_approx(const float* a, float* d) {
  map(a, d,
      [](float x) { return output<Ftz>(static_cast<float>(__builtin_sqrt(static_cast<double>(input<Ftz>(x))))); });
}
template <bool Ftz, bool Full>
void quotient(const float* a, const float* b, float* d) {
  map(a, b, d, [](float x, float y) {
    x = input<Ftz>(x), y = input<Ftz>(y);
    const auto result = static_cast<float>(static_cast<double>(x) / static_cast<double>(y));
    if constexpr (Full) return output<Ftz>(result);
    // x * (1 / y). The reciprocal of a divisor above 2^126 is flushed to zero.
    const uint32_t divisor = bits(y) & ~kSign;
    const float zero = x * value(bits(y) & kSign);
    return output<Ftz>(divisor > 0x7e800000 && divisor < kInfinity ? zero : result);
  });
}

}  // namespace
}  // namespace tandem::vgpu::units
