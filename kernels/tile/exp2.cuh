// 2^x for scores x = scale * score - row_max, two at a time: on the exponential unit, which takes 16 a clock and SM, or
// on the FMA units, which have room beside it (FlashAttention-4, "software emulation of the exponential").
#pragma once
#include "ptx/float2.cuh"
#include "ptx/warp.cuh"

// From scores to powers of two; positive.
struct ScoreScale {
  float value, inverse;

  TANDEM_DEVICE explicit ScoreScale(float f) : value(f), inverse(__fdividef(1.0f, f)) {
    asm volatile("" : "+f"(value), "+f"(inverse));  // registers, instead of a load in every step
  }
};

// What a row's exponentials are taken against.
struct Exponents {
  Float2 scale, minus_max;
  Float2 floor_bias;      // kRound - floor(row_max): what is added to a float below it loses its fraction
  Float2 coefficient[4];  // of the polynomial, by rising power, times 2^(floor(row_max) - row_max)
  float lowest;           // scores below it count as this one: about 2^-125

  // Floats of this size are integers, and their low bits are those of the integer.
  static constexpr float kRound = 0x1.8p23f;

  TANDEM_DEVICE Exponents(const ScoreScale& s, float row_max)
      : scale(float2_of(s.value)), minus_max(float2_of(-row_max)), lowest((row_max - 125) * s.inverse) {
    const float whole = floorf(row_max), rest = exp2_approx(whole - row_max);
    floor_bias = float2_of(kRound - whole);
    constexpr float polynomial[4] = {1.0f, 0x1.63e66ap-1f, 0x1.d236c6p-3f, 0x1.3babb0p-4f};  // 0.6951, 0.2276, 0.0771
#pragma unroll
    for (int n = 0; n < 4; ++n) coefficient[n] = float2_of(polynomial[n] * rest);
  }

  // Does nothing, but the compiler does not know that sums of exponentials have no sign (one that has, by a score far
  // above row_max, is of a tile that is done again): it cannot move what uses this to where the sum is not known yet.
  TANDEM_DEVICE void use_after(Float2 sum) {
    float even, odd, x, y;
    split(sum, &even, &odd);
    split(scale, &x, &y);
    const int zero = __float_as_int(even) >> 31;
    scale = float2_of(__int_as_float(__float_as_int(x) + zero));
    lowest = __int_as_float(__float_as_int(lowest) + zero);
  }
};

// NaN stays NaN.
TANDEM_DEVICE Float2 exp2_mufu(Float2 scores, const Exponents& e) {
  float x, y;
  split(fma(scores, e.scale, e.minus_max), &x, &y);
  return float2_of(exp2_approx(x), exp2_approx(y));
}

// 2^x = 2^floor(x) * 2^fraction (Cody and Waite), where the first factor is added to the exponent of the second, a
// polynomial: within 8.6e-5 of it, and bfloat16 has 3.9e-3. The fraction is that of scale * score, so that floors are
// sums with whole numbers; what the row_max's own fraction makes of it is in the polynomial. NaN becomes the largest
// float: sums show it. x below -125 gives some 2^-125, not 0; from 128 on float's exponent has no room for it, and it
// gives anything: largest, where it is not null, becomes the largest score.
TANDEM_DEVICE Float2 exp2_fma(Float2 scores, const Exponents& e, float* largest) {
  float low, high;
  split(scores, &low, &high);
  low = max_or_nan(low, e.lowest);
  high = max_or_nan(high, e.lowest);
  if (largest) *largest = fmaxf(fmaxf(*largest, low), high);
  scores = float2_of(low, high);
  const Float2 whole = fma_down(scores, e.scale, e.floor_bias);        // kRound + floor(x)
  const Float2 fraction = fma(scores, e.scale, e.floor_bias - whole);  // x - floor(x)
  Float2 y = fma(fraction, e.coefficient[3], e.coefficient[2]);
  y = fma(fraction, y, e.coefficient[1]);
  y = fma(fraction, y, e.coefficient[0]);
  float n, m;
  split(whole, &n, &m);
  split(y, &low, &high);
  return float2_of(__int_as_float((__float_as_int(n) << 23) + __float_as_int(low)),
                   __int_as_float((__float_as_int(m) << 23) + __float_as_int(high)));
}
