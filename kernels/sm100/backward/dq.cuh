// dq, in the Blackwell backward: a warpgroup takes that of each step from tensor memory and adds it to what is in
// memory.
#pragma once
#include "ptx/global.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/shared_plan.cuh"

// n_blocks add in their order, whatever the order of CTAs: a ticket counts those that have added, the first one finds 0
// and writes. Tiles are taken in the order of n_blocks too, so a CTA waits for those alone that have begun before it.
// Of a pair each CTA has half of the queries; a ticket counts both of its additions.
// A ticket goes on when the additions are there, not when their source has been read.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void add_dq(const BackwardParams& p, BackwardShared<T>& s) {
  constexpr int kDqSync = 2;  // named barrier
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const u32 from = (static_cast<u32>(warp) * 32 << 16) + T.tmem_dq();
  Ring<T.dq_stages> place;
  u32 steps = 0;
  auto add = [&](const SequenceCoords& sequence, const Steps& step, int n_block) {
    const i64 at = m_block_at(p, sequence, step.head, step.m_block);
    const int before = n_block - first_n_block<T>(p, sequence, step.m_block);
    float* const sums = p.dq_sums + at * T.dq_floats() + rank_of_cta<T>() * (T.dq_floats() / T.ctas());
    int* const ticket = p.dq_tickets + at;
    mbarrier_wait(&s.dq_ready, steps & 1);
#pragma unroll 1
    for (int part = 0; part < T.dq_parts(); ++part, place.advance()) {
      float x[T.kDqColumns];
      tcgen05_fence_after();
      tmem_load(x, from + part * T.kDqColumns);
      // Once the last addition from this place has read it.
      if (warp == 0 && elect_one()) tma_store_wait_read<T.dq_stages - 1>();
      tmem_wait_load(x);
      named_sync(kDqSync, 128);
      float4* const to = reinterpret_cast<float4*>(s.dq[place.slot]) + threadIdx.x % 128;
#pragma unroll
      for (int n = 0; n < T.kDqColumns; n += 4) to[n / 4 * 128] = make_float4(x[n], x[n + 1], x[n + 2], x[n + 3]);
      if (part == T.dq_parts() - 1) {
        tcgen05_fence_before();
        __syncwarp();
        if (lane == 0) arrive_at_leader<T>(&s.dq_empty);
      }
      fence_proxy_async();
      named_sync(kDqSync, 128);
      if (warp != 0 || !elect_one()) continue;
      if (part == 0) {
        while (load_acquire(ticket) < T.ctas() * before) {
        }
        fence_proxy_async_global();
      }
      if (before == 0) {
        bulk_store(sums + part * T.kDqPartFloats, s.dq[place.slot], sizeof s.dq[0]);
      } else {
        bulk_add(sums + part * T.kDqPartFloats, s.dq[place.slot], sizeof s.dq[0]);
      }
      tma_store_commit();
    }
    if (warp == 0 && elect_one()) {
      tma_store_wait();
      fence_proxy_async_global();
      add_release(ticket, 1);
    }
    __syncwarp();
    ++steps;
  };
  for (u32 taken = 0;; ++taken) {
    const KeyTile tile = wait_for_tile(s, taken);
    if (tile.n_block < 0) break;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (Steps step(p, tile); warp_any(step.left > 0); step.advance()) add(sequence, step, tile.n_block);
  }
}
