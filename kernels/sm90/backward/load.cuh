// The non-MMA warps, one thread of each: one takes tiles and loads, the rest add dq to global memory.
#pragma once
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "sm90/backward/shared_plan.cuh"

template <Sm90BackwardConfig T>
TANDEM_DEVICE int next_tile(const BackwardParams& p, BackwardShared<T>& s, u32 taken) {
  const auto take = [&p] { return atomicAdd(p.counter, 1); };
  if constexpr (T.pair) {
    return next_tile_of_pair<T>(s.pair, taken, take);
  } else {
    return take();
  }
}

// Loads the CTA's keys or values with this number of columns.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void load_keys(u16* to, const TensorMap* map, u64* full, int columns, int first_key, int head,
                             int batch) {
#pragma unroll 1
  for (int c = 0; c < columns; c += 64) {
#pragma unroll
    for (int row = 0; row < T.cta_keys(); row += T.k_box())
      tma_load(to + c * T.cta_keys() + row * 64, map, full, c, first_key + row, head, batch);
  }
}

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
  const int tiles = tiles_of_launch<T>(p);
  u32 taken = 0;
  for (u32 asked = 0;; ++asked) {
    const int n = next_tile<T>(p, s, asked);
    if (n >= tiles) break;
    const KeyTile tile = key_tile_at<T>(p, n);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    if (pass_empty_tiles<T>(p, p.counter, n, tile, sequence)) continue;
    const int rank = rank_of_cta<T>(), first_of_all = sequence.k_begin + tile.n_block * T.tile_n();
    const int first_key = first_of_all + rank * T.cta_keys();
    KeySteps<T> steps(p, tile);
    auto next_step = [&] {
      load_step(sequence, steps.head, steps.m_block);
      steps.advance();
    };
    if (steps.left > 0) next_step();  // overlaps the previous tile's epilogue
    mbarrier_wait(&s.kv_empty, (taken & 1) ^ 1);
    s.tile = tile;
    u32 bytes = sizeof s.k;
    if constexpr (T.pair) bytes += sizeof s.pair.k;
    mbarrier_expect_tx(&s.k_full, bytes);
    load_keys<T>(s.k, &p.k, &s.k_full, T.head_dim, first_key, tile.head_k, sequence.batch);
    if constexpr (T.pair) {
      const int other_key = first_of_all + (rank ^ 1) * T.cta_keys();
#pragma unroll 1
      for (int c = 0; c < T.pair_columns(); c += 64)
        tma_load(s.pair.k + c * T.cta_keys(), &p.k, &s.k_full, T.pair_column(rank, c), other_key, tile.head_k,
                 sequence.batch);
    }
    mbarrier_expect_tx(&s.v_full, sizeof s.v);
    load_keys<T>(s.v, &p.v, &s.v_full, T.head_dim_v, first_key, tile.head_k, sequence.batch);
#pragma unroll 1
    while (steps.left > 0) next_step();
    ++taken;
  }
  mbarrier_wait(&s.kv_empty, (taken & 1) ^ 1);
  s.tile = KeyTile{-1};
  mbarrier_arrive(&s.k_full);
}

// Stores dS of each iteration to its place in the strip.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void store_ds(const BackwardParams& p, BackwardShared<T>& s) {
  const Strip strip(p);
  Ring<T.ds_stages()> ring;
  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_full, taken & 1);
    const KeyTile tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (KeySteps<T> steps(p, tile); steps.left > 0; steps.advance(), ring.advance()) {
      mbarrier_wait(&s.ds_full[ring.slot], ring.parity);
      if (p.ds) {
        bulk_store(ds_at<T>(p, sequence, strip, steps.head, steps.m_block, tile.n_block), s.ds[ring.slot],
                   sizeof s.ds[0]);
        tma_store_commit();
        tma_store_wait_read();
      }
      mbarrier_arrive(&s.ds_empty[ring.slot]);
    }
  }
  tma_store_wait();
}

// Sets the address of an m_block's rows of dq in the caller's tensor.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void tell_dq_rows(const BackwardParams& p, BackwardShared<T>& s, int part, const SequenceCoords& sequence,
                                int head, int m_block) {
  const i64 first = m_block * T.tile_m, at = sequence.batch * p.dq_batch + head * p.dq_head + first * p.dq_row;
  s.dq_to[part] = reinterpret_cast<float4*>(static_cast<u16*>(p.dq) + at);
  s.dq_is_first_or_rows[part] = p.dq ? sequence.q_len - static_cast<int>(first) : 0;
}

// Adds the warpgroups' staged dq to the m_block's sums, or signals when their threads may add. A semaphore orders
// n_blocks: the first finds 0 and stores. CTAs take tiles in this order and wait only for earlier ones. Threads
// alternate, because publishing an addition takes about one iteration.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void order_dq(const BackwardParams& p, BackwardShared<T>& s, u32 thread) {
  constexpr int kAtOnce = T.sums_scores ? T.dq_parts() : 1;  // else ptxas spills three registers
  u32 step = 0;
  if (T.staged() && thread == 0) {
    for (u64& turn : s.dq_turn) mbarrier_arrive(&turn);
  }
  for (u32 taken = 0;; ++taken) {
    mbarrier_wait(&s.k_full, taken & 1);
    const KeyTile tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (KeySteps<T> steps(p, tile); steps.left > 0; steps.advance(), ++step) {
#pragma unroll kAtOnce
      for (int part = 0; part < T.dq_parts(); ++part) {
        if ((step * T.dq_parts() + part) % T.dq_threads() != thread) continue;
        u64* const dq_added = &s.dq_added[part][step % T.dq_threads()];
        const u32 parity = step / T.dq_threads() & 1;
        const i64 at = m_block_at(p, sequence, steps.head, steps.m_block);
        const int of_all = rank_of_cta<T>() * T.dq_parts() + part;
        int* const ticket = p.dq_tickets + T.dq_tickets() * at + of_all;
        if constexpr (T.single) {
          tell_dq_rows(p, s, part, sequence, steps.head, steps.m_block);
          mbarrier_arrive(&s.dq_turn[part]);
          mbarrier_wait(dq_added, parity);
          continue;
        }
        const int before = n_blocks_before<T>(p, sequence, steps, tile);
        float* const sums = p.dq_sums + at * T.dq_floats() + of_all * T.dq_part_floats();
        if constexpr (!T.staged()) {
          s.dq_to[part] = reinterpret_cast<float4*>(sums);
          s.dq_is_first_or_rows[part] = before == 0;
        }
        while (load_acquire(ticket) < before) {
        }
        if constexpr (T.staged()) {
          mbarrier_wait(dq_added, parity);
          // Earlier additions came through the async proxy, and this one does too.
          fence_proxy_async_global();
          if (before == 0) {
            bulk_store(sums, s.dq[part], sizeof s.dq[0]);
          } else {
            bulk_add(sums, reinterpret_cast<const float*>(s.dq[part]), sizeof s.dq[0]);
          }
          tma_store_commit();
          tma_store_wait_read();
          mbarrier_arrive(&s.dq_turn[part]);
          tma_store_wait();
          fence_proxy_async_global();
        } else {
          mbarrier_arrive(&s.dq_turn[part]);
          mbarrier_wait(dq_added, parity);
        }
        add_release(ticket, 1);
      }
    }
  }
}
