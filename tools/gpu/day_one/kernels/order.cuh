// Two products without a wait between them: the first reads P in tensor memory, the second overwrites P.
#pragma once
#include "operands.cuh"

struct Order {
  int n;                 // columns of the first result
  int m_scores, scores;  // rows of a CTA, and columns, of the second
  Swizzle b_swizzle;
  int iterations, limit, reversed;
};

// Adds P b of all iterations to a result of n columns. P of iteration i has the rows p[(row + i) % 8 + ...]. wrong: the
// numbers that differ from expected. Every CTA (pair) computes the same.
extern "C" __global__ void __launch_bounds__(128, 1)
#if CTAS > 1
    __cluster_dims__(2, 1, 1)
#endif
        order(const u16* p, const u16* b, const u16* s, const float* expected, int* wrong, const Order o) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ alignas(8) u64 done;
  __shared__ u32 tensor_memory;
  constexpr int kInner = 128, kInnerOfScores = 64, kResult = 256;
  const int rank = rank_in_pair(), columns = o.n / CTAS, score_columns = o.scores / CTAS;
  const u32 lanes = (threadIdx.x / 32 * 32) << 16;
  unsigned char *const a_at = memory + 32768, *const s_at = a_at + 16384;
  const SmemOperand right{b, rank * columns, columns, kInner, 1, kInner, true, o.b_swizzle};
  const SmemOperand keys{s, 0, o.m_scores, kInnerOfScores, 1, kInnerOfScores, false},
      queries{s, 0, score_columns, kInnerOfScores, 1, kInnerOfScores, false};
  if (threadIdx.x == 0) {
    mbarrier_init(&done, 1);
    fence_mbarrier_init();
  }
  sync_pair();
  if (threadIdx.x < 32) tmem_alloc<CTAS>(&tensor_memory, 512);
  right.write(memory);
  keys.write(a_at);
  queries.write(s_at);
  fence_proxy_async();
  bool alive = true;
#pragma unroll 1
  for (int i = 0; i < o.iterations; ++i) {
    write_tmem_row(p + (i % 8) * 256 * kInner + (rank * 128 + threadIdx.x) * kInner, 1, kInner, 0);
    tmem_wait_store();
    tcgen05_fence_before();
    sync_pair();
    if (threadIdx.x == 0 && rank == 0) {
      tcgen05_fence_after();
      const u32 first = tcgen05_instr_desc(MmaLayout::nn, false, 128 * CTAS, o.n);
      const u32 second = tcgen05_instr_desc(MmaLayout::nt, false, o.m_scores * CTAS, o.scores);
      const u64 b_desc = right.descriptor(memory), k_desc = keys.descriptor(a_at), q_desc = queries.descriptor(s_at);
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 0) != (o.reversed != 0)) {
#pragma unroll 1
          for (int c = 0; c < kInner / 16; ++c)
            tcgen05_mma_ts<CTAS>(kResult, 8 * c, b_desc + right.step(c), first, i > 0 || c > 0);
        } else {
#pragma unroll 1
          for (int c = 0; c < kInnerOfScores / 16; ++c)
            tcgen05_mma_ss<CTAS>(0, k_desc + keys.step(c), q_desc + queries.step(c), second, c > 0);
        }
      }
      tcgen05_commit<CTAS>(&done);
    }
    alive = wait_bounded(&done, i & 1, o.limit);
    tcgen05_fence_after();
    if (!alive) break;
  }
  int differing = alive ? 0 : 1 << 20;
  for (int c = 0; alive && c < o.n; c += 16) {
    float x[16];
    tmem_load(x, lanes + kResult + c);
    tmem_wait_load(x);
    for (int j = 0; j < 16; ++j) differing += x[j] != expected[(rank * 128 + threadIdx.x) * o.n + c + j];
  }
  if (differing > 0) atomicAdd(wrong, differing);
  tcgen05_fence_before();
  sync_pair();
  if (threadIdx.x < 32) tmem_free<CTAS>(tensor_memory, 512);
}

// Issues a product, waits for it, and commits again when no product is outstanding. flags: 1 for each CTA whose barrier
// the empty commit signals.
extern "C" __global__ void __launch_bounds__(128, 1)
#if CTAS > 1
    __cluster_dims__(2, 1, 1)
#endif
        empty_commit(const u16* s, int* flags, int limit) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ alignas(8) u64 done, again;
  __shared__ u32 tensor_memory;
  const int rank = rank_in_pair();
  const SmemOperand keys{s, 0, 128, 64, 1, 64, false};
  if (threadIdx.x == 0) {
    mbarrier_init(&done, 1);
    mbarrier_init(&again, 1);
    fence_mbarrier_init();
  }
  sync_pair();
  if (threadIdx.x < 32) tmem_alloc<CTAS>(&tensor_memory, 512);
  keys.write(memory);
  fence_proxy_async();
  sync_pair();
  if (threadIdx.x == 0) {
    if (rank == 0) {
      tcgen05_fence_after();
      const u64 desc = keys.descriptor(memory);
      tcgen05_mma_ss<CTAS>(0, desc, desc, tcgen05_instr_desc(MmaLayout::nt, false, 128 * CTAS, 128), false);
      tcgen05_commit<CTAS>(&done);
    }
    wait_bounded(&done, 0, limit);
    if (rank == 0) {
      asm volatile("nanosleep.u32 10000;");
      tcgen05_commit<CTAS>(&again);
    }
    flags[rank] = wait_bounded(&again, 0, limit);
  }
  sync_pair();
  if (threadIdx.x < 32) tmem_free<CTAS>(tensor_memory, 512);
}

// Clocks of a load of 32 columns with its wait, one after the other, and of several loads with one wait.
extern "C" __global__ void __launch_bounds__(128, 1) tmem_loads(int* clocks) {
  __shared__ u32 tensor_memory;
  if (threadIdx.x < 32) tmem_alloc<1>(&tensor_memory, 512);
  __syncthreads();
  const u32 lanes = (threadIdx.x / 32 * 32) << 16;
  u32 zeros[16] = {};
  for (int c = 0; c < 128; c += 16) tmem_store(lanes + c, zeros);
  tmem_wait_store();
  constexpr int kTimes = 64;
  float x[4][32];
  long long from = clock64();
#pragma unroll 1
  for (int i = 0; i < kTimes; ++i) {
    tmem_load(x[0], lanes);
    tmem_wait_load(x[0]);
  }
  const long long alone = clock64() - from;
  from = clock64();
#pragma unroll 1
  for (int i = 0; i < kTimes; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) tmem_load(x[c], lanes + 32 * c);
    tmem_wait_load(x);
  }
  const long long four = clock64() - from;
  if (threadIdx.x == 0) {
    clocks[0] = static_cast<int>(alone / kTimes);
    clocks[1] = static_cast<int>(four / kTimes);
  }
  __syncthreads();
  if (threadIdx.x < 32) tmem_free<1>(tensor_memory, 512);
}
