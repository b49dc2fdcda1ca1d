// One product of the attention kernels, with the whole result and its surroundings written to memory.
#pragma once
#include "operands.cuh"

struct ProductCase {
  int m, n, k;  // sizes in both CTAs together
  int a_in_tmem, a_by_columns, b_by_columns, f16;
  Swizzle b_swizzle;
  int column;    // first column of the result in tensor memory
  int columns;   // columns of the result in a CTA
  int repeat;    // number of times that the product is issued
  int arrivals;  // expected arrivals of the commit's barrier
  int limit;     // polls of a wait
  int run;       // 0: only the descriptors
  int n_added;   // planted faults
  u64 flipped;
};
struct Seen {
  u32 instr_desc, a_high, a_low, b_high, b_low;  // without the addresses
  int signalled;                                 // the commit's barrier
  int clocks;                                    // from the first issue to the signal
};

constexpr int kGuard = 16;  // columns on each side of the result
constexpr float kUntouched = -77.0f;

// Element (line, k) of a is a[line * p.k + k]; the lines of b are its columns. dump: 128 lanes of
// columns + 2 * kGuard numbers, for each CTA.
extern "C" __global__ void __launch_bounds__(128, 1)
#if CTAS > 1
    __cluster_dims__(2, 1, 1)
#endif
        product(const u16* a, const u16* b, float* dump, Seen* seen, const ProductCase p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ alignas(8) u64 done;
  __shared__ u32 tensor_memory;
  __shared__ int signalled;
  const int rank = rank_in_pair(), lines = p.m / CTAS, columns = p.n / CTAS;
  unsigned char* const b_at = memory + 32768;
  const SmemOperand left{a, rank * lines, lines, p.k, 1, p.k, p.a_by_columns != 0};
  const SmemOperand right{b, rank * columns, columns, p.k, 1, p.k, p.b_by_columns != 0, p.b_swizzle};
  const MmaLayout layout = p.a_by_columns ? (p.b_by_columns ? MmaLayout::tn : MmaLayout::tt)
                                          : (p.b_by_columns ? MmaLayout::nn : MmaLayout::nt);
  const u32 instr_desc = tcgen05_instr_desc(layout, p.f16 != 0, p.m, p.n + p.n_added);
  const u64 a_desc = left.descriptor(memory), b_desc = right.descriptor(b_at) ^ p.flipped;
  if (threadIdx.x == 0 && rank == 0) {
    *seen = {instr_desc,
             static_cast<u32>(a_desc >> 32),
             static_cast<u32>(a_desc) & ~0x3fffu,
             static_cast<u32>(b_desc >> 32),
             static_cast<u32>(b_desc) & ~0x3fffu,
             0,
             0};
  }
  if (p.run == 0) return;

  if (threadIdx.x == 0) {
    mbarrier_init(&done, p.arrivals);
    fence_mbarrier_init();
    signalled = 0;
  }
  sync_pair();
  if (threadIdx.x < 32) tmem_alloc<CTAS>(&tensor_memory, 512);
  if (!p.a_in_tmem) left.write(memory);
  right.write(b_at);
  __syncthreads();
  const u32 lanes = (threadIdx.x / 32 * 32) << 16;
  if (p.a_in_tmem) write_tmem_row(a + (rank * 128 + threadIdx.x) * p.k, 1, p.k, 0);
  for (int c = -kGuard; c < p.columns + kGuard; c += 16) {
    if (p.column + c >= 512) break;
    float x[16];
    for (float& each : x) each = kUntouched;
    tmem_store(lanes + p.column + c, x);
  }
  tmem_wait_store();
  tcgen05_fence_before();
  fence_proxy_async();
  sync_pair();
  if (threadIdx.x == 0) {
    const long long begin = clock64();
    if (rank == 0) {
      tcgen05_fence_after();
#pragma unroll 1
      for (int i = 0; i < p.repeat; ++i) {
#pragma unroll 1
        for (int c = 0; c < p.k / 16; ++c) {
          if (p.a_in_tmem) {
            tcgen05_mma_ts<CTAS>(p.column, 8 * c, b_desc + right.step(c), instr_desc, c > 0);
          } else {
            tcgen05_mma_ss<CTAS>(p.column, a_desc + left.step(c), b_desc + right.step(c), instr_desc, c > 0);
          }
        }
      }
      tcgen05_commit<CTAS>(&done);
    }
    signalled = wait_bounded(&done, 0, p.limit);
    if (rank == 0) seen->clocks = static_cast<int>(clock64() - begin);
    if (rank == 0) seen->signalled = signalled;
  }
  __syncthreads();
  if (signalled) {
    tcgen05_fence_after();
    float* to = dump + (rank * 128 + threadIdx.x) * (p.columns + 2 * kGuard);
    for (int c = -kGuard; c < p.columns + kGuard; c += 16, to += 16) {
      float x[16];
      for (float& each : x) each = kUntouched;
      if (p.column + c < 512) {
        tmem_load(x, lanes + p.column + c);
        tmem_wait_load(x);
      }
      for (int i = 0; i < 16; ++i) to[i] = x[i];
    }
    tcgen05_fence_before();
  }
  sync_pair();
  if (threadIdx.x < 32) tmem_free<CTAS>(tensor_memory, 512);
}
