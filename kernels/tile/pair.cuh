// CTA pairs, which work on one tile.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// The rank of a CTA in its pair. On Blackwell CTA 0 issues the products of both.
template <auto T>
TANDEM_DEVICE int rank_of_cta() {
  return T.pair ? blockIdx.x & 1 : 0;
}

// The first CTA takes a tile and sends its number to the second. All pairs begin tiles in the order of the counter, as
// semaphores require, in any order of clusters. take() returns the number.
template <auto T, class Pair, class Take>
TANDEM_DEVICE int next_tile_of_pair(Pair& pair, u32 taken, const Take& take) {
  if (rank_of_cta<T>() == 0) {
    const int n = take();
    mbarrier_wait_cluster(&pair.tile_taken, (taken & 1) ^ 1);
    store_at(&pair.next_tile, 1, n);
    mbarrier_release_at(&pair.tile_told, 1);
    return n;
  }
  mbarrier_wait_cluster(&pair.tile_told, taken & 1);
  const int n = pair.next_tile;
  mbarrier_release_at(&pair.tile_taken, 0);
  return n;
}
