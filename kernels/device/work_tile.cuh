// The tile of a CTA as the scheduler warp publishes it, and its retry.
//
// With lazy maxima (lazy_max) a softmax warp may find a sum overflowed at the end of a tile. The warp then requests a
// retry and stores an invalid result. The scheduler warp reads the request before it reuses the slot, or after the last
// fresh tile. The warp then issues the same tile again as strict: every maximum is taken, so that no sum overflows. The
// second result is stored after the first store is complete.
#pragma once
#include "device/coords.cuh"
#include "ptx/warp.cuh"

struct WorkTile {
  TileCoords coords;
  int index;       // in the order of tiles; -1: no more tiles
  bool strict;     // a retry: every maximum is taken
  int overflowed;  // 1: a retry is requested

  // One lane calls this function. Several warps may call the function at once.
  TANDEM_DEVICE void request_retry() { store_relaxed(&overflowed, 1); }
};
