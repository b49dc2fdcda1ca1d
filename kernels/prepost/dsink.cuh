// Sums the terms of dsink that bwd_preprocess has stored for each m_block, over all queries of a head, always in the
// same order.
#pragma once
#include "config/backward.h"
#include "device/gradient.cuh"
#include "ptx/warp.cuh"

// One warp sums dsink of one query head.
template <auto T>
TANDEM_DEVICE void dsink(const BackwardParams& p) {
  grid_dependency_wait();
  const int head = blockIdx.x;
  const float* const from = p.dsink_of_m_block + static_cast<i64>(head) * p.m_blocks;
  float sum = 0;
  for (int i = threadIdx.x; i < p.m_blocks; i += 32) sum += from[i];
  sum = sum_over_lanes<32>(sum);
  if (threadIdx.x != 0) return;
  store_element<T>(p.dsink, head * p.dsink_head, sum, p.dsink_is_f32, p.accumulate);
}
