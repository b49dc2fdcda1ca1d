// The tensor core of Blackwell and its memory: 128 lanes of 512 columns of 32 bits (PTX ISA "TensorCore 5th Generation
// Family Instructions"). An address is lane << 16 | column. A warp accesses 32 lanes from 32 * (warp % 4) on, one lane
// per thread.
//
// Products and accesses are asynchronous. Between threads a barrier orders them, with tcgen05_fence_before on the
// signalling side and tcgen05_fence_after on the waiting side.
#pragma once
#include "ptx/base.cuh"

// Allocates columns (a power of two, 32 to 512) and writes the first address. One whole warp calls this function, with
// ctas = 2 a warp of each CTA. The call blocks until the columns are free. PTX ISA "tcgen05.alloc",
// "tcgen05.relinquish_alloc_permit".
template <int ctas>
TANDEM_DEVICE void tmem_alloc(u32* address, u32 columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;\n"
      "tcgen05.relinquish_alloc_permit.cta_group::%2.sync.aligned;" ::"r"(shared_address(address)),
      "r"(columns), "n"(ctas)
      : "memory");
}
// The same warps free the columns before their CTAs end. PTX ISA "tcgen05.dealloc".
template <int ctas>
TANDEM_DEVICE void tmem_free(u32 address, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns), "n"(ctas)
               : "memory");
}

// PTX ISA "tcgen05.fence".
TANDEM_DEVICE void tcgen05_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
TANDEM_DEVICE void tcgen05_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

#define TANDEM_T8(how, x, i) \
  how(x[i]), how(x[i + 1]), how(x[i + 2]), how(x[i + 3]), how(x[i + 4]), how(x[i + 5]), how(x[i + 6]), how(x[i + 7])
#define TANDEM_T16(how, x, i) TANDEM_T8(how, x, i), TANDEM_T8(how, x, i + 8)
#define TANDEM_T32(how, x, i) TANDEM_T16(how, x, i), TANDEM_T16(how, x, i + 16)

// Loads columns [address, address + n) of this warp's lanes, one lane per thread. A whole warp calls this function. The
// registers are valid after tmem_wait_load, which covers all earlier loads. PTX ISA "tcgen05.ld", "tcgen05.wait".
TANDEM_DEVICE void tmem_load(float (&x)[16], u32 address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "[%16];"
      : TANDEM_T16("=f", x, 0)
      : "r"(address)
      : "memory");
}
TANDEM_DEVICE void tmem_load(float (&x)[32], u32 address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : TANDEM_T32("=f", x, 0)
      : "r"(address)
      : "memory");
}
template <int n>
TANDEM_DEVICE void tmem_wait_load(float (&x)[n]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  fence_operand(x);
}
template <int n, int chunks>
TANDEM_DEVICE void tmem_wait_load(float (&x)[chunks][n]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int c = 0; c < chunks; ++c) fence_operand(x[c]);
}

// Stores to tensor memory. The store is complete after tmem_wait_store. PTX ISA "tcgen05.st", "tcgen05.wait".
TANDEM_DEVICE void tmem_store(u32 address, const u32 (&x)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
      "%15};" ::TANDEM_T16("r", x, 0),
      "r"(address)
      : "memory");
}
TANDEM_DEVICE void tmem_store(u32 address, const float (&x)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
      "%15};" ::TANDEM_T16("f", x, 0),
      "r"(address)
      : "memory");
}
TANDEM_DEVICE void tmem_store(u32 address, const float (&x)[32]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
      "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31};" ::TANDEM_T32("f", x, 0),
      "r"(address)
      : "memory");
}
TANDEM_DEVICE void tmem_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// Shared memory descriptor of 16-bit elements in rows of 64 or 32, with TMA's swizzle of 128 or 64 bytes (PTX ISA
// "Shared memory descriptor"). stride_bytes: from 8 rows to the next 8. leading_bytes: from the columns of one row to
// the next columns of a transposed operand, whose rows lie along the inner dimension; else unused.
enum class SmemSwizzle : u64 { b128 = 2, b64 = 4 };
TANDEM_DEVICE u64 tcgen05_smem_desc(u32 address, u32 leading_bytes, u32 stride_bytes,
                                    SmemSwizzle swizzle = SmemSwizzle::b128) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | u64{1} << 46 | static_cast<u64>(swizzle) << 61;
}
// Operand layouts in BLAS terms for row-major matrices: n is rows x columns, t is transposed. q k^T with keys in rows
// is nt, p v with values in rows is nn. An operand a in tensor memory is never transposed.
enum class MmaLayout { nn, nt, tn, tt };
// Returns the instruction descriptor of m x n products of f16 or bfloat16 with float32 sums. PTX ISA "Instruction
// descriptor".
constexpr u32 tcgen05_instr_desc(MmaLayout layout, bool f16, int m, int n) {
  const u32 type = f16 ? 0 : 1;
  const bool a_by_columns = layout == MmaLayout::tn || layout == MmaLayout::tt;
  const bool b_by_columns = layout == MmaLayout::nn || layout == MmaLayout::tn;
  return 1u << 4 | type << 7 | type << 10 | (a_by_columns ? 1u << 15 : 0) | (b_by_columns ? 1u << 16 : 0) |
         static_cast<u32>(n) / 8 << 17 | static_cast<u32>(m) / 16 << 24;
}

// d += a b, or d = a b if not add: 128 rows of each CTA, 16 inner elements. One thread calls this function and
// tcgen05_commit. ss: a in shared memory; ts: a in tensor memory, two elements per column. ctas 2: the leader issues
// for both CTAs, and each has half of the rows of a and half of the columns of b. PTX ISA "tcgen05.mma".
template <int ctas>
TANDEM_DEVICE void tcgen05_mma_ss(u32 d, u64 a, u64 b, u32 instr_desc, bool add) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, add;}" ::"r"(d),
      "l"(a), "l"(b), "r"(instr_desc), "r"(static_cast<u32>(add)), "n"(ctas)
      : "memory");
}
template <int ctas>
TANDEM_DEVICE void tcgen05_mma_ts(u32 d, u32 a, u64 b, u32 instr_desc, bool add) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.cta_group::%5.kind::f16 [%0], [%1], %2, %3, add;}" ::"r"(d),
      "r"(a), "l"(b), "r"(instr_desc), "r"(static_cast<u32>(add)), "n"(ctas)
      : "memory");
}
// Signals the barrier (ctas 2: of both CTAs) when all earlier products are complete. One thread calls this function.
// PTX ISA "tcgen05.commit".
template <int ctas>
TANDEM_DEVICE void tcgen05_commit(u64* barrier) {
  if constexpr (ctas == 1) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(barrier))
        : "memory");
  } else {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            shared_address(barrier)),
        "h"(static_cast<u16>(0b11))
        : "memory");
  }
}
// Signals only the barrier of the CTA that issues the products.
template <int ctas>
TANDEM_DEVICE void tcgen05_commit_here(u64* barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::%1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(barrier)),
      "n"(ctas)
      : "memory");
}
