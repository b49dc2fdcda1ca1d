// The slot of a ring of buffers together with the parity of its barriers.
#pragma once
#include "ptx/base.cuh"

template <int slots>
struct Ring {
  u32 slot = 0, parity = 0;
  TANDEM_DEVICE void advance() {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};
