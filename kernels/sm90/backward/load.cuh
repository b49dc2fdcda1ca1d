// The warps beside those that compute, one thread of each: one takes tiles and loads, one adds dq to what is in memory.
#pragma once
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "sm90/backward/shared_plan.cuh"

template <Sm90BackwardConfig T>
TANDEM_DEVICE void load(const BackwardParams& p, BackwardShared<T>& s) {
  Ring<T.q_stages> q_ring;
  Ring<T.dout_stages> dout_ring;
  auto load_step = [&](const SequenceCoords& sequence, int head, int m_block) {
    const int row = sequence.q_begin + m_block * T.tile_m, batch = sequence.batch;
    mbarrier_wait(&s.q_empty[q_ring.slot], q_ring.parity ^ 1);
    mbarrier_expect_tx(&s.q_full[q_ring.slot], sizeof s.q[0]);
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.q[q_ring.slot] + c * T.tile_m, &p.q, &s.q_full[q_ring.slot], c, row, head, batch);
    q_ring.advance();
    mbarrier_wait(&s.dout_empty[dout_ring.slot], dout_ring.parity ^ 1);
    u64* const full = &s.dout_full[dout_ring.slot];
    mbarrier_expect_tx(full, sizeof s.dout[0] + sizeof s.stats[0]);
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64)
      tma_load(s.dout[dout_ring.slot] + c * T.tile_m, &p.dout, full, c, row, head, batch);
    bulk_load(s.stats[dout_ring.slot], p.stats + m_block_at(p, sequence, head, m_block) * (2 * T.tile_m),
              sizeof s.stats[0], full);
    dout_ring.advance();
  };
  u32 taken = 0;
  for (;; ++taken) {
    const int n = atomicAdd(p.counter, 1);
    if (n >= p.tiles) break;
    const KeyTile tile = key_tile_at<T>(p, n);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    const int first_key = sequence.k_begin + tile.n_block * T.tile_n();
    KeySteps steps = steps_of<T>(p, tile);
    auto next_step = [&] {
      load_step(sequence, steps.head, steps.m_block);
      steps.advance();
    };
    if (steps.left > 0) next_step();  // while the tile before is stored
    mbarrier_wait(&s.kv_empty, (taken & 1) ^ 1);
    s.tile = tile;
    mbarrier_expect_tx(&s.k_full, sizeof s.k);
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.k + c * T.tile_n(), &p.k, &s.k_full, c, first_key, tile.head_k, sequence.batch);
    mbarrier_expect_tx(&s.v_full, sizeof s.v);
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64)
      tma_load(s.v + c * T.tile_n(), &p.v, &s.v_full, c, first_key, tile.head_k, sequence.batch);
#pragma unroll 1
    while (steps.left > 0) next_step();
  }
  mbarrier_wait(&s.kv_empty, (taken & 1) ^ 1);
  s.tile.n_block = -1;
  mbarrier_arrive(&s.k_full);
}

// Says when a warpgroup may add its part of a step's dq to the m_block's sums. n_blocks do that in their order,
// whatever the order of CTAs: a ticket counts those that have added, the first one finds 0 and writes. Tiles are taken
// in the order of n_blocks too, so a CTA waits for those alone that have begun before it.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void order_dq(const BackwardParams& p, BackwardShared<T>& s, int index) {
  u32 added = 0;
  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_full, taken & 1);
    const KeyTile tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (KeySteps steps = steps_of<T>(p, tile); steps.left > 0; steps.advance(), ++added) {
      const i64 at = m_block_at(p, sequence, steps.head, steps.m_block);
      int* const ticket = p.dq_tickets + T.dq_tickets() * at + index;
      const int before = tile.n_block - first_n_block<T>(p, sequence, steps.m_block);
      s.dq_to[index] = reinterpret_cast<float4*>(p.dq_sums + at * T.dq_floats() + index * T.dq_part_floats());
      s.dq_is_first[index] = before == 0;
      while (load_acquire(ticket) < before) {
      }
      mbarrier_arrive(&s.dq_turn[index]);
      mbarrier_wait(&s.dq_added[index], added & 1);
      add_release(ticket, 1);
    }
  }
}
