// Online softmax where a thread has a row, all of it.
#pragma once
#include "tile/exp2.cuh"
#include "tile/rescale.cuh"

template <bool f16>
struct RowSoftmax {
  // What the exponentials are taken against: row_max_of(scale times the largest score), or up to 8 less; 0 before
  // anything is seen.
  float row_max = 0;
  float rescale_above = -kInfinity;  // scores beyond it move the row_max
  Float2 sum = float2_of(0);         // of even and odd columns
  float step_sum = 0;                // of the last step, where it did not look for its largest score
  float rounding = 0;                // how much more the sum is that the result is divided by: see add_rounding()
  float alpha;                       // by which earlier sums and results shrink, where rescale
  bool rescale;                      // the same in the whole warp

  // Of a step, before its exponentials: moves the row_max of a row that outgrows it by more than 8. The result stays
  // exact, since the last step divides by the same sum, and most steps leave it alone (conditional rescaling,
  // FlashAttention-4).
  TANDEM_DEVICE void update_max(float largest, const ScoreScale& scale) {
    rescale = __any_sync(~0u, largest > rescale_above);
    if (!rescale) return;
    const float from = rescale_above == -kInfinity ? -kInfinity : row_max;
    if (largest > rescale_above) {
      row_max = row_max_of<f16>(largest * scale.value);
      rescale_above = largest + kRescaleThreshold * scale.inverse;
    }
    rescale_sum(from);
  }

  // lazy_max: takes a step's sum into that of all. bfloat16 has float's range, so a row_max that is too small costs
  // nothing until sums come near the end of it.
  TANDEM_DEVICE void add_step(Float2 step) {
    step_sum = total_of(step);
    sum = sum + step;
  }
  // Of a row of the warp: the step may be one key with all the weight. The first question is a constant's.
  TANDEM_DEVICE bool jumped() const { return __any_sync(~0u, step_sum > kOutgrownSum) && __any_sync(~0u, jumps()); }
  // Then that key must give its own value: the result is divided by the sum of probabilities as they were rounded for
  // the product.
  TANDEM_DEVICE void add_rounding(float rounded) {
    if (jumps()) rounding += rounded - step_sum;
  }
  // Of a row of the warp: the row_max must move before the next step.
  TANDEM_DEVICE bool outgrown() const { return __any_sync(~0u, step_sum > kMovingSum); }
  // Where outgrown, before the next step: the row_max moves by the power of two that the sum has grown by. True: what
  // came before may be lost.
  TANDEM_DEVICE bool catch_up(const ScoreScale& scale) {
    const float from = row_max;
    if (step_sum > kMovingSum) {
      row_max += static_cast<float>((__float_as_int(step_sum) >> 23) - 127);  // its exponent
      rescale_above = (row_max + kRescaleThreshold) * scale.inverse;
    }
    rescale_sum(from);
    return step_sum > kOverflowedSum;
  }
  // Whether the exponential of a score is beyond float's range, or about to be.
  TANDEM_DEVICE bool overflows(float score, const ScoreScale& scale) const {
    return (score - rescale_above) * scale.value > 126 - kRescaleThreshold;
  }
  TANDEM_DEVICE bool overflowed() const {
    return !(total() <= kOverflowedSum);
  }  // NaN, too: rescale_sum() may have met an overflowed sum

  // After the last step. Where every score was looked at, a sum is 0 or at least 1/2, and below kOverflowedSum: the
  // rest stands for a NaN (exp2_fma) or for scores of -infinity alone.
  TANDEM_DEVICE float final_sum() {
    float all = total();
    if (rounding != 0) use_rounded_sum(&all, &row_max, rounding);
    return all > kOverflowedSum ? kNan : all < 0x1p-60f ? 0.0f : all;
  }

 private:
  static constexpr float kNan = __builtin_bit_cast(float, 0x7fffffffu);

  TANDEM_DEVICE static float total_of(Float2 x) {
    float even, odd;
    split(x, &even, &odd);
    return even + odd;
  }
  TANDEM_DEVICE float total() const { return total_of(sum); }
  // The step has many times the sum of all before.
  TANDEM_DEVICE bool jumps() const { return step_sum > kOutgrownSum * fmaxf(total() - step_sum, 1); }
  // What was summed against row_max `from` is brought to the row_max of now.
  TANDEM_DEVICE void rescale_sum(float from) {
    alpha = exp2_approx(from - row_max);
    sum = overflowed() ? float2_of(kNan) : sum * float2_of(alpha);
    rounding *= alpha;
  }
};
