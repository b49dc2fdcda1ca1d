// The non-MMA warps, one thread of each: one takes tiles and loads, the rest add dq to global memory.
#pragma once
#include "ptx/global.cuh"
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
    load_keys<T>(s.k, &p.k, &s.k_full, T.head_dim, first_key, tile.head_k, sequence.batch);
    if constexpr (T.cluster2()) {
      const int other_key = first_of_all + (rank ^ 1) * T.cta_keys();
#pragma unroll 1
      for (int c = 0; c < T.cluster2_columns(); c += 64)
        tma_load(s.cluster2.k + c * T.cta_keys(), &p.k, &s.k_full, T.cluster2_column(rank, c), other_key, tile.head_k,
                 sequence.batch);
    }
    mbarrier_expect_tx(&s.v_full, sizeof s.v);
    load_keys<T>(s.v, &p.v, &s.v_full, T.head_dim_v, first_key, tile.head_k, sequence.batch);
#pragma unroll 1
    while (steps.left > 0) next_step();
    ++tile_idx;
  }
  mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
  s.tile = NBlockWork{-1};
  mbarrier_arrive(&s.k_full);
}

// Stores dS of each iteration to its place in the strip.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void store_ds(const BackwardParams& p, SharedStorage<T>& s) {
  const DsChunk chunk(p);
  PipelineState<T.ds_stages()> ring;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (MBlockIterator<T> steps(p, tile); steps.left > 0; steps.advance(), ring.advance()) {
      mbarrier_wait(&s.ds_full[ring.index], ring.phase);
      if (p.ds) {
        bulk_store(ds_at<T>(p, sequence, chunk, steps.head, steps.m_block, tile.n_block), s.ds[ring.index],
                   sizeof s.ds[0]);
        tma_store_commit();
        tma_store_wait_read();
      }
      mbarrier_arrive(&s.ds_empty[ring.index]);
    }
  }
  tma_store_wait();
}

// Sets the address of an m_block's rows of dq in the caller's tensor.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void signal_dq_rows(const BackwardParams& p, SharedStorage<T>& s, int part,
                                  const SequenceCoords& sequence, int head, int m_block) {
  const i64 first = m_block * T.tile_m, at = sequence.batch * p.dq_batch + head * p.dq_head + first * p.dq_row;
  s.dq_to[part] = reinterpret_cast<float4*>(static_cast<u16*>(p.dq) + at);
  s.dq_is_first_or_rows[part] = p.dq ? sequence.q_len - static_cast<int>(first) : 0;
}

// Adds the warpgroups' staged dq to the m_block's sums, or signals when their threads may add. A semaphore orders
// n_blocks: the first finds 0 and stores. CTAs take tiles in this order and wait only for earlier ones. Threads
// alternate, because publishing an addition takes about one iteration.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void dq_accumulate_warp(const BackwardParams& p, SharedStorage<T>& s, u32 thread) {
  constexpr int kAtOnce = T.captured_per_score ? T.dq_parts() : 1;  // else ptxas spills three registers
  u32 step = 0;
  if (T.staged() && thread == 0) {
    for (u64& turn : s.dq_slot_free) mbarrier_arrive(&turn);
  }
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    mbarrier_arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (MBlockIterator<T> steps(p, tile); steps.left > 0; steps.advance(), ++step) {
#pragma unroll kAtOnce
      for (int part = 0; part < T.dq_parts(); ++part) {
        if ((step * T.dq_parts() + part) % T.dq_threads() != thread) continue;
        u64* const dq_slot_full = &s.dq_slot_full[part][step % T.dq_threads()];
        const u32 parity = step / T.dq_threads() & 1;
        const i64 at = m_block_at(p, sequence, steps.head, steps.m_block);
        const int of_all = cta_rank<T>() * T.dq_parts() + part;
        int* const semaphore = p.dq_semaphore + T.dq_semaphores() * at + of_all;
        if constexpr (T.single_n_block) {
          signal_dq_rows(p, s, part, sequence, steps.head, steps.m_block);
          mbarrier_arrive(&s.dq_slot_free[part]);
          mbarrier_wait(dq_slot_full, parity);
          continue;
        }
        const int before = count_n_blocks_before<T>(p, sequence, steps, tile);
        float* const sums = p.dq_accum + at * T.dq_floats() + of_all * T.dq_part_floats();
        if constexpr (!T.staged()) {
          s.dq_to[part] = reinterpret_cast<float4*>(sums);
          s.dq_is_first_or_rows[part] = before == 0;
        }
        while (load_acquire(semaphore) < before) {
        }
        if constexpr (T.staged()) {
          mbarrier_wait(dq_slot_full, parity);
          // Earlier additions came through the async proxy, and this one does too.
          fence_proxy_async_global();
          if (before == 0) {
            bulk_store(sums, s.dq[part], sizeof s.dq[0]);
          } else {
            bulk_add(sums, reinterpret_cast<const float*>(s.dq[part]), sizeof s.dq[0]);
          }
          tma_store_commit();
          tma_store_wait_read();
          mbarrier_arrive(&s.dq_slot_free[part]);
          tma_store_wait();
          fence_proxy_async_global();
        } else {
          mbarrier_arrive(&s.dq_slot_free[part]);
          mbarrier_wait(dq_slot_full, parity);
        }
        add_release(semaphore, 1);
      }
    }
  }
}
