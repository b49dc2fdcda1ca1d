// Online softmax over the fragments of a warpgroup: each thread has two rows, and four neighbouring lanes share them.
#pragma once
#include "device/rescale.cuh"
#include "device/row.cuh"
#include "ptx/warp.cuh"

// The row of fragment register r.
TANDEM_DEVICE constexpr int row_of(int r) { return r >> 1 & 1; }
// The column of fragment register r, relative to the thread's first.
TANDEM_DEVICE constexpr int column_of(int r) { return 8 * (r >> 2) + (r & 1); }

template <bool f16>
struct FragmentSoftmax {
  // The reference of the exponentials: row_max_of(scale * largest score), or up to 8 less. The limit is 0 before the
  // first visible key.
  float row_max[2] = {0, 0};
  float rescale_above[2] = {-kInfinity, -kInfinity};  // scores above this limit move row_max
  int rescale_above_bits = kNever;                    // minimum over both rows, as bits: see may_exceed()
  // Sums over this thread's columns: of earlier iterations, of the last iteration (lazy_max adds it later), and of
  // rounding errors. The divisor is sum + rounding, because probabilities are rounded before they are multiplied.
  float sum[2] = {0, 0}, step_sum[2], rounding[2] = {0, 0};
  // lazy_max: an iteration's sum above this limit is examined. The limit follows the row's total sum as of the last
  // examination.
  float limit[2] = {kOutgrownSum, kOutgrownSum};
  float alpha[2];         // factor of earlier sums, valid if rescale
  bool rescale;           // warp-uniform
  bool outgrown = false;  // warp-uniform: in one iteration, or in any iteration

