// Stores dS to global memory, by one thread, for the schedules ds_gmem and ds_gmem_sub_m. The kernel in dq_kernel.cuh
// reads it.
#pragma once
#include "device/ds_chunk.cuh"
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "sm90/backward/smem.cuh"

// Adds a tile to the semaphores of its n_block, after its dS is in global memory.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void signal_ds(const BackwardParams& p, const SequenceCoords& sequence, const NBlockWork& tile) {
  tma_store_wait();
  fence_proxy_async_global();
  int first = 0, heads = 0;
  set_query_heads(constant<T>, p, tile, &first, &heads);
  for (int head = first; head < first + heads; ++head)
    add_release(p.ds_semaphore + ds_semaphore_at(p, sequence, head, tile.n_block), 1);
  add_release(p.counter + 3, 1);
}

// Stores dS of each iteration to its place in the chunk.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void store_ds(const BackwardParams& p, SharedStorage<T>& s) {
  const DsChunk chunk(p);
  PipelineState<T.ds_stages()> ring;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (MBlockIterator<T> steps(p, tile); steps.left > 0; steps.advance(), ring.advance()) {
      mbarrier_wait(&s.ds_full[ring.index], ring.phase);
      if (p.ds) {
        bulk_store(ds_at<T>(p, sequence, chunk, steps.head, steps.m_block, tile.n_block), s.ds[ring.index],
                   sizeof s.ds[0]);
        tma_store_commit();
        tma_store_wait_read();
      }
      mbarrier_arrive(&s.ds_empty[ring.index]);
    }
    if (p.ds) signal_ds<T>(p, sequence, tile);
  }
}
