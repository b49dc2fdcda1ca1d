// Loads for wide heads in the Blackwell backward, and the relay, which zeroes rows beyond a sequence. Queries and dout
// share one ring with blocks of 64 columns, in the order of their products. In the dk pass an iteration's queries are
// loaded twice, for S and later for dK.
#pragma once
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/relay.cuh"
#include "sm100/backward/smem.cuh"

template <Sm100BackwardConfig T>
struct TwoPassLoads {
  const BackwardParams& p;
  SharedStorage<T>& s;
  SequenceCoords sequence;
  PipelineState<T.ring_blocks()> ring;
  u32 steps = 0;  // iterations of all tiles whose queries were loaded for S

  TANDEM_DEVICE void load_blocks(const TensorMap* map, int columns, const MBlockIterator<T>& step) {
    const int row = sequence.q_begin + step.m_block * T.tile_m;
#pragma unroll 1
    for (int c = 0; c < columns; c += 64, ring.advance()) {
      u64* const tma_full = &s.ring_tma_full[ring.index];
      mbarrier_wait(&s.ring_empty[ring.index], ring.phase ^ 1);
      mbarrier_expect_tx(tma_full, T.kBlockBytes);
      tma_load(s.ring[ring.index], map, tma_full, c, row, step.head, sequence.batch);
    }
  }
  TANDEM_DEVICE void scores(const MBlockIterator<T>& step) {
    const u32 slot = steps & 1;
    mbarrier_wait(&s.lse_delta_empty[slot], (steps >> 1 & 1) ^ 1);
    mbarrier_expect_tx(&s.lse_delta_tma_full[slot], sizeof s.lse_delta[0]);
    bulk_load(s.lse_delta[slot], p.lse_delta + m_block_at(p, sequence, step.head, step.m_block) * (2 * T.tile_m),
              sizeof s.lse_delta[0], &s.lse_delta_tma_full[slot]);
    load_blocks(&p.q, T.head_dim, step);
    ++steps;
  }
  TANDEM_DEVICE void dp(const MBlockIterator<T>& step) { load_blocks(&p.dout, T.head_dim_v, step); }
  TANDEM_DEVICE void sum(const MBlockIterator<T>& step) {
    T.makes_dk() ? load_blocks(&p.q, T.head_dim, step) : load_blocks(&p.dout, T.head_dim_v, step);
  }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void load_two_pass(const BackwardParams& p, SharedStorage<T>& s) {
  TwoPassLoads<T> loads{p, s};
  auto load_keys = [](u16* to, const TensorMap* map, u64* tma_full, int columns, int row, const NBlockWork& tile,
                      int batch) {
    mbarrier_expect_tx(tma_full, columns / 64 * T.kBlockBytes);
#pragma unroll 1
    for (int c = 0; c < columns; c += 64)
#pragma unroll 1
      for (int r = 0; r < T.kCtaKeys; r += T.k_box())
        tma_load(to + c * T.kCtaKeys + r * 64, map, tma_full, c, row + r, tile.head_k, batch);
  };
  const int tiles = launch_tiles<T>(p);
  u32 tile_idx = 0;
  for (;;) {
    const int n = atomicAdd(counter_of<T>(p), 1);
    if (n >= tiles) break;
    const NBlockWork tile = n_block_work_at<T>(p, n);
    loads.sequence = sequence_coords<T>(p, tile.sequence);
    if (skip_empty_tiles<T>(p, counter_of<T>(p), n, tile, loads.sequence)) continue;
    const int first_key = loads.sequence.k_begin + tile.n_block * T.tile_n(), batch = loads.sequence.batch;
    const MBlockIterator<T> first(p, tile);
    mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
    s.tile = tile;
    ++tile_idx;
    if (first.left == 0) {  // no visible key: gradients are zeros
      mbarrier_arrive(&s.k_tma_full);
      if constexpr (T.makes_dk()) mbarrier_arrive(&s.v_tma_full);
      continue;
    }
    load_keys(s.k, &p.k, &s.k_tma_full, T.head_dim, first_key, tile, batch);
    if constexpr (T.makes_dk()) load_keys(s.v, &p.v, &s.v_tma_full, T.head_dim_v, first_key, tile, batch);
    in_order<T>(first, loads);
  }
  mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
  s.tile = {-1, 0, 0, 0, 0};
  mbarrier_arrive(&s.k_tma_full);
}

template <Sm100BackwardConfig T>
struct TwoPassRelay {
  SharedStorage<T>& s;
  int queries;  // number within the sequence
  PipelineState<T.ring_blocks()> ring;

  TANDEM_DEVICE void pass_blocks(int columns, const MBlockIterator<T>& step) {
#pragma unroll 1
    for (int c = 0; c < columns; c += 64, ring.advance())
      pass(&s.ring_tma_full[ring.index], &s.ring_peer_full[ring.index], ring.phase, s.ring[ring.index], 64,
           queries - step.m_block * T.tile_m);
  }
  TANDEM_DEVICE void scores(const MBlockIterator<T>& step) { pass_blocks(T.head_dim, step); }
  TANDEM_DEVICE void dp(const MBlockIterator<T>& step) { pass_blocks(T.head_dim_v, step); }
  TANDEM_DEVICE void sum(const MBlockIterator<T>& step) { pass_blocks(T.makes_dk() ? T.head_dim : T.head_dim_v, step); }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void relay_two_pass(const BackwardParams& p, SharedStorage<T>& s) {
  TwoPassRelay<T> blocks{s};
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_tma_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (warp_any(tile.n_block < 0)) break;
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    const MBlockIterator<T> first(p, tile);
    const int keys = first.left > 0 ? sequence.k_len - tile.n_block * T.tile_n() : T.tile_n();
    pass(&s.k_tma_full, &s.k_peer_full, tile_idx & 1, s.k, T.head_dim, keys);
    if constexpr (T.makes_dk()) pass(&s.v_tma_full, &s.v_peer_full, tile_idx & 1, s.v, T.head_dim_v, keys);
    blocks.queries = sequence.q_len;
    in_order<T>(first, blocks);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.kv_empty);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.k_peer_full);
}
