// dq in the Blackwell backward. A warpgroup copies each iteration's dq from tensor memory to slots in shared memory
// (stage_dq). A thread of another warp adds the slots to the sums in global memory (accumulate_dq).
#pragma once
#include "ptx/global.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/smem.cuh"

// Copies an iteration's dq from column `from` on, and arrives at dq_empty after the last load. The loads before it are
// as small as possible, because their columns wait for free slots and so for other CTAs' additions.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void stage_iteration(SharedStorage<T>& s, PipelineState<T.dq_stages>& slot, u32 from, u32 steps) {
  constexpr int end = T.dq_columns(), kColumns = T.dq_part_columns(), kLoaded = T.dq_loaded_columns();
  constexpr int kFirst = end - (end + kLoaded - 1) / kLoaded * kLoaded;  // at most 0
  const int lane = threadIdx.x % 32;
  mbarrier_wait(&s.dq_ready, steps & 1);
  tcgen05_fence_after();
#pragma unroll
  for (int column = kFirst; column < end; column += kLoaded) {
    float x[kLoaded / kColumns][kColumns] = {};
#pragma unroll
    for (int n = 0; n < kLoaded / kColumns; ++n) {
      if (const int at = column + n * kColumns; at >= 0) tmem_load(x[n], from + at);
    }
    tmem_wait_load(x);
    if (column == kFirst && lane == 0) mbarrier_arrive(&s.dq_loaded);
    if (column + kLoaded == end) {
      tcgen05_fence_before();
      __syncwarp();
      if (lane == 0) arrive_at_leader<T>(&s.dq_empty);
    }
#pragma unroll
    for (int n = 0; n < kLoaded / kColumns; ++n) {
      if (column + n * kColumns < 0) continue;
      mbarrier_wait(&s.dq_slot_free[slot.index], slot.phase ^ 1);
      float4* const to = reinterpret_cast<float4*>(s.dq[slot.index]) + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < kColumns; i += 4)
        to[i / 4 * 128] = make_float4(x[n][i], x[n][i + 1], x[n][i + 2], x[n][i + 3]);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&s.dq_slot_full[slot.index]);
      slot.advance();
    }
  }
}
template <Sm100BackwardConfig T>
  requires(!T.two_pass())
TANDEM_DEVICE void stage_dq(const BackwardParams& p, SharedStorage<T>& s) {
  const u32 lanes = static_cast<u32>(warp_uniform(threadIdx.x / 32 % 4)) * 32 << 16;
  PipelineState<T.dq_stages> slot;
  u32 steps = 0;
  for (u32 tile_idx = 0;; ++tile_idx) {
    const NBlockWork tile = wait_for_tile(s, tile_idx);
    if (tile.n_block < 0) break;
    const int count = warp_uniform(MBlockIterator<T>(p, tile).left);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.kv_empty);
#pragma unroll 1
    for (int i = 0; i < count; ++i, ++steps) stage_iteration(s, slot, lanes + T.tmem_dq(), steps);
  }
}

// Two passes have no dq in the main kernel.
template <Sm100BackwardConfig T>
  requires(T.two_pass())
TANDEM_DEVICE void stage_dq(const BackwardParams&, SharedStorage<T>&) {}

// An iteration's sums of dq, their semaphore, and the number of n_blocks that add before.
struct DqTarget {
  float* sums;
  int* semaphore;
  int before;
};
template <Sm100BackwardConfig T>
TANDEM_DEVICE DqTarget dq_target(const BackwardParams& p, const SequenceCoords& sequence, const MBlockIterator<T>& step,
                                 const NBlockWork& tile) {
  const i64 at = m_block_at(p, sequence, step.head, step.m_block);
  return {dq_of_cta(constant<T>, p, at, cta_rank<T>()),
          p.dq_semaphore + dq_semaphore_at(constant<T>, at, cta_rank<T>()),
          count_n_blocks_before<T>(p, sequence, step, tile)};
}

// Adds the staged dq to global memory. A semaphore orders the additions of n_blocks: the first n_block finds 0 and
// stores. CTAs take tiles in this order and wait only for earlier tiles. In a CTA pair each CTA has half of the queries
// and a semaphore. The semaphore is released after the additions are complete, not when their source has been read.
template <Sm100BackwardConfig T>
struct DqAccumulation {
  static constexpr int kParts = T.dq_columns() / T.dq_part_columns();
  static constexpr int kAtOnce = kParts < T.dq_stages ? kParts : T.dq_stages;  // parts that the slots hold
  static constexpr int kSpare = T.dq_stages - kAtOnce;                         // further slots

