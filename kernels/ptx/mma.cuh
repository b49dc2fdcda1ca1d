// Products of a warp, from registers to registers.
#pragma once
#include "ptx/base.cuh"

// d (16 x 8) += a (16 x 16) b (16 x 8), in float32. By lane: d has rows lane / 4 (d[0], d[1]) and lane / 4 + 8, columns
// 2 (lane % 4) and the next; a these rows (a[0], a[2] the first), b column lane / 4, each two neighbours of the inner
// dimension, from 2 (lane % 4) on (a[0], a[1], b[0]) and 8 further on. PTX ISA "mma".
template <bool f16>
TANDEM_DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (f16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}
