// Online softmax where a thread has a row, all of it.
#pragma once
#include "tile/exp2.cuh"

struct RowSoftmax {
  // What the exponentials are taken against: scale times the largest score, or up to 8 less; 0 before anything is seen.
  float shift = 0;
  float limit = -kInfinity;  // scores beyond it move the shift
  Pair sum = pair_of(0);     // of even and odd columns
  float factor;              // by which earlier sums and results shrink, where rescale
  bool rescale;              // the same in the whole warp

  // Of a step, before its exponentials: moves the shift of a row that outgrows it by more than 8. The result stays
  // exact, since the last step divides by the same sum, and most steps leave it alone (conditional rescaling,
  // FlashAttention-4).
  TANDEM_DEVICE void look_at_scores(float largest, const ScoreScale& scale) {
    rescale = __any_sync(~0u, largest > limit);
    if (!rescale) return;
    const float from = limit == -kInfinity ? -kInfinity : shift;
    if (largest > limit) {
      shift = largest * scale.factor;
      limit = largest + kThreshold * scale.inverse;
    }
    shrink(from);
  }

  // The same by what the sums have become, for rows that have seen a key, without a look at the scores: bfloat16 has
  // float's range, so a shift that is too small costs nothing until sums come near the end of it.
  TANDEM_DEVICE void look_at_sums() { rescale = __any_sync(~0u, total() > kLarge); }
  // Where rescale. True: this row's sum has come near the end, by scores so much larger than all before that the result
  // cannot be trusted.
  TANDEM_DEVICE bool move_by_sums(const ScoreScale& scale) {
    const float all = total(), from = shift;
    if (all > kLarge) {
      shift += static_cast<float>((__float_as_int(all) >> 23) - 127);  // its exponent
      limit = (shift + kThreshold) * scale.inverse;
    }
    shrink(from);
    return all > kLost;
  }
  // Whether the exponential of a score is beyond float's range, or about to be.
  TANDEM_DEVICE bool outgrown_by(float score, const ScoreScale& scale) const {
    return (score - limit) * scale.factor > 126 - kThreshold;
  }
  TANDEM_DEVICE bool lost() const { return !(total() <= kLost); }  // NaN, too: shrink() may have met a lost sum

  // After the last step. Where every score was looked at, a sum is 0 or at least 1/2, and below kLost: the rest stands
  // for a NaN (exp2_of_fma_units) or for scores of -infinity alone.
  TANDEM_DEVICE float final_sum() const {
    const float all = total();
    return all > kLost ? kNan : all < 0x1p-60f ? 0.0f : all;
  }

 private:
  static constexpr float kThreshold = 8, kLarge = 0x1p16f, kLost = 0x1p64f;
  static constexpr float kNan = __builtin_bit_cast(float, 0x7fffffffu);

  TANDEM_DEVICE float total() const {
    float even, odd;
    split(sum, &even, &odd);
    return even + odd;
  }
  // What was summed against shift `from` is brought to the shift of now.
  TANDEM_DEVICE void shrink(float from) {
    factor = exp2_approx(from - shift);
    sum = lost() ? pair_of(kNan) : sum * pair_of(factor);
  }
};
