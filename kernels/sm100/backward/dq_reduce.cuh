// dq in the Blackwell backward: a warpgroup reads each iteration's dq from tensor memory and adds it to the sums in
// global memory.
#pragma once
#include "ptx/global.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/smem.cuh"

// A semaphore orders the additions of n_blocks: the first n_block finds 0 and stores. CTAs take tiles in this order and
// wait only for earlier tiles. In a CTA pair each CTA has half of the queries, and the semaphore counts both additions.
// The semaphore is released after the additions are complete, not when their source has been read.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void accumulate_dq(const BackwardParams& p, SharedStorage<T>& s) {
  constexpr int kDqSync = 2;  // a named barrier
  constexpr int kColumns = T.dq_part_columns();
  constexpr int kLoaded = T.two_cta ? T.dq_columns() / kColumns : 1;  // parts loaded at once, before the next scores
  const int warp = warp_uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  PipelineState<T.dq_stages> place;
  u32 steps = 0;
  auto add_part = [&](const float(&x)[kColumns], int column, float* sums, int* semaphore, int before) {
    // Afterwards the last addition from this buffer has read the buffer.
    if (warp == 0 && elect_one()) tma_store_wait_read<T.dq_stages - 1>();
    named_sync(kDqSync, 128);
    float4* const to = reinterpret_cast<float4*>(s.dq[place.index]) + threadIdx.x % 128;
#pragma unroll
    for (int n = 0; n < kColumns; n += 4) to[n / 4 * 128] = make_float4(x[n], x[n + 1], x[n + 2], x[n + 3]);
    fence_proxy_async();
    named_sync(kDqSync, 128);
    if (warp == 0 && elect_one()) {
      if (column == 0) {
        while (load_acquire(semaphore) < T.semaphore_counts() * before) {
        }
        fence_proxy_async_global();
      }
      if (before == 0) {
        bulk_store(sums + dq_column_at(constant<T>, column), s.dq[place.index], sizeof s.dq[0]);
      } else {
        bulk_add(sums + dq_column_at(constant<T>, column), s.dq[place.index], sizeof s.dq[0]);
      }
      tma_store_commit();
    }
    place.advance();
  };
  // Adds columns [begin, end) of an iteration's dq.
  auto add_columns = [&](int begin, int end, u32 from, u64* empty, float* sums, int* semaphore, int before) {
#pragma unroll 1
    for (int column = begin; column < end; column += kLoaded * kColumns) {
      float x[kLoaded][kColumns];
      tcgen05_fence_after();
#pragma unroll
      for (int n = 0; n < kLoaded; ++n) tmem_load(x[n], from + column - begin + n * kColumns);
      tmem_wait_load(x);
      if (column + kLoaded * kColumns == end) {
        tcgen05_fence_before();
        __syncwarp();
        if (lane == 0) arrive_at_leader<T>(empty);
      }
#pragma unroll
      for (int n = 0; n < kLoaded; ++n) add_part(x[n], column + n * kColumns, sums, semaphore, before);
    }
  };
  auto add = [&](const SequenceCoords& sequence, const MBlockIterator<T>& step, const NBlockWork& tile) {
    const i64 at = m_block_at(p, sequence, step.head, step.m_block);
    const int before = count_n_blocks_before<T>(p, sequence, step, tile);
    float* const sums = dq_of_cta(constant<T>, p, at, cta_rank<T>());
    int* const semaphore = p.dq_semaphore + dq_semaphore_at(constant<T>, at, 0);
#pragma unroll
    for (int piece = 0; piece < T.dq_pieces(); ++piece) {
      mbarrier_wait(&s.dq_ready[piece], steps & 1);
      add_columns(T.dq_piece_begin(piece), T.dq_piece_begin(piece + 1), lanes + T.tmem_dq(piece), &s.dq_empty[piece],
                  sums, semaphore, before);
    }
    if (warp == 0 && elect_one()) {
      tma_store_wait();
      fence_proxy_async_global();
      add_release(semaphore, 1);
    }
    __syncwarp();
    ++steps;
  };
  for (u32 tile_idx = 0;; ++tile_idx) {
    const NBlockWork tile = wait_for_tile(s, tile_idx);
    if (tile.n_block < 0) break;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (MBlockIterator<T> step(p, tile); warp_any(step.left > 0); step.advance()) add(sequence, step, tile);
  }
}
