// CTA pairs, which work on one tile.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// The rank of a CTA in its pair. On Blackwell CTA 0 issues the products of both.
template <auto T>
TANDEM_DEVICE int cta_rank() {
  return T.ctas() > 1 ? blockIdx.x & 1 : 0;
}

// The first CTA takes a tile and sends its number to the second. All pairs begin tiles in the order of the counter,
// because semaphores require it; the order of clusters does not matter. take() returns the number.
template <auto T, class Pair, class Take>
TANDEM_DEVICE int next_cta_pair_tile(Pair& pair, u32 tile_idx, const Take& take) {
  if (cta_rank<T>() == 0) {
    const int n = take();
    mbarrier_wait_cluster(&pair.tile_read, (tile_idx & 1) ^ 1);
    store_at(&pair.next_tile, 1, n);
    mbarrier_release_at(&pair.tile_signalled, 1);
    return n;
  }
  mbarrier_wait_cluster(&pair.tile_signalled, tile_idx & 1);
  const int n = pair.next_tile;
  mbarrier_release_at(&pair.tile_read, 0);
  return n;
}
