// The loading thread of the Blackwell backward. The thread also takes the tiles and publishes them to the other warps.
#pragma once
#include "ptx/tma.cuh"
#include "sm100/backward/smem.cuh"

// Loads keys and values of every tile, then queries with lse and delta, and dout of every iteration. The first
// iteration's operands are loaded before the keys, while the epilogue stores the previous tile.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void load_one_cta(const BackwardParams& p, SharedStorage<T>& s) {
  PipelineState<T.q_stages> q_ring;
  PipelineState<T.dout_stages> dout_ring;
  auto load_blocks = [](u16* to, const TensorMap* map, u64* tma_full, int columns, int row, int head, int batch) {
#pragma unroll 1
    for (int c = 0; c < columns; c += 64) tma_load(to + c * T.tile_m, map, tma_full, c, row, head, batch);
  };
  auto load_step = [&](const SequenceCoords& sequence, const MBlockIterator<T>& step) {
    const int row = sequence.q_begin + step.m_block * T.tile_m, batch = sequence.batch;
    mbarrier_wait(&s.q_empty[q_ring.index], q_ring.phase ^ 1);
    u64* const q_tma_full = &s.q_tma_full[q_ring.index];
    mbarrier_expect_tx(q_tma_full, sizeof s.q[0] + sizeof s.lse_delta[0]);
    load_blocks(s.q[q_ring.index], &p.q, q_tma_full, T.head_dim, row, step.head, batch);
    bulk_load(s.lse_delta[q_ring.index],
              p.lse_delta + m_block_at(p, sequence, step.head, step.m_block) * (2 * T.tile_m), sizeof s.lse_delta[0],
              q_tma_full);
    q_ring.advance();
    mbarrier_wait(&s.dout_empty[dout_ring.index], dout_ring.phase ^ 1);
    u64* const dout_tma_full = &s.dout_tma_full[dout_ring.index];
    mbarrier_expect_tx(dout_tma_full, sizeof s.dout[0]);
    load_blocks(s.dout[dout_ring.index], &p.dout, dout_tma_full, T.head_dim_v, row, step.head, batch);
    dout_ring.advance();
  };
  u32 tile_idx = 0;
  for (;;) {
    const int n = atomicAdd(counter_of<T>(p), 1);
    if (n >= p.tiles) break;
    const NBlockWork tile = n_block_work_at<T>(p, n);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    if (skip_empty_tiles<T>(p, counter_of<T>(p), n, tile, sequence)) continue;
    const int first_key = sequence.k_begin + tile.n_block * T.tile_n();
    MBlockIterator<T> step(p, tile);
    const bool any = step.left > 0;
    if (any) {
      load_step(sequence, step);
      step.advance();
    }
    mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
    s.tile = tile;
    ++tile_idx;
    if (!any) {  // no visible key: gradients are zeros
      mbarrier_arrive(&s.k_tma_full);
      mbarrier_arrive(&s.v_tma_full);
      continue;
    }
    mbarrier_expect_tx(&s.k_tma_full, sizeof s.k);
    load_blocks(s.k, &p.k, &s.k_tma_full, T.head_dim, first_key, tile.head_k, sequence.batch);
    mbarrier_expect_tx(&s.v_tma_full, sizeof s.v);
    load_blocks(s.v, &p.v, &s.v_tma_full, T.head_dim_v, first_key, tile.head_k, sequence.batch);
#pragma unroll 1
    for (; step.left > 0; step.advance()) load_step(sequence, step);
  }
  mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
  s.tile = {-1, 0, 0, 0, 0};
  mbarrier_arrive(&s.k_tma_full);
}
