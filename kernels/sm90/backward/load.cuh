// The thread that takes tiles and loads the operands of the Hopper backward.
#pragma once
#include "ptx/tma.cuh"
#include "sm90/backward/smem.cuh"

template <Sm90BackwardConfig T>
TANDEM_DEVICE int next_tile(const BackwardParams& p, SharedStorage<T>& s, u32 tile_idx) {
  const auto take = [&p] { return atomicAdd(p.counter, 1); };
  if constexpr (T.cluster2()) {
    return next_cta_pair_tile<T>(s.cluster2, tile_idx, take);
  } else {
    return take();
  }
}

// Keys or values from a first row on.
struct KeyRows {
  const TensorMap* map;
  int first_key, head, batch;
};

// Loads the CTA's keys or values.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void load_keys(u16* to, const KeyRows& from, u64* full, int columns) {
#pragma unroll 1
  for (int c = 0; c < columns; c += 64) {
#pragma unroll
    for (int row = 0; row < T.cta_keys(); row += T.k_box())
      tma_load(to + c * T.cta_keys() + row * 64, from.map, full, c, from.first_key + row, from.head, from.batch);
  }
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void load(const BackwardParams& p, SharedStorage<T>& s) {
  PipelineState<T.q_stages> q_ring;
  PipelineState<T.dout_stages> dout_ring;
  auto load_step = [&](const SequenceCoords& sequence, int head, int m_block) {
    const int row = sequence.q_begin + m_block * T.tile_m, batch = sequence.batch;
    mbarrier_wait(&s.q_empty[q_ring.index], q_ring.phase ^ 1);
    mbarrier_expect_tx(&s.q_full[q_ring.index], sizeof s.q[0]);
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.q[q_ring.index] + c * T.tile_m, &p.q, &s.q_full[q_ring.index], c, row, head, batch);
    q_ring.advance();
    mbarrier_wait(&s.dout_empty[dout_ring.index], dout_ring.phase ^ 1);
    u64* const full = &s.dout_full[dout_ring.index];
    mbarrier_expect_tx(full, sizeof s.dout[0] + sizeof s.lse_delta[0]);
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64)
      tma_load(s.dout[dout_ring.index] + c * T.tile_m, &p.dout, full, c, row, head, batch);
    bulk_load(s.lse_delta[dout_ring.index], p.lse_delta + m_block_at(p, sequence, head, m_block) * (2 * T.tile_m),
              sizeof s.lse_delta[0], full);
    dout_ring.advance();
  };
  const int tiles = launch_tiles<T>(p);
  u32 tile_idx = 0;
  for (u32 asked = 0;; ++asked) {
    const int n = next_tile<T>(p, s, asked);
    if (n >= tiles) break;
    const NBlockWork tile = n_block_work_at<T>(p, n);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    if (skip_empty_tiles<T>(p, p.counter, n, tile, sequence)) continue;
    const int rank = cta_rank<T>(), first_of_all = sequence.k_begin + tile.n_block * T.tile_n();
    const int first_key = first_of_all + rank * T.cta_keys();
    MBlockIterator<T> steps(p, tile);
    auto next_step = [&] {
      load_step(sequence, steps.head, steps.m_block);
      steps.advance();
    };
    if (steps.left > 0) next_step();  // overlaps the previous tile's epilogue
    mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
    s.tile = tile;
    u32 bytes = sizeof s.k;
    if constexpr (T.cluster2()) bytes += sizeof s.cluster2.k;
    mbarrier_expect_tx(&s.k_full, bytes);
    load_keys<T>(s.k, {&p.k, first_key, tile.head_k, sequence.batch}, &s.k_full, T.head_dim);
    if constexpr (T.cluster2()) {
      const int other_key = first_of_all + (rank ^ 1) * T.cta_keys();
#pragma unroll 1
      for (int c = 0; c < T.cluster2_columns(); c += 64)
        tma_load(s.cluster2.k + c * T.cta_keys(), &p.k, &s.k_full, T.cluster2_column(rank, c), other_key, tile.head_k,
                 sequence.batch);
    }
    mbarrier_expect_tx(&s.v_full, sizeof s.v);
    load_keys<T>(s.v, {&p.v, first_key, tile.head_k, sequence.batch}, &s.v_full, T.head_dim_v);
#pragma unroll 1
    while (steps.left > 0) next_step();
    ++tile_idx;
  }
  mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
  s.tile = NBlockWork{-1};
  mbarrier_arrive(&s.k_full);
}
