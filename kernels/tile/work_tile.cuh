// A tile that a CTA has taken, as the warp that takes tiles tells the others, and how it comes to be done again.
//
// Where maxima are lazy (lazy_max), a warp of softmax may find at the end that a sum has overflowed. It then asks for a
// retry and goes on: the result that it stores is no good. The warp that takes tiles finds the request when it is about
// to use the slot again, or when there are no fresh tiles left, and takes the same tile once more, strict: every
// maximum is taken, which cannot overflow. Its result is stored over the first one, once that store is complete.
#pragma once
#include "ptx/warp.cuh"
#include "tile/coords.cuh"

struct WorkTile {
  TileCoords coords;
  int index;       // in the order of tiles; -1: there are no more
  bool strict;     // it is done again, and every maximum is taken
  int overflowed;  // it has to be done again

  // One lane. Several warps may ask at once.
  TANDEM_DEVICE void request_retry() { store_relaxed(&overflowed, 1); }
};
