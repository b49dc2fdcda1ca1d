// The layout of operands in shared memory for the Hopper backward: blocks of 64 columns with 128-byte rows and TMA's
// swizzle. Also the stores of fragments and the zeroing of rows beyond a sequence.
#pragma once
#include "device/chunk.cuh"
#include "device/pack.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/smem.cuh"

// Named barriers: one of all MMA warpgroups, and one per warpgroup.
constexpr int kBarAllMma = 1, kBarOwnWarpgroup = 2;

// The bytes of 64 columns of an iteration's queries, and of the CTA's keys.
template <Sm90BackwardConfig T>
constexpr u32 kQueryBlockBytes = T.tile_m * 128;
template <Sm90BackwardConfig T>
constexpr u32 kKeyBlockBytes = T.cta_keys() * 128;

// The descriptor offset of the c-th 16 inner elements of a product: columns in blocks of 64, or rows.
TANDEM_DEVICE constexpr u64 in_row(int c, u32 block_bytes) { return c / 4 * (block_bytes >> 4) + c % 4 * 2; }
TANDEM_DEVICE constexpr u64 rows_16(int c) { return c * (2048 >> 4); }

// The address of this lane's 16 bytes of the n-th 16 x 16 fragment of the warp's 16 rows. The layout is blocks of 64
// columns of the CTA's keys.
template <Sm90BackwardConfig T>
TANDEM_DEVICE u32 fragment_at(u32 base, int n) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + (lane & 15);
  const int chunk = n % 4 * 2 + (lane >> 4);
  return base + n / 4 * (T.cta_keys() * 128) + row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Zeroes rows beyond a sequence, because they belong to another sequence and 0 * NaN is NaN. All threads of the barrier
// must call it.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void zero_tail(u16* block, int rows, int columns, int used, int barrier, int threads) {
  if (!T.options.varlen || !warp_any(used < rows)) return;
  zero_rows(block, rows, columns, max(0, used), threadIdx.x % threads, threads);
  fence_proxy_async();
  named_sync(barrier, threads);
}

// One lane per warp arrives.
TANDEM_DEVICE void arrive(u64* barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Issues to = a b' over `columns` of both operands: S or dP. a_block, b_block: bytes per block of rows.
template <class ScoreMma, u32 a_block, u32 b_block, int n>
TANDEM_DEVICE void multiply_rows(float (&to)[n], u32 a_rows, u32 b_rows, int columns) {
  const u64 a = wgmma_smem_desc(a_rows, 16, 1024), b = wgmma_smem_desc(b_rows, 16, 1024);
  discard(to);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < columns / 16; ++c) ScoreMma::ss_nt(to, a + in_row(c, a_block), b + in_row(c, b_block), c > 0);
  wgmma_commit();
}

// Stores fragments in their order, for the warpgroup with this index: dq, or dk and dv of a split, which
// bwd_postprocess sums.
template <int threads = 128, int n>
TANDEM_DEVICE void store_sums(float4* to, int index, const float (&sums)[n]) {
  to += fragment_at(n, threads, index, threadIdx.x);
#pragma unroll
  for (int r = 0; r < n; r += 4) to[r / 4 * threads] = make_float4(sums[r], sums[r + 1], sums[r + 2], sums[r + 3]);
}
