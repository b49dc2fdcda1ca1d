// The one matrix product of the engine: C[rows][kPanel] (+)= A[rows][k] * B[k][kPanel].
//
// Lanes run over a panel of kPanel columns of B (queries, or head_dim). A is read one word at a time from any two
// strides and broadcast. No operand is ever shuffled, because a transpose is only another stride of A. A block of up to
// kRows x 2 vectors of C stays in registers over the whole of k.
//
// Mma defines a word: F32 has one float in a word. BF16 has two consecutive k of bfloat16 in a word and multiplies them
// with AVX-512's vdpbf16ps; k then counts pairs.
#pragma once

#include "cpu/simd.h"

namespace tandem::cpu::TANDEM_TARGET {

constexpr int kPanel = 2 * kLanes;         // columns of B side by side in one product: two vectors
constexpr int kStreamedRows = kPanel / 2;  // most rows of queries that decode serves
// Accumulators, two vectors of B and a broadcast fill the register file: 32 registers of AVX-512 and NEON, or 16 of
// AVX2.
constexpr int kRows = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 ? 6 : kLanes == 1 ? 4 : 12;

struct MmaF32 {
  using Word = float;
  static constexpr int kPair = 1;
  static VF multiply_add(VF a, VF b, VF c) { return hn::MulAdd(a, b, c); }
  static VF broadcast(const float* p) { return set(*p); }
};

#if defined(__AVX512BF16__)
#define TANDEM_HAS_BF16_DOT 1
struct MmaBF16 {
  using Word = uint32_t;
  static constexpr int kPair = 2;
  static VF multiply_add(VU a, VU b, VF c) {
    // Inline assembly instead of the intrinsic, because its vector type makes GCC 12 spill every operand and Clang 16
    // crash.
    asm("vdpbf16ps %2, %1, %0" : "+v"(c.raw) : "v"(a.raw), "v"(b.raw));
    return c;
  }
  static VU broadcast(const uint32_t* p) { return hn::Set(UTag(), *p); }
};
#else
#define TANDEM_HAS_BF16_DOT 0
#endif

// A[r][k] is a[r * row_stride + k * k_stride].
template <class Word>
struct Broadcast {
  const Word* data;
  int64_t row_stride, k_stride;
};

// Rows of kPanel columns.
struct Product {
  float* data;
  int64_t row_stride;
  bool accumulate;  // products are added to the contents
};

// Adjacent: row_stride is 1, so that rows differ by constant offsets.
template <class Mma, int R, bool Adjacent>
HWY_INLINE void gemm_block(Broadcast<typename Mma::Word> a, const typename Mma::Word* b, int64_t k, Product c) {
  VF acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = hn::Zero(FTag());
  // Three rows share a pointer, because base, base + stride and base + 2 * stride are addressing modes.
  constexpr int kBases = Adjacent ? 1 : (R + 2) / 3;
  const typename Mma::Word* base[kBases];
  for (int i = 0; i < kBases; ++i) base[i] = a.data + 3 * i * a.row_stride;
  for (int64_t i = 0; i < k; ++i) {
    const auto b0 = load(b), b1 = load(b + kLanes);
    b += kPanel;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto x = Mma::broadcast(Adjacent ? base[0] + r : base[r / 3] + (r % 3) * a.row_stride);
      acc[r][0] = Mma::multiply_add(x, b0, acc[r][0]);
      acc[r][1] = Mma::multiply_add(x, b1, acc[r][1]);
    }
    for (int j = 0; j < kBases; ++j) base[j] += a.k_stride;
  }
  // C is added at the end, because sums of a tile are small compared with C, so long sums round less.
  if (c.accumulate) {
    for (int r = 0; r < R; ++r) {
      acc[r][0] = hn::Add(acc[r][0], load(c.data + r * c.row_stride));
      acc[r][1] = hn::Add(acc[r][1], load(c.data + r * c.row_stride + kLanes));
    }
  }
  for (int r = 0; r < R; ++r) {
    store(acc[r][0], c.data + r * c.row_stride);
    store(acc[r][1], c.data + r * c.row_stride + kLanes);
  }
}

template <class Mma, int R, bool Adjacent>
HWY_INLINE void gemm_rows(int rows, Broadcast<typename Mma::Word> a, const typename Mma::Word* b, int64_t k,
                          Product c) {
  if constexpr (R > 0) {
    if (rows == R) return gemm_block<Mma, R, Adjacent>(a, b, k, c);
    gemm_rows<Mma, R - 1, Adjacent>(rows, a, b, k, c);
  }
}

// One function holds all block sizes and is never inlined. Otherwise the compiler would inline some blocks into some
// callers, and each caller's time would depend on the other callers.
template <class Mma, bool Adjacent>
HWY_NOINLINE void gemm_strided(int64_t rows, Broadcast<typename Mma::Word> a, const typename Mma::Word* b, int64_t k,
                               Product c) {
  // Blocks are as even as possible: 64 rows are 11+11+11+11+10+10, not 5 * 12 + 4.
  for (int64_t done = 0; done < rows;) {
    const int64_t left = rows - done, blocks = (left + kRows - 1) / kRows;
    const int take = static_cast<int>((left + blocks - 1) / blocks);
    gemm_rows<Mma, kRows, Adjacent>(take, {a.data + done * a.row_stride, a.row_stride, a.k_stride}, b, k,
                                    {c.data + done * c.row_stride, c.row_stride, c.accumulate});
    done += take;
  }
}

template <class Mma>
inline void gemm(int64_t rows, Broadcast<typename Mma::Word> a, const typename Mma::Word* b, int64_t k, Product c) {
  const auto strided = a.row_stride == 1 ? gemm_strided<Mma, true> : gemm_strided<Mma, false>;
  strided(rows, a, b, k, c);
}

}  // namespace tandem::cpu::TANDEM_TARGET
