// Online softmax with one whole row per thread.
#pragma once
#include "device/exp2.cuh"
#include "device/rescale.cuh"

template <bool f16>
struct RowSoftmax {
  // The reference of the exponentials: row_max_of(scale * largest score), or up to 8 less. The limit is 0 before the
  // first visible key.
  float row_max = 0;
  float rescale_above = -kInfinity;  // scores above this limit move row_max
  Float2 sum = float2_of(0);         // sums of even and odd columns
  float step_sum = 0;                // sum of the last iteration, if no maximum was computed
  float rounding = 0;                // divisor minus sum: see add_rounding()
  float alpha;                       // factor of earlier sums and results, if rescale
  bool rescale;                      // warp-uniform

  // Moves row_max before an iteration's exponentials if a score exceeds it by more than 8. The result stays exact,
  // because the last iteration divides by the same sum. Most iterations skip the rescale (conditional rescaling,
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

  // lazy_max: adds an iteration's sum to the total. bfloat16 has float's range, so that a small row_max costs nothing
  // until sums approach the end of it.
  TANDEM_DEVICE void add_step(Float2 step) {
    step_sum = total_of(step);
    sum = sum + step;
  }
  // Returns true if in some row of the warp the iteration may be one key with all the weight. The first condition
  // compares with a constant.
  TANDEM_DEVICE bool jumped() const { return __any_sync(~0u, step_sum > kOutgrownSum) && __any_sync(~0u, jumps()); }
  // A key with all the weight must contribute its exact value: the divisor is then the sum of probabilities as rounded
  // for the product.
  TANDEM_DEVICE void add_rounding(float rounded) {
    if (jumps()) rounding += rounded - step_sum;
  }
  // Returns true if the row_max of some row of the warp must move before the next iteration.
  TANDEM_DEVICE bool outgrown() const { return __any_sync(~0u, step_sum > kMovingSum); }
  // Moves an outgrown row_max before the next iteration, by the power of two that the sum has grown by. Returns true if
  // earlier sums may be lost.
  TANDEM_DEVICE bool catch_up(const ScoreScale& scale) {
    const float from = row_max;
    if (step_sum > kMovingSum) {
      row_max += static_cast<float>((__float_as_int(step_sum) >> 23) - 127);  // exponent of the sum
      rescale_above = (row_max + kRescaleThreshold) * scale.inverse;
    }
    rescale_sum(from);
    return step_sum > kOverflowedSum;
  }
  // Returns true if the exponential of a score is beyond float's range or close to it.
  TANDEM_DEVICE bool overflows(float score, const ScoreScale& scale) const {
    return (score - rescale_above) * scale.value > 126 - kRescaleThreshold;
  }
  TANDEM_DEVICE bool overflowed() const {
    return !(total() <= kOverflowedSum);
  }  // also true for NaN, which rescale_sum() may produce

  // Returns the sum after the last iteration. If every maximum was computed, a sum is 0 or at least 1/2, and below
  // kOverflowedSum. Other sums stand for a NaN (exp2_fma) or for scores of -infinity only.
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
  // Returns true if the iteration's sum is a large multiple of all earlier sums.
  TANDEM_DEVICE bool jumps() const { return step_sum > kOutgrownSum * fmaxf(total() - step_sum, 1); }
  // Rescales the sum from row_max `from` to the current row_max.
  TANDEM_DEVICE void rescale_sum(float from) {
    alpha = exp2_approx(from - row_max);
    sum = overflowed() ? float2_of(kNan) : sum * float2_of(alpha);
    rounding *= alpha;
  }
};