  SharedStorage<T>& s;
  PipelineState<T.dq_stages> full, free;
  u32 steps = 0;
  int* unreleased = nullptr;  // the semaphore of the previous iteration

  TANDEM_DEVICE void free_slot() {
    mbarrier_arrive(&s.dq_slot_free[free.index]);
    free.advance();
  }
  // Waits until the slots' oldest addition has read its source.
  TANDEM_DEVICE void free_oldest() {
    tma_store_wait_read<T.dq_stages - 1>();
    free_slot();
  }
  // Waits for all additions, the oldest first, and frees their slots.
  template <int pending>
  TANDEM_DEVICE void complete_all_but() {
    if constexpr (pending > 0) {
      tma_store_wait_read<pending>();
    } else {
      tma_store_wait();
    }
    free_slot();
    if constexpr (pending > 0) complete_all_but<pending - 1>();
  }
  // Waits for the additions of the previous iteration. The fence precedes their release: the async proxy writes them.
  TANDEM_DEVICE void complete() {
    if (!unreleased) return;
    complete_all_but<kAtOnce - 1>();
    fence_proxy_async_global();
  }
  TANDEM_DEVICE void release() {
    if (unreleased) add_release(unreleased, 1);
    unreleased = nullptr;
  }
  // Releases and loads the next semaphore. One fence releases the additions and acquires the loaded value.
  TANDEM_DEVICE int release_and_load(const int* next) {
    const int value = load_relaxed(next);
    fence_gpu();
    if (unreleased) add_relaxed(unreleased, 1);
    unreleased = nullptr;
    return value;
  }
  TANDEM_DEVICE void add_part(const DqTarget& target, int part) {
    mbarrier_wait(&s.dq_slot_full[full.index], full.phase);
    float* const to = target.sums + dq_column_at(constant<T>, part * T.dq_part_columns());
    if (target.before == 0) {
      bulk_store(to, s.dq[full.index], sizeof s.dq[0]);
    } else {
      bulk_add(to, s.dq[full.index], sizeof s.dq[0]);
    }
    tma_store_commit();
    full.advance();
  }
  // Tests if the first additions of this iteration wait for no other CTA. Tests no barrier that may be two phases
  // ahead.
  TANDEM_DEVICE bool is_loaded() {
    if constexpr (2 * kParts <= T.dq_stages) {
      return mbarrier_test(&s.dq_slot_full[full.index], full.phase);
    } else {
      return mbarrier_test(&s.dq_loaded, steps & 1);
    }
  }
  // Adds dQ of an iteration. value: of its semaphore, as loaded before. Returns the value of the next semaphore.
  TANDEM_DEVICE int add(const DqTarget& to, int value, const int* next) {
    // The first additions overlap the previous iteration's and their release, unless they may wait for another CTA.
    const int loaded = is_loaded(), seen = value >= to.before;
    if (!(loaded & seen)) {
      complete();
      release();
      while (value < to.before) value = load_acquire(to.semaphore);
    }
    fence_proxy_async_global();  // follows the acquire of the semaphore: the async proxy adds
    ++steps;
#pragma unroll
    for (int part = 0; part < kAtOnce; ++part) {
      if (unreleased && part >= kSpare) free_oldest();
      add_part(to, part);
    }
    if (unreleased) {
      tma_store_wait<kAtOnce>();  // the previous iteration's additions are complete
#pragma unroll
      for (int slot = 0; slot < (kSpare < kAtOnce ? kSpare : kAtOnce); ++slot) free_slot();
      fence_proxy_async_global();
    }
    const int next_value = release_and_load(next);
#pragma unroll 1
    for (int part = kAtOnce; part < kParts; ++part) {
      free_oldest();
      add_part(to, part);
    }
    unreleased = to.semaphore;
    return next_value;
  }
};
// One thread calls this function.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void accumulate_dq(const BackwardParams& p, SharedStorage<T>& s) {
  DqAccumulation<T> accumulation{s};
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(T.two_cta ? &s.k_tma_full : s.k_full(), tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    MBlockIterator<T> step(p, tile);
    if (step.left <= 0) continue;
    DqTarget next = dq_target<T>(p, sequence, step, tile);
    bool more = true;
    int value = -1;  // the next semaphore's
#pragma unroll 1
    while (more) {
      const DqTarget target = next;
      step.advance();
      more = step.left > 0;
      if (more) next = dq_target<T>(p, sequence, step, tile);
      value = accumulation.add(target, value, next.semaphore);
    }
    accumulation.complete();
    accumulation.release();
  }
}
