// Conversions of rows, and arithmetic on pairs of 16-bit numbers, of one CPU target. targets.cpp includes it once per
// target: formats.h explains the linkage.
#pragma once

#include <cstdint>

#include "vgpu/src/units/special.h"

namespace tandem::vgpu::units {
namespace {

template <Format F>
inline constexpr bool kEncodes = F != Format::f32 && F != Format::s8 && F != Format::u8 && F != Format::ue4m3;
// The number of bits between the two values of a pair.
template <Format F>
inline constexpr int kPitch = F == Format::f16 || F == Format::bf16 ? 16
                              : F == Format::e2m1                   ? 4
                                                                    : 8;

inline void encode_row(Format format, Fit fit, const float* a, uint32_t* d) {
  const FitMasks masks = masks_of(fit);
  with_format(format, [&](auto f) {
    constexpr Format F = decltype(f)::format;
    if constexpr (kEncodes<F>)
      for (int i = 0; i < kLanes; ++i) d[i] = encode_one<F>(a[i], masks);
  });
}
inline void decode_row(Format format, const uint32_t* a, float* d) {
  with_format(format, [&](auto f) {
    for (int i = 0; i < kLanes; ++i) d[i] = decode_one<decltype(f)::format>(a[i]);
  });
}
inline void encode_pair(Format format, Fit fit, const float* high, const float* low, uint32_t* d) {
  const FitMasks masks = masks_of(fit);
  with_format(format, [&](auto f) {
    constexpr Format F = decltype(f)::format;
    if constexpr (kEncodes<F>) {
      uint32_t result[kLanes];
      for (int i = 0; i < kLanes; ++i)
        result[i] = encode_one<F>(high[i], masks) << kPitch<F> | encode_one<F>(low[i], masks);
      for (int i = 0; i < kLanes; ++i) d[i] = result[i];
    }
  });
}
inline void decode_pair(Format format, const uint32_t* a, float* high, float* low) {
  with_format(format, [&](auto f) {
    constexpr Format F = decltype(f)::format;
    constexpr uint32_t mask = (1u << kPitch<F>)-1;
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t x = a[i];
      high[i] = decode_one<F>(x >> kPitch<F> & mask);
      low[i] = decode_one<F>(x & mask);
    }
  });
}

// ---- Pairs ----
template <Format F>
inline float half_input(uint32_t x, uint32_t flush) {
  constexpr uint32_t exponent = F == Format::f16 ? 0x7c00 : 0x7f80;
  return decode_one<F>(x & ~(flush & mask((x & exponent) == 0) & 0x7fff));
}
template <Format F>
inline uint32_t half_output(float x, const FitMasks& fit, uint32_t flush, uint32_t saturates) {
  // Values from this limit on round to a normal number.
  const float limit = F == Format::f16 ? 0x1.ffep-15f : 0x1.ffp-127f;
  uint32_t u = encode_one<F>(x, fit);
  u &= ~(flush & mask((x < 0 ? -x : x) < limit) & 0x7fff);
  constexpr uint32_t one = F == Format::f16 ? 0x3c00 : 0x3f80;
  return pick(saturates, mask(x > 0) & pick(u > one, one, u), u);
}

// Computes d = f(a, b, c) of each half. f returns a float that is rounded to odd, or exact.
template <class F>
inline void each_half(const Rows::Half& half, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d,
                      F f) {
  const FitMasks fit = masks_of({Rounding::rn, false, half.relu, false});
  const uint32_t flush = mask(half.ftz), saturates = mask(half.saturate);
  const auto loop = [&](auto format) {
    constexpr Format H = decltype(format)::format;
    uint32_t result[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const float high =
          f(half_input<H>(a[i] >> 16, flush), half_input<H>(b[i] >> 16, flush), half_input<H>(c[i] >> 16, flush));
      const float low = f(half_input<H>(a[i] & 0xffff, flush), half_input<H>(b[i] & 0xffff, flush),
                          half_input<H>(c[i] & 0xffff, flush));
      result[i] = half_output<H>(high, fit, flush, saturates) << 16 | half_output<H>(low, fit, flush, saturates);
    }
    for (int i = 0; i < kLanes; ++i) d[i] = result[i];
  };
  if (half.format == Format::f16) {
    loop(FormatConstant<Format::f16>());
  } else {
    loop(FormatConstant<Format::bf16>());
  }
}

inline void add_pair(Rows::Half half, const uint32_t* a, const uint32_t* b, uint32_t* d) {
  each_half(half, a, b, b, d, [](float x, float y, float) {
    return narrow_to_odd(add_to_odd(static_cast<double>(x), static_cast<double>(y)));
  });
}
inline void sub_pair(Rows::Half half, const uint32_t* a, const uint32_t* b, uint32_t* d) {
  each_half(half, a, b, b, d, [](float x, float y, float) {
    return narrow_to_odd(add_to_odd(static_cast<double>(x), -static_cast<double>(y)));
  });
}
inline void mul_pair(Rows::Half half, const uint32_t* a, const uint32_t* b, uint32_t* d) {
  each_half(half, a, b, b, d,
            [](float x, float y, float) { return narrow_to_odd(static_cast<double>(x) * static_cast<double>(y)); });
}
inline void fma_pair(Rows::Half half, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d) {
  each_half(half, a, b, c, d, [](float x, float y, float z) {
    return narrow_to_odd(add_to_odd(static_cast<double>(x) * static_cast<double>(y), static_cast<double>(z)));
  });
}
template <bool Max>
void choose_pair(Rows::Half half, bool propagate, const uint32_t* a, const uint32_t* b, uint32_t* d) {
  if (propagate) {
    each_half(half, a, b, b, d, [](float x, float y, float) { return chosen<Max, true>(x, y); });
  } else {
    each_half(half, a, b, b, d, [](float x, float y, float) { return chosen<Max, false>(x, y); });
  }
}
inline void ex2_pair(Rows::Half half, const uint32_t* a, uint32_t* d) {
  each_half(half, a, a, a, d, [](float x, float, float) { return exp2_of(x); });
}
inline void tanh_pair(Rows::Half half, const uint32_t* a, uint32_t* d) {
  each_half(half, a, a, a, d, [](float x, float, float) { return tanh_of(x); });
}

}  // namespace
}  // namespace tandem::vgpu::units
