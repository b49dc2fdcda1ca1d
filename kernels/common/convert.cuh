// dq in the caller's type and place, from the sums of the main kernel, which are in the order in which threads hold
// fragments.
#pragma once
#include "ptx/warp.cuh"
#include "shared/dq_order.h"
#include "tile/gradient.cuh"
#include "tile/sequence.cuh"

// One CTA for each (query head, m_block), with the threads that computed it. An m_block that nobody has added to
// sees no key.
template <auto T>
TANDEM_DEVICE void convert(const BackwardParams& p) {
  launch_dependents();
  grid_dependency_wait();
  const int block = blockIdx.x, head = block / p.m_blocks, sequence = sequence_at<T>(p, block % p.m_blocks);
  const SequenceCoords s = sequence_coords<T>(p, sequence);
  const int m_block = block % p.m_blocks - s.first_m_block;
  const bool nothing = p.dq_tickets[T.dq_tickets() * block] == 0;
  const int floats = 2 * T.dq_pairs();  // of a thread
  const float4* const sums = reinterpret_cast<const float4*>(p.dq_sums + static_cast<i64>(block) * T.dq_floats() +
                                                             threadIdx.x / 128 * (128 * floats)) +
                             threadIdx.x % 128;
  const i64 base = s.batch * p.dq_batch + s.q_begin * p.dq_row + head * p.dq_head;
#pragma unroll
  for (int n = 0; n < T.dq_pairs(); n += 2) {
    const float4 x = nothing ? make_float4(0, 0, 0, 0) : sums[n / 2 * 128];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const DqPair at = T.dq_pair(threadIdx.x, n + i);
      const int query = m_block * T.tile_m + at.row;
      if (at.column >= p.head_dim || query >= (p.accumulate ? s.q_len : s.q_rows)) continue;
      const bool used = query < s.q_len;
      const float low = used ? (i == 0 ? x.x : x.z) * p.scale : 0, high = used ? (i == 0 ? x.y : x.w) * p.scale : 0;
      store_pair<T>(p.dq, base + query * p.dq_row + at.column, low, high, p.dq_is_f32, p.accumulate);
    }
  }
}
