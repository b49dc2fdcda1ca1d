// The relay warp of the Blackwell backward, with T.relays(). It zeroes rows beyond a sequence before it signals
// operands to the products, because these rows are undefined and 0 * NaN is NaN.
#pragma once
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/shared_plan.cuh"
#include "tile/chunk.cuh"

// Handles 128 rows, of which `used` are used.
TANDEM_DEVICE void pass(u64* landed, u64* relayed, u32 parity, u16* block, int columns, int used) {
  constexpr int kRows = Sm100BackwardConfig::tile_m;
  const int lane = threadIdx.x % 32;
  mbarrier_wait(landed, parity);
  if (warp_any(used < kRows)) {
    zero_rows(block, kRows, columns, max(0, used), lane, 32);
    fence_proxy_async();
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(relayed);
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void relay(const BackwardParams& p, BackwardShared<T>& s) {
  const int lane = threadIdx.x % 32;
  Ring<T.q_stages> q_ring;
  Ring<T.dout_stages> dout_ring;
  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_landed, taken & 1);
    const KeyTile tile = s.tile;
    if (warp_any(tile.n_block < 0)) break;
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    KeySteps<T> step(p, tile);
    const int keys = step.left > 0 ? sequence.k_len - tile.n_block * T.tile_n() : T.tile_n();
    pass(&s.k_landed, &s.k_relayed, taken & 1, s.k, T.k_columns(), keys);
    pass(&s.v_landed, &s.v_relayed, taken & 1, s.v, T.v_columns(), keys);
#pragma unroll 1
    for (; warp_any(step.left > 0); step.advance()) {
      const int queries = sequence.q_len - step.m_block * T.tile_m;
      pass(&s.q_landed[q_ring.slot], &s.q_relayed[q_ring.slot], q_ring.parity, s.q[q_ring.slot], T.k_columns(),
           queries);
      q_ring.advance();
      pass(&s.dout_landed[dout_ring.slot], &s.dout_relayed[dout_ring.slot], dout_ring.parity, s.dout[dout_ring.slot],
           T.v_columns(), queries);
      dout_ring.advance();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.kv_empty);
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(&s.k_relayed);
}
