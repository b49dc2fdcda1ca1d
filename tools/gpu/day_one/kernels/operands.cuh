// Operands of the experiments' products, written to shared memory by ordinary stores.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"

#ifndef CTAS
#define CTAS 1
#endif

TANDEM_DEVICE u32 rank_in_pair() {
  u32 rank = 0;
  if (CTAS > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// TMA's swizzle: rows of row_bytes in blocks, and the bits of an address that the swizzle changes.
struct Swizzle {
  int row_bytes = 128, mask = 0x70;

  // The address of an element in blocks of `rows` rows.
  TANDEM_DEVICE u32 address(int row, int column, int rows) const {
    const u32 at = 2 * column / row_bytes * (rows * row_bytes) + row * row_bytes + 2 * column % row_bytes;
    return at ^ (at >> 3 & mask);
  }
};

// An operand: `lines` rows of A or columns of B, from `first` on, times `inner` elements. Element (line, k) is
// at[line * line_stride + k * k_stride]. by_columns: rows of shared memory lie along the inner dimension.
struct SmemOperand {
  const u16* at;
  int first, lines, line_stride, k_stride, inner;
  bool by_columns;
  Swizzle swizzle = {};

  TANDEM_DEVICE void write(unsigned char* to) const {
    for (int i = threadIdx.x; i < lines * inner; i += blockDim.x) {
      const int line = i / inner, k = i % inner;
      const u32 place = by_columns ? swizzle.address(k, line, inner) : swizzle.address(line, k, lines);
      *reinterpret_cast<u16*>(to + place) = at[(first + line) * line_stride + k * k_stride];
    }
  }
  TANDEM_DEVICE u64 descriptor(const unsigned char* from) const {
    const int bytes = swizzle.row_bytes;
    return tcgen05_smem_desc(shared_address(from), by_columns ? inner * bytes : 0, 8 * bytes,
                             bytes == 128 ? SmemSwizzle::b128 : SmemSwizzle::b64);
  }
  // The offset of the c-th 16 inner elements.
  TANDEM_DEVICE u64 step(int c) const {
    const int in_row = swizzle.row_bytes / 32;
    return by_columns ? c * swizzle.row_bytes : c / in_row * (lines * swizzle.row_bytes >> 4) + c % in_row * 2;
  }
};

// Stores `inner` elements of a row per thread to tensor memory, two per column. All 128 threads call this function.
TANDEM_DEVICE void write_tmem_row(const u16* row, int k_stride, int inner, u32 column) {
  const u32 lanes = (threadIdx.x / 32 * 32) << 16;
#pragma unroll 1
  for (int k = 0; k < inner; k += 32) {
    u32 x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      x[i] = row[(k + 2 * i) * k_stride] | static_cast<u32>(row[(k + 2 * i + 1) * k_stride]) << 16;
    tmem_store(lanes + column + k / 2, x);
  }
}

// Waits for a phase, at most `limit` polls. Returns false if the phase has not completed.
TANDEM_DEVICE bool wait_bounded(u64* barrier, u32 parity, int limit) {
  for (int i = 0; i < limit; ++i) {
    if (mbarrier_test(barrier, parity)) return true;
    asm volatile("nanosleep.u32 100;");
  }
  return false;
}

TANDEM_DEVICE void sync_pair() {
  if (CTAS > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}
