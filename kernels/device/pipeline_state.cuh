// The slot of a ring of buffers together with the parity of its barriers.
#pragma once
#include "ptx/base.cuh"

template <int slots>
struct PipelineState {
  u32 index = 0, phase = 0;
  TANDEM_DEVICE void advance() {
    if (++index == slots) {
      index = 0;
      phase ^= 1;
    }
  }
};
