// Small kernels that every GPU runs.
#pragma once
#include "ptx/base.cuh"

TANDEM_DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

extern "C" __global__ void tiny(int* to, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = 3 * i + 1;
}

// Spins for a bounded time, as a kernel that waits for a signal which never comes.
extern "C" __global__ void spin(int* to, u64 duration) {
  const u64 end = nanoseconds() + duration;
  while (nanoseconds() < end) asm volatile("nanosleep.u32 1000;");
  if (threadIdx.x == 0) to[blockIdx.x] = 1;
}

extern "C" __global__ void fault(int* to) {
  *reinterpret_cast<volatile int*>(reinterpret_cast<u64>(to) ^ 1ull << 46) = 1;
}

// Counts the numbers that differ between two buffers.
extern "C" __global__ void differ(const u32* x, const u32* y, int n, int* count) {
  int differing = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) differing += x[i] != y[i];
  if (differing > 0) atomicAdd(count, differing);
}

// Every CTA signals its arrival and waits, for a bounded time, until all have arrived. together: CTAs that have seen
// every arrival.
extern "C" __global__ void __cluster_dims__(2, 1, 1) rendezvous(int* arrived, int* together, u64 duration) {
  if (threadIdx.x != 0) return;
  atomicAdd(arrived, 1);
  const u64 end = nanoseconds() + duration;
  while (*reinterpret_cast<volatile int*>(arrived) < static_cast<int>(gridDim.x)) {
    if (nanoseconds() > end) return;
  }
  atomicAdd(together, 1);
}

// Clocks and nanoseconds of a busy block.
extern "C" __global__ void clocks(long long* to, u64 duration) {
  const u64 begin = nanoseconds();
  const long long from = clock64();
  float x = threadIdx.x;
  u64 now = begin;
  while (now < begin + duration) {
    for (int i = 0; i < 1000; ++i) x = x * 1.0001f + 0.5f;
    now = nanoseconds();
  }
  if (threadIdx.x == 0) {
    to[2 * blockIdx.x] = clock64() - from;
    to[2 * blockIdx.x + 1] = static_cast<long long>(now - begin);
  }
  if (x == 12345) to[0] = 0;
}
