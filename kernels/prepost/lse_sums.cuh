// Sums over the lse of a row in several parts. lse: a function of the part's number.
#pragma once
#include "ptx/base.cuh"

// The largest lse, or NaN if one of them is NaN or +infinity.
template <class Lse>
TANDEM_DEVICE float largest_lse(const Lse& lse, int parts) {
  float largest = -kInfinity;
  bool defined = true;
#pragma unroll 8  // the loads are in flight together
  for (int n = 0; n < parts; ++n) {
    const float part = lse(n);
    defined = defined && part < kInfinity;
    largest = fmaxf(largest, part);
  }
  return defined ? largest : __uint_as_float(0x7fffffffu);
}

template <class Lse>
TANDEM_DEVICE float sum_exp_lse(const Lse& lse, int parts, float largest) {
  float sum = 0;
#pragma unroll 8  // the loads are in flight together
  for (int n = 0; n < parts; ++n) sum += expf(lse(n) - largest);
  return sum;
}
