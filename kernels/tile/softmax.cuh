// Online softmax over the fragments of a warpgroup: each thread has two rows, four neighbouring lanes share them.
#pragma once
#include "ptx/warp.cuh"

// The row of fragment register r.
TANDEM_DEVICE constexpr int row_of(int r) { return r >> 1 & 1; }

struct Softmax {
  // What the exponentials are taken against: scale times the largest score, or up to 8 less; 0 before anything is seen.
  float shift[2] = {0, 0};
  float limit[2] = {-kInfinity, -kInfinity};  // scores beyond it move the shift
  float sum[2] = {0, 0};                      // of this thread's columns
  float factor[2];                            // by which earlier sums shrink, where rescale
  bool rescale;                               // the same in the whole warp

  // Scores become exponentials 2^(scale * score - shift). The shift moves only when a row outgrows it by more than 8: the
  // result stays exact, since the last step divides by the same sum, and most steps leave the accumulator alone
  // (conditional rescaling, FlashAttention-4).
  template <int n>
  TANDEM_DEVICE void step(float (&s)[n], float scale, float threshold) {
    float part[2][4];  // four chains a row, or the latency of max would bind
#pragma unroll
    for (int r = 0; r < 8; ++r) part[row_of(r)][(r >> 2 & 1) * 2 + (r & 1)] = s[r];
#pragma unroll
    for (int r = 8; r < n; ++r) {
      float& m = part[row_of(r)][(r >> 2 & 1) * 2 + (r & 1)];
      m = fmaxf(m, s[r]);
    }
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(fmaxf(part[i][0], part[i][1]), fmaxf(part[i][2], part[i][3]));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 2));
    }
    rescale = __any_sync(~0u, largest[0] > limit[0] || largest[1] > limit[1]);
    if (rescale) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float from = limit[i] == -kInfinity ? -kInfinity : shift[i];
        if (largest[i] > limit[i]) {
          shift[i] = largest[i] * scale;
          limit[i] = largest[i] + threshold;
        }
        factor[i] = exp2_approx(from - shift[i]);
        sum[i] *= factor[i];
      }
    }
    float more[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < n; ++r) {
      s[r] = exp2_approx(fmaf(s[r], scale, -shift[row_of(r)]));
      more[row_of(r)] += s[r];
    }
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
};
