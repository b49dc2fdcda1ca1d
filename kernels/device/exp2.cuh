// 2^x for scores x = scale * score - row_max, two at a time. The exponential unit computes 16 per clock and SM; the FMA
// units compute some of them in parallel (FlashAttention-4, "software emulation of the exponential").
#pragma once
#include "ptx/float2.cuh"
#include "ptx/warp.cuh"

// The factor from scores to exponents of two; positive.
struct ScoreScale {
  float value, inverse;

  TANDEM_DEVICE explicit ScoreScale(float f) : value(f), inverse(__fdividef(1.0f, f)) {
    asm volatile("" : "+f"(value), "+f"(inverse));  // kept in registers instead of a load per iteration
  }
};

// The parameters of a row's exponentials.
struct Exponents {
  Float2 scale, minus_max;
  Float2 floor_bias;      // kRound - floor(row_max); added to round down
  Float2 coefficient[4];  // polynomial coefficients times 2^(floor - row_max)
  float lowest;           // lower bound of scores, about 2^-125

  // Floats of this magnitude are integers, and their low bits equal the integer's low bits.
  static constexpr float kRound = 0x1.8p23f;

  TANDEM_DEVICE Exponents(const ScoreScale& s, float row_max)
      : scale(float2_of(s.value)), minus_max(float2_of(-row_max)), lowest((row_max - 125) * s.inverse) {
    const float whole = floorf(row_max), rest = exp2_approx(whole - row_max);
    floor_bias = float2_of(kRound - whole);
    constexpr float polynomial[4] = {1.0f, 0x1.63e66ap-1f, 0x1.d236c6p-3f, 0x1.3babb0p-4f};  // 0.6951, 0.2276, 0.0771
#pragma unroll
    for (int n = 0; n < 4; ++n) coefficient[n] = float2_of(polynomial[n] * rest);
  }

  // Emits no work, but the compiler cannot know that the sign of a sum of exponentials is 0. The compiler therefore
  // cannot move a use of the result before the sum is complete. A negative sum occurs only in a tile that is repeated.
  TANDEM_DEVICE void use_after(Float2 sum) {
    float even, odd, x, y;
    split(sum, &even, &odd);
    split(scale, &x, &y);
    const int zero = __float_as_int(even) >> 31;
    scale = float2_of(__int_as_float(__float_as_int(x) + zero));
    lowest = __int_as_float(__float_as_int(lowest) + zero);
  }
};

// Maps NaN to NaN.
TANDEM_DEVICE Float2 exp2_mufu(Float2 scores, const Exponents& e) {
  float x, y;
  split(fma(scores, e.scale, e.minus_max), &x, &y);
  return float2_of(exp2_approx(x), exp2_approx(y));
}

// 2^x = 2^floor(x) * 2^fraction (Cody and Waite), by a polynomial within 8.6e-5; bfloat16 has 3.9e-3. The polynomial
// contains the fraction of row_max. NaN becomes the largest float. x below -125 gives about 2^-125. From 128 on the
// result is undefined, and *largest (if not null) reports the score.
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
