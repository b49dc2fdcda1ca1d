// The order in which a multiprocessor's tensor cores execute the products of two warpgroups, and the cost of other
// instructions during products. bench/limits/order.py compiles, launches and reads them. All
// warpgroups are in one block, so that one clock suffices.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

struct OrderArgs {
  long long* to;  // defined by the entry point
  u32 delay;      // clocks from the first burst to the second burst
  u32 alone;      // the second warpgroup issues nothing
  u32 zero;       // 0, but unknown to the compiler
};

constexpr int kBurst = 8;  // products
constexpr int kLead = 2000;

TANDEM_DEVICE long long ticks() {
  long long t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}

// Computes 64 x N += 64 x 16 * 16 x N. The left operand is in registers, or at the beginning of shared memory.
template <int N, bool registers>
struct Operands {
  float sums[N / 2];
  u32 left[4];
  u64 q, k;
  TANDEM_DEVICE explicit Operands(u32 shared) : q(wgmma_smem_desc(shared, 16, 1024)) {
    k = wgmma_smem_desc(shared + 64 * 128, 16, 1024);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = 0x3f803f80u + threadIdx.x;
  }
  TANDEM_DEVICE void multiply() {
    if constexpr (registers) {
      Wgmma<false, N>::rs_nt(sums, left, k, true);
    } else {
      Wgmma<false, N>::ss_nt(sums, q, k, true);
    }
    wgmma_commit();
  }
  TANDEM_DEVICE void keep(const OrderArgs& a) {
    fence_operand(sums);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum += sums[i];
    if (a.zero != 0) reinterpret_cast<float*>(a.to)[threadIdx.x] = sum;
  }
};

template <int pending>
TANDEM_DEVICE void wait_each(long long (&done)[kBurst]) {
  wgmma_wait<pending>();
  done[kBurst - 1 - pending] = ticks();
  if constexpr (pending > 0) wait_each<pending - 1>(done);
}

TANDEM_DEVICE u32 cleared_shared() {
  extern __shared__ __align__(1024) char memory[];
  const u32 from = shared_address(memory), shared = (from + 1023) & ~1023u;
  for (u32 i = threadIdx.x * 16; i < 64 * 1024; i += blockDim.x * 16)
    *reinterpret_cast<uint4*>(memory + (shared - from) + i) = {};
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  return shared;
}

// Two warpgroups issue one burst each. Output for each warpgroup: the clocks at which products were issued, then the
// clocks at which their ends were seen. Only the last of several turns counts, because earlier turns miss the
// instruction cache.
template <int N, bool registers>
TANDEM_DEVICE void bursts(const OrderArgs& a) {
  __shared__ long long start;
  Operands<N, registers> x(cleared_shared());
  const int group = uniform(threadIdx.x / 128);
#pragma unroll 1
  for (int turn = 0; turn < 4; ++turn) {
    if (threadIdx.x == 0) start = ticks() + kLead;
    __syncthreads();
    const long long from = start;
    long long issued[kBurst], done[kBurst];
    if (group == 0 || a.alone == 0) {
      while (ticks() < from + (group == 0 ? 0 : a.delay)) {
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBurst; ++i) {
        issued[i] = ticks();
        x.multiply();
      }
      wait_each<kBurst - 1>(done);
      if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int i = 0; i < kBurst; ++i) {
          a.to[group * 2 * kBurst + i] = issued[i] - from;
          a.to[group * 2 * kBurst + kBurst + i] = done[i] - from;
        }
      }
    }
    __syncthreads();
  }
  x.keep(a);
}

// The first warpgroup multiplies all the time. Every other warpgroup executes an instruction kRepeated times in eight
// chains. to[0]: their clocks; to[1]: products in that time.
constexpr int kRepeated = 4096;

template <int N, int left, class F>  // left: 0 no products, 1 from shared memory, 2 from registers
TANDEM_DEVICE void beside(const OrderArgs& a, F step) {
  __shared__ volatile u32 products, over, stop[2];
  if (threadIdx.x == 0) products = over = 0;
  Operands<N, left == 2> x(cleared_shared());
  if (uniform(threadIdx.x / 128) == 0) {
    if constexpr (left > 0) {
#pragma unroll 1
      for (int turn = 0; turn < 1 << 14; ++turn) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBurst; ++i) x.multiply();
        wgmma_wait<kBurst>();  // waits for the preceding turn; one burst is outstanding
        if (threadIdx.x == 0) {
          products = turn * kBurst;
          stop[turn % 2] = over;
        }
        named_sync(1, 128);
        if (stop[turn % 2] != 0) break;
      }
      wgmma_wait<0>();
    }
    x.keep(a);
    return;
  }
  float y[8], z[5];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = 1.0f + static_cast<float>(threadIdx.x + i);
#pragma unroll
  for (int i = 0; i < 5; ++i) z[i] = 1.0f + static_cast<float>((a.zero + 1) * threadIdx.x * i);
  long long begin = 0;
  u32 first = 0;
#pragma unroll 1
  for (int turn = 0; turn < kRepeated / 64 + 8; ++turn) {
    if (turn == 8) {
      named_sync(2, blockDim.x - 128);
      begin = ticks();
      first = products;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) step(y[i], z[i % 5], z[(i + 2) % 5]);
    }
  }
  const long long end = ticks();
  const u32 last = products;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += y[i];
  if (a.zero != 0) reinterpret_cast<float*>(a.to)[threadIdx.x] = sum;
  if (threadIdx.x == 128) {
    a.to[0] = end - begin;
    a.to[1] = last - first;
  }
  named_sync(2, blockDim.x - 128);
  over = 1;
}
