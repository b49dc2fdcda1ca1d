// The tensor core of Blackwell and its memory: 128 lanes of 512 columns of 32 bits (PTX ISA "TensorCore 5th Generation
// Family Instructions"). An address is lane << 16 | column. A warp reaches lanes 32 * (warp % 4) to + 31, its thread t
// the t-th of them.
//
// Products and accesses are asynchronous. Between threads they are ordered by a barrier with tcgen05_fence_before on
// its one side and tcgen05_fence_after on its other.
#pragma once
#include "ptx/base.cuh"

// A whole warp, of each CTA of a pair (ctas: 2); blocks until there are so many columns (a power of two, 32 to 512),
// and writes the address of the first. "tcgen05.alloc", "tcgen05.relinquish_alloc_permit".
template <int ctas>
TANDEM_DEVICE void tmem_alloc(u32* address, u32 columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;\n"
      "tcgen05.relinquish_alloc_permit.cta_group::%2.sync.aligned;" ::"r"(shared_address(address)),
      "r"(columns), "n"(ctas)
      : "memory");
}
// The same warps, before their blocks end. "tcgen05.dealloc".
template <int ctas>
TANDEM_DEVICE void tmem_free(u32 address, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns), "n"(ctas)
               : "memory");
}

// "tcgen05.fence"
TANDEM_DEVICE void tcgen05_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
TANDEM_DEVICE void tcgen05_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

#define TANDEM_T8(how, x, i) \
  how(x[i]), how(x[i + 1]), how(x[i + 2]), how(x[i + 3]), how(x[i + 4]), how(x[i + 5]), how(x[i + 6]), how(x[i + 7])
#define TANDEM_T16(how, x, i) TANDEM_T8(how, x, i), TANDEM_T8(how, x, i + 8)
#define TANDEM_T32(how, x, i) TANDEM_T16(how, x, i), TANDEM_T16(how, x, i + 16)

// The columns [address, address + n) of this warp's lanes, a lane's to its thread. A whole warp. The registers hold
// them after tmem_wait_load, which covers all loads before. "tcgen05.ld", "tcgen05.wait".
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

// The other way round; done after tmem_wait_store. "tcgen05.st", "tcgen05.wait".
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

// Shared memory descriptor of a matrix of 16-bit elements in rows of 64, swizzled by 128 bytes as TMA writes them (PTX
// ISA "Shared memory descriptor"). stride_bytes: from 8 rows to the next 8. leading_bytes: from 64 columns to the next
// 64 where the operand is transposed in the sense of the hardware (its rows are along the inner dimension); else
// unused.
TANDEM_DEVICE u64 tcgen05_smem_desc(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | u64{1} << 46 | u64{2} << 61;
}
// How a and b lie, as BLAS has it for row-major matrices: n as written, rows x columns; t transposed. q k^T with keys
// in rows is nt, p v with values in rows nn. a in tensor memory is never transposed.
enum class Layout { nn, nt, tn, tt };
// Instruction descriptor of m x n products of f16 or bfloat16 in float32. "Instruction descriptor".
constexpr u32 tcgen05_instr_desc(Layout layout, bool f16, int m, int n) {
  const u32 type = f16 ? 0 : 1;
  const bool a_by_columns = layout == Layout::tn || layout == Layout::tt;
  const bool b_by_columns = layout == Layout::nn || layout == Layout::tn;
  return 1u << 4 | type << 7 | type << 10 | (a_by_columns ? 1u << 15 : 0) | (b_by_columns ? 1u << 16 : 0) |
         static_cast<u32>(n) / 8 << 17 | static_cast<u32>(m) / 16 << 24;
}

// d += a b, or d = a b where not add; 128 rows of each CTA, 16 elements of the inner dimension. One thread, the same as
// for tcgen05_commit. ss: a in shared memory; ts: in tensor memory, two elements in a column. Of a pair of CTAs (ctas:
// 2) the leader issues for both; a, b and d lie in both at these addresses, half of the rows of a and of the columns of
// b in each. "tcgen05.mma".
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
// The barrier, of a pair those of both CTAs, gets an arrival when all products issued before are done. One thread.
// "tcgen05.commit".
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
