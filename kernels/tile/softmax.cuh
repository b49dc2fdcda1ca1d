// Online softmax over the fragments of a warpgroup: each thread has two rows, four neighbouring lanes share them.
#pragma once
#include "ptx/warp.cuh"

// The row of fragment register r.
TANDEM_DEVICE constexpr int row_of(int r) { return r >> 1 & 1; }

struct Softmax {
  // What the exponentials are taken against: scale times the largest score, or up to 8 less; 0 before anything is seen.
  float shift[2] = {0, 0};
  float limit[2] = {-kInfinity, -kInfinity};  // scores beyond it move the shift
  int bound = kNever;                         // of both rows, by their bits: see may_exceed()
  float sum[2] = {0, 0};                      // of this thread's columns
  float factor[2];                            // by which earlier sums shrink, where rescale
  bool rescale;                               // the same in the whole warp

  // Of a step, before its exponentials: moves the shift of a row that outgrows it by more than 8. The result stays
  // exact, since the last step divides by the same sum, and most steps leave the accumulator alone (conditional
  // rescaling, FlashAttention-4).
  template <int n>
  TANDEM_DEVICE void look_at_scores(const float (&s)[n], float scale, float threshold) {
    rescale = __any_sync(~0u, may_exceed(s));
    if (!rescale) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest = largest_of_row(s, i), from = limit[i] == -kInfinity ? -kInfinity : shift[i];
      if (largest > limit[i]) {
        shift[i] = largest * scale;
        limit[i] = largest + threshold;
      }
      shrink(i, from);
    }
    bound = bound_of(limit);
  }

  // The same by what the sums have become, for rows that have seen a key, without a look at the scores: bfloat16 has
  // float's range, so a shift that is too small costs nothing until sums come near the end of it. give_up() is called
  // where they have, by scores so much larger than all before that the result cannot be trusted.
  template <class GiveUp>
  TANDEM_DEVICE void look_at_sums(float scale, float threshold, const GiveUp& give_up) {
    rescale = __any_sync(~0u, fmaxf(sum[0], sum[1]) > kLarge);
    if (!rescale) return;
    if (lost()) give_up();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = fmaxf(sum[i], __shfl_xor_sync(~0u, sum[i], 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float from = shift[i];
      if (largest > kLarge) {
        shift[i] += static_cast<float>((__float_as_int(largest) >> 23) - 127);  // its exponent
        limit[i] = __fdividef(shift[i], scale) + threshold;
      }
      shrink(i, from);
    }
    bound = bound_of(limit);
  }
  TANDEM_DEVICE bool lost() const { return __any_sync(~0u, fmaxf(sum[0], sum[1]) > kLost); }

  // Scores [begin, end) of a step become 2^(scale * score - shift).
  template <int begin, int end, int n>
  TANDEM_DEVICE void exponentials(float (&s)[n], float scale, float (&more)[2]) const {
#pragma unroll
    for (int r = begin; r < end; ++r) {
      s[r] = exp2_approx(fmaf(s[r], scale, -shift[row_of(r)]));
      more[row_of(r)] += s[r];
    }
  }
  TANDEM_DEVICE void add(const float (&more)[2]) {
    sum[0] += more[0];
    sum[1] += more[1];
  }

  // Over the four lanes of a row.
  TANDEM_DEVICE void total() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
  }

 private:
  static constexpr int kNever = 0x80000000;  // less than any
  static constexpr float kLarge = 0x1p16f, kLost = 0x1p64f;

  TANDEM_DEVICE static int bound_of(const float (&limit)[2]) {
    const float lower = fminf(limit[0], limit[1]);
    return lower >= 0 ? __float_as_int(lower) : kNever;
  }

  // Whether a score may be beyond its row's limit: exact unless a limit is negative, when it says yes. Floats that are
  // not negative are ordered as their bits are, and the integer unit compares three at once, the float unit two.
  template <int n>
  TANDEM_DEVICE bool may_exceed(const float (&s)[n]) const {
    int largest[2] = {kNever, kNever};  // two chains: one would wait for its own results
#pragma unroll
    for (int r = 0; r < n; r += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        largest[i] = max(max(__float_as_int(s[r + 2 * i]), __float_as_int(s[r + 2 * i + 1])), largest[i]);
    }
    return max(largest[0], largest[1]) >= bound;
  }

  // Over its four lanes.
  template <int n>
  TANDEM_DEVICE static float largest_of_row(const float (&s)[n], int row) {
    float largest = -kInfinity;
#pragma unroll
    for (int r = 0; r < n; ++r)
      if (row_of(r) == row) largest = fmaxf(largest, s[r]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  // What was summed against shift `from` is brought to the shift of now.
  TANDEM_DEVICE void shrink(int row, float from) {
    factor[row] = exp2_approx(from - shift[row]);
    sum[row] *= factor[row];
  }
};
