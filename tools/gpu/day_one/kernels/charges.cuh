// Clocks of the waits that the clock model charges (sass/docs/clocks.md), and of dQ's way to memory in two forms.
#pragma once
#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/tma.cuh"

constexpr int kCharges = 8, kTimes = 32, kSlot = 8192;

// An iteration of a pair at head_dim 128: four parts through two slots. The semaphore is released before the next
// additions.
TANDEM_DEVICE void add_after_release(float* to, const unsigned char* slots, int* semaphore, int times) {
  int sum = 0;
#pragma unroll 1
  for (int i = 0; i < times; ++i) {
    sum += load_acquire(semaphore);
    tma_store_wait();
    fence_proxy_async_global();
    add_release(semaphore, 1);
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      bulk_add(to + part * kSlot / 4, reinterpret_cast<const float*>(slots + part % 2 * kSlot), kSlot);
      tma_store_commit();
      if (part > 0) tma_store_wait_read<1>();
    }
  }
  tma_store_wait();
  add_relaxed(semaphore, sum & 1);
}
// The release overlaps the first two additions, as in sm100/backward/dq_reduce.cuh.
TANDEM_DEVICE void add_beside_release(float* to, const unsigned char* slots, int* semaphore, int times) {
  int sum = 0;
#pragma unroll 1
  for (int i = 0; i < times; ++i) {
    tma_store_wait();
    fence_proxy_async_global();
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      if (part > 1) tma_store_wait_read<1>();
      bulk_add(to + part * kSlot / 4, reinterpret_cast<const float*>(slots + part % 2 * kSlot), kSlot);
      tma_store_commit();
      if (part != 1) continue;
      sum += load_relaxed(semaphore);
      fence_gpu();
      add_relaxed(semaphore, 1);
    }
  }
  tma_store_wait();
  add_relaxed(semaphore, sum & 1);
}

// to: 32 KiB of each block. semaphores: 32 words of each block. clocks: kCharges of each block.
extern "C" __global__ void __launch_bounds__(32, 1) charges(float* to, int* semaphores, int* clocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  for (int i = threadIdx.x; i < 2 * kSlot / 4; i += 32) reinterpret_cast<float*>(memory)[i] = 1;
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x != 0) return;
  to += blockIdx.x * kSlot;
  semaphores += blockIdx.x * 32;
  const float* const from = reinterpret_cast<const float*>(memory);
  auto timed = [&](int n, int times, auto&& work) {
    const long long begin = clock64();
#pragma unroll 1
    for (int i = 0; i < times; ++i) work();
    clocks[blockIdx.x * kCharges + n] = static_cast<int>((clock64() - begin) / kTimes);
  };
  auto add = [&] {
    bulk_add(to, from, 2 * kSlot);
    tma_store_commit();
  };
  timed(0, kTimes, [&] { add(), tma_store_wait(); });
  timed(1, kTimes, [&] { add(), tma_store_wait_read(); });
  tma_store_wait();
  timed(2, kTimes, [&] { fence_gpu(); });
  timed(3, kTimes, [&] { add(), fence_gpu(), tma_store_wait(); });
  int sum = 0;  // the compiler removes loads whose value is not used
  timed(4, kTimes, [&] { sum += load_acquire(semaphores); });
  add_relaxed(semaphores, sum & 1);
  timed(5, kTimes, [&] { add_release(semaphores, 1); });
  timed(6, 1, [&] { add_after_release(to, memory, semaphores, kTimes); });
  timed(7, 1, [&] { add_beside_release(to, memory, semaphores, kTimes); });
}
