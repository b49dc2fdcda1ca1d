// Sums the terms of dsink that the CTAs of bwd_preprocess have stored, over all queries of a head, always in the
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
  const i64 parts = static_cast<i64>(p.m_blocks) * T.preprocess_ctas();
  const float* const from = p.dsink_parts + head * parts;
  float sum = 0;
  for (i64 i = threadIdx.x; i < parts; i += 32) sum += from[i];
  sum = sum_over_lanes<32>(sum);
  if (threadIdx.x != 0) return;
  store_element<T>(p.dsink, head * p.dsink_head, sum, p.dsink_is_f32, p.accumulate);
}
