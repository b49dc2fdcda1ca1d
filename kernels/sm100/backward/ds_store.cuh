// Stores dS of wide heads to global memory in the Blackwell backward. The kernel in dq_kernel.cuh reads it. Other heads
// have dQ in the main kernel (dq_reduce.cuh).
#pragma once
#include "device/ds_chunk.cuh"
#include "ptx/tma.cuh"
#include "sm100/backward/dq_reduce.cuh"
#include "sm100/backward/smem.cuh"

// Stores dS of each iteration to its place in the chunk, as it lies in shared memory. One thread calls this function.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void store_ds(const BackwardParams& p, SharedStorage<T>& s) {
  const DsChunk chunk(p);
  u32 steps = 0;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(s.k_full(), tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (MBlockIterator<T> step(p, tile); step.left > 0; step.advance(), ++steps) {
      mbarrier_wait(&s.ds_ready, steps & 1);
      if (p.ds) {
        bulk_store(ds_at<T>(p, sequence, chunk, step.head, step.m_block, tile.n_block), s.ds, sizeof s.ds);
        tma_store_commit();
        tma_store_wait_read();
      }
      mbarrier_arrive(&s.ds_empty);
    }
  }
  tma_store_wait();  // dS is in global memory before the CTA ends
}

// One thread calls this function.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void store_dq_or_ds(const BackwardParams& p, SharedStorage<T>& s) {
  if constexpr (!T.two_pass()) {
    accumulate_dq(p, s);
  } else if constexpr (T.makes_dk()) {
    store_ds(p, s);
  }
}
