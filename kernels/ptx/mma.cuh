// Warp-level products with operands and results in registers.
#pragma once
#include "ptx/base.cuh"

// d (16 x 8) += a (16 x 16) b (16 x 8) in float32. PTX ISA "mma".
//
// A lane has rows lane / 4 (d[0], d[1]; a[0], a[2]) and lane / 4 + 8. In d a lane has columns 2 (lane % 4) and the
// next; in b, column lane / 4. a[0], a[1] and b[0] begin at inner index 2 (lane % 4), the rest 8 later.
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
