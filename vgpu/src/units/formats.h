// Number formats as bit patterns: conversions of a value to float32 and back, without branches, so that loops over rows
// vectorise. The code of every CPU target includes it. Nothing here has external linkage, because the linker could
// merge code with wide instructions into common code.
#pragma once

#include <cstdint>

#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {
namespace {

inline constexpr uint32_t kNaN = 0x7fffffff;
inline constexpr uint32_t kInfinity = 0x7f800000;
inline constexpr uint32_t kSign = 0x80000000;
inline constexpr uint32_t kTf32 = 0xffffe000;  // the bits of a float32 that tf32 has

inline uint32_t bits(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float value(uint32_t x) { return __builtin_bit_cast(float, x); }
inline uint64_t bits(double x) { return __builtin_bit_cast(uint64_t, x); }
inline double value(uint64_t x) { return __builtin_bit_cast(double, x); }

// Selects by masks (all bits or none), because compilers often turn conditions into branches, and loops with branches
// do not vectorise.
inline uint32_t mask(bool on) { return 0u - static_cast<uint32_t>(on); }
inline uint32_t pick(uint32_t chosen, uint32_t yes, uint32_t no) { return (yes & chosen) | (no & ~chosen); }
inline uint32_t pick(bool chosen, uint32_t yes, uint32_t no) { return pick(mask(chosen), yes, no); }

// Flushes subnormal numbers to zero of their sign, and replaces NaN by the GPU's NaN.
inline uint32_t flushed(uint32_t x) { return x & (kSign | mask((x & kInfinity) != 0)); }
inline uint32_t canonical(uint32_t x) { return pick((x & ~kSign) > kInfinity, kNaN, x); }

// Sign, exponent and mantissa of a format like IEEE's. max: the largest finite magnitude. nan: the result for NaN (the
// largest magnitude if the format has no NaN).
struct Shape {
  int exponent, mantissa, bias;
  bool has_infinity;
  uint32_t max, nan;
};
template <Format F>
constexpr Shape shape_of() {
  switch (F) {
    case Format::f16: return {5, 10, 15, true, 0x7bff, 0x7fff};
    case Format::bf16: return {8, 7, 127, true, 0x7f7f, 0x7fff};
    case Format::tf32: return {8, 10, 127, true, 0x3fbff, 0x3ffff};
    case Format::e5m2: return {5, 2, 15, true, 0x7b, 0x7f};
    case Format::e2m3: return {2, 3, 1, false, 0x1f, 0x1f};
    case Format::e3m2: return {3, 2, 3, false, 0x1f, 0x1f};
    case Format::e2m1: return {2, 1, 1, false, 0x7, 0x7};
    default: return {4, 3, 7, false, 0x7e, 0x7f};  // e4m3, ue4m3
  }
}

// A Fit as masks, all bits or none.
struct FitMasks {
  uint32_t even, away, up, down, saturate, relu, ftz;
};
inline FitMasks masks_of(const Fit& fit) {
  return {mask(fit.rounding == Rounding::rn),
          mask(fit.rounding == Rounding::rna),
          mask(fit.rounding == Rounding::rp),
          mask(fit.rounding == Rounding::rm),
          mask(fit.saturate_finite),
          mask(fit.relu),
          mask(fit.ftz)};
}

// The magnitude of a float32, aligned to a format: kept bits are significand >> dropped.
struct Aligned {
  uint32_t significand, dropped;
};
template <Format F>
inline Aligned align(uint32_t magnitude) {
  constexpr Shape s = shape_of<F>();
  if constexpr (s.exponent == 8) return {magnitude, 23 - s.mantissa};
  const uint32_t biased = magnitude >> 23;
  const auto exponent = static_cast<int32_t>(biased == 0 ? 1 : biased) - 127 + s.bias;
  const uint32_t significand = (magnitude & 0x7fffff) | (biased == 0 ? 0u : 0x800000u);
  // Below the format's smallest normal number more bits are lost. Beyond 26 lost bits all count as sticky.
  const int32_t lost = 23 - s.mantissa + (exponent < 1 ? 1 - exponent : 0);
  const auto above = static_cast<uint32_t>(exponent < 1 ? 0 : exponent - 1);
  return {significand + (above << 23), static_cast<uint32_t>(lost > 26 ? 26 : lost)};
}

// kept: the rounded magnitude before it is bounded.
template <Format F>
inline uint32_t finish(uint32_t kept, uint32_t magnitude, uint32_t negative, uint32_t outward, const FitMasks& fit) {
  constexpr Shape s = shape_of<F>();
  constexpr uint32_t infinity = s.max + 1;
  constexpr bool saturates =
      !s.has_infinity || s.exponent + s.mantissa < 15;  // .satfinite is mandatory for these formats
  const uint32_t overflows = mask(!saturates) & ~fit.saturate & (outward | mask(magnitude == kInfinity));
  uint32_t result = pick(kept > s.max, pick(overflows, infinity, s.max), kept);
  result |= negative & (1u << (s.exponent + s.mantissa));
  result &= ~(negative & fit.relu);
  if constexpr (F == Format::tf32) {
    // .rna is no instruction: the assembler adds to the bits and truncates. NaN is only truncated; .satfinite subtracts
    // one.
    const uint32_t cut = ((magnitude | (negative & kSign)) & kTf32) - (fit.saturate & (1u << 13));
    return pick(magnitude > kInfinity, pick(fit.away, cut, kNaN & kTf32), result << 13);
  }
  return pick(magnitude > kInfinity, s.nan, result);
}

// ue8m0 has no sign, no zero and no mantissa: its values are powers of two.
inline uint32_t encode_ue8m0(float x, const FitMasks& fit) {
  const uint32_t magnitude = bits(x) & ~kSign;
  const uint32_t fraction = magnitude & 0x7fffff;
  const uint32_t nearest = (fit.even | fit.away) & mask(fraction >= 0x400000);
  const uint32_t normal = (magnitude >> 23) + (((fit.up & mask(fraction != 0)) | nearest) & 1);
  const uint32_t subnormal = fit.up & mask(magnitude > 0x400000) & 1;
  const uint32_t result = pick(magnitude < 0x800000, subnormal, normal);
  return pick(magnitude > kInfinity, 0xff, pick(result > 0xfe, pick(fit.saturate, 0xfe, 0xff), result));
}

template <Format F>
inline uint32_t encode_one(float x, const FitMasks& fit) {
  if constexpr (F == Format::ue8m0) return encode_ue8m0(x, fit);
  const uint32_t negative = mask((bits(x) & kSign) != 0);
  uint32_t magnitude = bits(x) & ~kSign;
  magnitude &= ~(fit.ftz & mask(magnitude < 0x800000));
  const Aligned a = align<F>(magnitude);
  const uint32_t mask = (1u << a.dropped) - 1, half = 1u << (a.dropped - 1);
  const uint32_t outward = (fit.up & ~negative) | (fit.down & negative);
  const uint32_t odd = (a.significand >> a.dropped) & 1;
  const uint32_t add = (fit.even & (half - 1 + odd)) | (fit.away & half) | (outward & mask);
  return finish<F>((a.significand + add) >> a.dropped, magnitude, negative, outward | fit.even | fit.away, fit);
}

template <Format F>
inline float decode_one(uint32_t x) {
  if constexpr (F == Format::f32) return value(x);
  if constexpr (F == Format::tf32) return value(x & kTf32);
  if constexpr (F == Format::bf16) return value(x << 16);
  if constexpr (F == Format::s8) return static_cast<float>(static_cast<int8_t>(x));
  if constexpr (F == Format::u8) return static_cast<float>(x & 0xff);
  if constexpr (F == Format::ue8m0) {
    const uint32_t e = x & 0xff;
    return value(pick(e == 0, 0x00400000, pick(e == 0xff, kNaN, e << 23)));
  }
  constexpr Shape s = shape_of<F>();
  constexpr uint32_t sign = F == Format::ue4m3 ? 0 : 1u << (s.exponent + s.mantissa);
  const uint32_t magnitude = x & ((1u << (s.exponent + s.mantissa)) - 1);
  // The value is built as a float32 with the narrow exponent, then scaled, which is exact for subnormal numbers too.
  const float scaled = value(magnitude << (23 - s.mantissa)) * value(static_cast<uint32_t>(254 - s.bias) << 23);
  uint32_t result = bits(scaled);
  if constexpr (s.has_infinity) result |= mask(magnitude > s.max) & kInfinity;
  if constexpr (F == Format::e4m3 || F == Format::ue4m3) result |= mask(magnitude == s.nan) & kNaN;
  return value(result | (mask((x & sign) != 0) & kSign));
}

// Calls f(constant), where the constant is a type like std::integral_constant of the format.
template <Format F>
struct FormatConstant {
  static constexpr Format format = F;
};
template <class Function>
inline auto with_format(Format format, Function&& f) {
  switch (format) {
    case Format::f32: return f(FormatConstant<Format::f32>());
    case Format::tf32: return f(FormatConstant<Format::tf32>());
    case Format::f16: return f(FormatConstant<Format::f16>());
    case Format::bf16: return f(FormatConstant<Format::bf16>());
    case Format::e4m3: return f(FormatConstant<Format::e4m3>());
    case Format::e5m2: return f(FormatConstant<Format::e5m2>());
    case Format::e2m3: return f(FormatConstant<Format::e2m3>());
    case Format::e3m2: return f(FormatConstant<Format::e3m2>());
    case Format::e2m1: return f(FormatConstant<Format::e2m1>());
    case Format::ue8m0: return f(FormatConstant<Format::ue8m0>());
    case Format::ue4m3: return f(FormatConstant<Format::ue4m3>());
    case Format::s8: return f(FormatConstant<Format::s8>());
    case Format::u8: break;
  }
  return f(FormatConstant<Format::u8>());
}

}  // namespace
}  // namespace tandem::vgpu::units
