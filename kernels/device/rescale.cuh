// The limits of an online softmax. The limits define when the softmax moves the reference of its exponentials
// (row_max), and when that was too late.
#pragma once
#include "ptx/warp.cuh"

// A score may exceed row_max by this limit, in log2 units, before the sums are rescaled (conditional rescaling,
// FlashAttention-4).
constexpr float kRescaleThreshold = 8;
// Returns row_max for a row with this largest score. float16 loses digits below 2^-14. A reference that is 7 lower uses
// float16's range up to 2^15, and keeps 7 more digits of small probabilities. The offset is skipped if a float of this
// size cannot represent it. bfloat16 has float's range and no offset.
template <bool f16>
TANDEM_DEVICE float row_max_of(float largest) {
  return f16 && fabsf(largest) < 0x1p20f ? largest - 7 : largest;
}
// lazy_max: one key may have all the weight of its row if an iteration's sum exceeds this limit, and this multiple of
// all earlier sums.
constexpr float kOutgrownSum = 0x1p12f;
// An iteration's sum above this moves row_max without a maximum. Scores with deviation 10 grow by about this much from
// a row's first keys to its last.
constexpr float kMovingSum = 0x1p24f;
// If a sum exceeds this limit, the earlier sums may be lost. The tile is then repeated with every maximum computed
// (strict).
constexpr float kOverflowedSum = 0x1p100f;

// At the end of a row: makes the sum equal to the divisor, which is the sum of rounded exponentials. Changes row_max so
// that both together give the same log-sum-exp.
TANDEM_DEVICE void use_rounded_sum(float* sum, float* row_max, float rounding) {
  const float rounded = *sum + rounding;
  *row_max += log2_approx(__fdividef(*sum, rounded));
  *sum = rounded;
}