  // Moves row_max before an iteration's exponentials if a score exceeds it by more than 8. The result stays exact,
  // because the last iteration divides by the same sum. Most iterations skip the rescale (conditional rescaling,
  // FlashAttention-4).
  template <int n>
  TANDEM_DEVICE void update_max(const float (&s)[n], float scale, float threshold) {
    rescale = __any_sync(~0u, may_exceed(s));
    if (!rescale) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest = max_of_row(s, i), from = rescale_above[i] == -kInfinity ? -kInfinity : row_max[i];
      if (largest > rescale_above[i]) {
        row_max[i] = row_max_of<f16>(largest * scale);
        rescale_above[i] = largest + threshold;
      }
      rescale_sum(i, from);
    }
    rescale_above_bits = lower_bits(rescale_above);
  }

  // lazy_max: adds the last iteration's sum while its probabilities are multiplied. A sum near the end of float's range
  // moves row_max by the sum's exponent, without a maximum. If one key may have all the weight, the sum is computed
  // again from rounded probabilities. wait() returns when these may be read.
  template <int n, class Wait>
  TANDEM_DEVICE void settle(const u32 (&probabilities)[n], float scale, float threshold, const Wait& wait) {
    rescale = passes_limit();
    if (!rescale) return add_step();
    float step[2];
    look_at_step(probabilities, wait, step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float from = row_max[i];
      if (step[i] > kMovingSum) {
        row_max[i] += static_cast<float>((__float_as_int(step[i]) >> 23) - 127);  // exponent of the sum
        rescale_above[i] = __fdividef(row_max[i], scale) + threshold;
        limit[i] = kOutgrownSum;
      }
      rescale_sum(i, from);
      if (step[i] > kOverflowedSum) sum[i] = __int_as_float(0x7fffffff);  // NaN for the rest of the row
    }
    rescale_above_bits = lower_bits(rescale_above);
  }
  // This function runs after the last iteration. If a sum is large, products of its probabilities with large values may
  // overflow too.
  template <int n, class Wait>
  TANDEM_DEVICE void settle_last(const u32 (&probabilities)[n], const Wait& wait) {
    float step[2];
    if (passes_limit()) {
      look_at_step(probabilities, wait, step);
    } else {
      add_step();
    }
    if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > kOutgrownSum)) outgrown = true;
  }
  TANDEM_DEVICE void add_step() {
    sum[0] += step_sum[0];
    sum[1] += step_sum[1];
  }
  // Returns true if the sum of row i is not reliable.
  TANDEM_DEVICE bool overflowed(int i) const { return !(sum[i] <= kOverflowedSum); }

  // Replaces scores [begin, end) of an iteration by 2^(scale * score - row_max).
  template <int begin, int end, int n>
  TANDEM_DEVICE void exponentials(float (&s)[n], float scale) {
    if (begin == 0) step_sum[0] = step_sum[1] = 0;
#pragma unroll
    for (int r = begin; r < end; ++r) {
      s[r] = exp2_approx(fmaf(s[r], scale, -row_max[row_of(r)]));
      step_sum[row_of(r)] += s[r];
    }
  }

  // Computes the same from products, and applies a softcap's polynomial (device/score_mod.cuh).
  template <int n>
  TANDEM_DEVICE void capped_exponentials(float (&s)[n], const float (&c)[3]) {
    step_sum[0] = step_sum[1] = 0;
#pragma unroll
    for (int r = 0; r < n; ++r) {
      const float square = s[r] * s[r];
      s[r] = exp2_approx(fmaf(s[r], fmaf(fmaf(c[2], square, c[1]), square, c[0]), -row_max[row_of(r)]));
      step_sum[row_of(r)] += s[r];
    }
  }

  // Reduces the sum over the four lanes of a row.
  TANDEM_DEVICE void reduce_sum() {
    add_lanes(sum);
    if (!outgrown) return;
    add_lanes(rounding);
    use_rounded_sum(&sum[0], &row_max[0], rounding[0]);
    use_rounded_sum(&sum[1], &row_max[1], rounding[1]);
  }

 private:
  static constexpr int kNever = 0x80000000;  // below any float's bits

  TANDEM_DEVICE static int lower_bits(const float (&rescale_above)[2]) {
    const float lower = fminf(rescale_above[0], rescale_above[1]);
    return lower >= 0 ? __float_as_int(lower) : kNever;
  }

  // Returns true if a score may exceed its row's limit: exact unless a limit is negative, which returns true. Bits of
  // non-negative floats are ordered like the floats. The integer unit compares three numbers at once, and the float
  // unit compares two.
  template <int n>
  TANDEM_DEVICE bool may_exceed(const float (&s)[n]) const {
    int largest[2] = {kNever, kNever};  // two chains, because one would wait for earlier results
#pragma unroll
    for (int r = 0; r < n; r += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        largest[i] = max(max(__float_as_int(s[r + 2 * i]), __float_as_int(s[r + 2 * i + 1])), largest[i]);
    }
    return max(largest[0], largest[1]) >= rescale_above_bits;
  }

  TANDEM_DEVICE static void add_lanes(float (&x)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[i] += __shfl_xor_sync(~0u, x[i], 1);
      x[i] += __shfl_xor_sync(~0u, x[i], 2);
    }
  }
  // Reduces over the four lanes of a row.
  template <int n>
  TANDEM_DEVICE static float max_of_row(const float (&s)[n], int row) {
    float largest = -kInfinity;
#pragma unroll
    for (int r = 0; r < n; ++r)
      if (row_of(r) == row) largest = fmaxf(largest, s[r]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  // Returns true for the whole warp if any row exceeds its limit.
  TANDEM_DEVICE bool passes_limit() const { return __any_sync(~0u, step_sum[0] > limit[0] || step_sum[1] > limit[1]); }
  // Adds the iteration to the sums. row: the iteration's sum over the four lanes of a row.
  template <int n, class Wait>
  TANDEM_DEVICE void look_at_step(const u32 (&probabilities)[n], const Wait& wait, float (&row)[2]) {
    float before[2] = {sum[0], sum[1]};
    add_lanes(before);
    row[0] = step_sum[0], row[1] = step_sum[1];
    add_lanes(row);
    bool jumps[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      jumps[i] = row[i] > kOutgrownSum * fmaxf(before[i], 1);
      limit[i] = fminf(kOutgrownSum * fmaxf(before[i] + row[i], 1), kMovingSum);
    }
    add_step();
    if (!__any_sync(~0u, jumps[0] || jumps[1])) return;
    outgrown = true;
    wait();
    float rounded[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < n; ++r)
      rounded[r & 1] +=
          to_float<f16>(static_cast<u16>(probabilities[r])) + to_float<f16>(static_cast<u16>(probabilities[r] >> 16));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (jumps[i]) rounding[i] += rounded[i] - step_sum[i];
  }

  // Rescales the sums from row_max `from` to the current row_max.
  TANDEM_DEVICE void rescale_sum(int row, float from) {
    alpha[row] = exp2_approx(from - row_max[row]);
    sum[row] *= alpha[row];
    rounding[row] *= alpha[row];
  }
};
