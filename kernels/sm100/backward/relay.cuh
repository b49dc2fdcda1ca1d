// The relay warp of the Blackwell backward, with T.has_relay_warp(). The warp zeroes rows beyond a sequence before it
// signals operands to the products, because these rows are undefined and 0 * NaN is NaN.
#pragma once
#include "device/chunk.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/smem.cuh"

// Zeroes the rows from `used` to kRows and signals.
template <int kRows = Sm100BackwardConfig::tile_m>
TANDEM_DEVICE void pass(u64* tma_full, u64* peer_full, u32 parity, u16* block, int columns, int used) {
  const int lane = threadIdx.x % 32;
  mbarrier_wait(tma_full, parity);
  if (warp_any(used < kRows)) {
    zero_rows(block, kRows, columns, max(0, used), lane, 32);
    fence_proxy_async();
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(peer_full);
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void relay(const BackwardParams& p, SharedStorage<T>& s) {
  const int lane = threadIdx.x % 32;
  PipelineState<T.q_stages> q_ring;
  PipelineState<T.dout_stages> dout_ring;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_tma_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (warp_any(tile.n_block < 0)) break;
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    MBlockIterator<T> step(p, tile);
    const int keys = step.left > 0 ? sequence.k_len - tile.n_block * T.tile_n() : T.tile_n();
    pass(&s.k_tma_full, &s.k_peer_full, tile_idx & 1, s.k, T.k_columns(), keys);
    pass(&s.v_tma_full, &s.v_peer_full, tile_idx & 1, s.v, T.v_columns(), keys);
#pragma unroll 1
    for (; warp_any(step.left > 0); step.advance()) {
      const int queries = sequence.q_len - step.m_block * T.tile_m;
      pass(&s.q_tma_full[q_ring.index], &s.q_peer_full[q_ring.index], q_ring.phase, s.q[q_ring.index], T.k_columns(),
           queries);
      q_ring.advance();
      pass(&s.dout_tma_full[dout_ring.index], &s.dout_peer_full[dout_ring.index], dout_ring.phase,
           s.dout[dout_ring.index], T.v_columns(), queries);
      dout_ring.advance();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.kv_empty);
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(&s.k_peer_full);
}
