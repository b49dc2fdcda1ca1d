// Loads for wide heads in the Blackwell backward, and the relay, which zeroes rows beyond a sequence. Queries and dout
// share one ring with blocks of 64 columns, in the order of their products. In the dk pass an iteration's queries are
// loaded twice, for S and later for dK.
#pragma once
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/relay.cuh"
#include "sm100/backward/shared_plan.cuh"

template <Sm100BackwardConfig T>
struct WideLoads {
  const BackwardParams& p;
  BackwardShared<T>& s;
  SequenceCoords sequence;
  Ring<T.ring_blocks()> ring;
  u32 steps = 0;  // over all tiles: queries loaded for S

  TANDEM_DEVICE void load_blocks(const TensorMap* map, int columns, const KeySteps<T>& step) {
    const int row = sequence.q_begin + step.m_block * T.tile_m;
#pragma unroll 1
    for (int c = 0; c < columns; c += 64, ring.advance()) {
      u64* const landed = &s.ring_landed[ring.slot];
      mbarrier_wait(&s.ring_empty[ring.slot], ring.parity ^ 1);
      mbarrier_expect_tx(landed, T.kBlockBytes);
      tma_load(s.ring[ring.slot], map, landed, c, row, step.head, sequence.batch);
    }
  }
  TANDEM_DEVICE void scores(const KeySteps<T>& step) {
    const u32 slot = steps & 1;
    mbarrier_wait(&s.stats_empty[slot], (steps >> 1 & 1) ^ 1);
    mbarrier_expect_tx(&s.stats_landed[slot], sizeof s.stats[0]);
    bulk_load(s.stats[slot], p.stats + m_block_at(p, sequence, step.head, step.m_block) * (2 * T.tile_m),
              sizeof s.stats[0], &s.stats_landed[slot]);
    load_blocks(&p.q, T.head_dim, step);
    ++steps;
  }
  TANDEM_DEVICE void dp(const KeySteps<T>& step) { load_blocks(&p.dout, T.head_dim_v, step); }
  TANDEM_DEVICE void sum(const KeySteps<T>& step) {
    T.makes_dk() ? load_blocks(&p.q, T.head_dim, step) : load_blocks(&p.dout, T.head_dim_v, step);
  }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void load_wide(const BackwardParams& p, BackwardShared<T>& s) {
  WideLoads<T> loads{p, s};
  auto load_keys = [](u16* to, const TensorMap* map, u64* landed, int columns, int row, const KeyTile& tile,
                      int batch) {
    mbarrier_expect_tx(landed, columns / 64 * T.kBlockBytes);
#pragma unroll 1
    for (int c = 0; c < columns; c += 64) tma_load(to + c * T.kCtaKeys, map, landed, c, row, tile.head_k, batch);
  };
  u32 taken = 0;
  for (;;) {
    const int n = atomicAdd(counter_of<T>(p), 1);
    if (n >= p.tiles) break;
    const KeyTile tile = key_tile_at<T>(p, n);
    loads.sequence = sequence_coords<T>(p, tile.sequence);
    if (pass_empty_tiles<T>(p, counter_of<T>(p), n, tile, loads.sequence)) continue;
    const int first_key = loads.sequence.k_begin + tile.n_block * T.tile_n(), batch = loads.sequence.batch;
    const KeySteps<T> first(p, tile);
    mbarrier_wait(&s.kv_empty, (taken & 1) ^ 1);
    s.tile = tile;
    ++taken;
    if (first.left == 0) {  // no visible key: gradients are zeros
      mbarrier_arrive(&s.k_landed);
      if constexpr (T.makes_dk()) mbarrier_arrive(&s.v_landed);
      continue;
    }
    load_keys(s.k, &p.k, &s.k_landed, T.head_dim, first_key, tile, batch);
    if constexpr (T.makes_dk()) load_keys(s.v, &p.v, &s.v_landed, T.head_dim_v, first_key, tile, batch);
    in_order<T>(first, loads);
  }
  mbarrier_wait(&s.kv_empty, (taken & 1) ^ 1);
  s.tile = {-1, 0, 0, 0, 0};
  mbarrier_arrive(&s.k_landed);
}

template <Sm100BackwardConfig T>
struct WideRelay {
  BackwardShared<T>& s;
  int queries;  // within the sequence
  Ring<T.ring_blocks()> ring;

  TANDEM_DEVICE void pass_blocks(int columns, const KeySteps<T>& step) {
#pragma unroll 1
    for (int c = 0; c < columns; c += 64, ring.advance())
      pass(&s.ring_landed[ring.slot], &s.ring_relayed[ring.slot], ring.parity, s.ring[ring.slot], 64,
           queries - step.m_block * T.tile_m);
  }
  TANDEM_DEVICE void scores(const KeySteps<T>& step) { pass_blocks(T.head_dim, step); }
  TANDEM_DEVICE void dp(const KeySteps<T>& step) { pass_blocks(T.head_dim_v, step); }
  TANDEM_DEVICE void sum(const KeySteps<T>& step) { pass_blocks(T.makes_dk() ? T.head_dim : T.head_dim_v, step); }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void relay_wide(const BackwardParams& p, BackwardShared<T>& s) {
  WideRelay<T> blocks{s};
  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_landed, taken & 1);
    const KeyTile tile = s.tile;
    if (warp_any(tile.n_block < 0)) break;
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    const KeySteps<T> first(p, tile);
    const int keys = first.left > 0 ? sequence.k_len - tile.n_block * T.tile_n() : T.tile_n();
    pass(&s.k_landed, &s.k_relayed, taken & 1, s.k, T.head_dim, keys);
    if constexpr (T.makes_dk()) pass(&s.v_landed, &s.v_relayed, taken & 1, s.v, T.head_dim_v, keys);
    blocks.queries = sequence.q_len;
    in_order<T>(first, blocks);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.kv_empty);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.k_relayed);
}
