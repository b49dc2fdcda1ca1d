// When an online softmax moves what its exponentials are taken against (row_max), and when that came too late.
#pragma once
#include "ptx/warp.cuh"

// A score may pass row_max by this much, in log2 units, before everything is rescaled to it (conditional rescaling,
// FlashAttention-4).
constexpr float kRescaleThreshold = 8;
// What the exponentials of a row are taken against, whose largest score so far is this one. float16 loses digits below
// 2^-14: against 7 less, probabilities use its range up to 2^15, and small ones keep 7 digits more. Not where a float
// of this size cannot tell 7 less. bfloat16 has float's range.
template <bool f16>
TANDEM_DEVICE float row_max_of(float largest) {
  return f16 && fabsf(largest) < 0x1p20f ? largest - 7 : largest;
}
// lazy_max: a step whose sum is more than this, and more than so many times that of all before, may be one key with all
// the weight of its row.
constexpr float kOutgrownSum = 0x1p12f;
// Where a step's sum is beyond this one row_max moves, which nobody had looked for.
// Scores of deviation 10 grow by about as much from a row's first keys to its last.
constexpr float kMovingSum = 0x1p24f;
// Beyond this one what came before may be lost, and the tile is done again with every maximum taken (strict).
constexpr float kOverflowedSum = 0x1p100f;

// At the end of a row: the sum becomes the one that its result is divided by, which is of exponentials as they were
// rounded, and the row_max makes up for it, so that both together mean the same log-sum-exp.
TANDEM_DEVICE void use_rounded_sum(float* sum, float* row_max, float rounding) {
  const float rounded = *sum + rounding;
  *row_max += log2_approx(__fdividef(*sum, rounded));
  *sum = rounded;
}
