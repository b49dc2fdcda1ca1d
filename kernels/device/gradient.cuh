// Stores gradients in the caller's type: float32 or the kernel's type. With accumulate the old value is added in
// float32, and the sum is rounded once. __fadd_rn keeps a scaled gradient from entering a fused multiply-add, so that
// float32 sums have the bits of a separate addition.
#pragma once
#include "config/backward.h"
#include "device/pack.cuh"
#include "device/row.cuh"

template <auto T>
TANDEM_DEVICE void store_element(void* to, i64 at, float x, bool is_f32, bool accumulate) {
  if (accumulate) x = __fadd_rn(x, load_element<T.options.f16>(to, at, is_f32));
  if (is_f32) {
    static_cast<float*>(to)[at] = x;
  } else {
    static_cast<u16*>(to)[at] = static_cast<u16>(pack<T>(x, 0));
  }
}

// Returns true if 16 bytes of dq may be stored at once.
TANDEM_DEVICE bool dq_has_chunks(const BackwardParams& p) {
  const i64 bytes = 2 * (p.dq_row | p.dq_head | p.dq_batch) | static_cast<i64>(reinterpret_cast<u64>(p.dq));
  return !p.dq_is_f32 && !p.accumulate && bytes % 16 == 0;
}

// Stores two neighbouring elements; `at` is even.
template <auto T>
TANDEM_DEVICE void store_pair(void* to, i64 at, float x, float y, bool is_f32, bool accumulate) {
  if (accumulate) {
    x = __fadd_rn(x, load_element<T.options.f16>(to, at, is_f32));
    y = __fadd_rn(y, load_element<T.options.f16>(to, at + 1, is_f32));
  }
  if (is_f32) {
    *reinterpret_cast<float2*>(static_cast<float*>(to) + at) = make_float2(x, y);
  } else {
    *reinterpret_cast<u32*>(static_cast<u16*>(to) + at) = pack<T>(x, y);
  }
}

// Transposes four words of four neighbouring threads: thread i gets word i of each.
TANDEM_DEVICE void transpose_words(u32 (&w)[4]) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const bool second = threadIdx.x & d;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 &low = w[d == 1 ? 2 * i : i], &high = w[d == 1 ? 2 * i + 1 : i + 2];
      const u32 got = __shfl_xor_sync(~0u, second ? low : high, d);
      (second ? low : high) = got;
    }
  }
}
