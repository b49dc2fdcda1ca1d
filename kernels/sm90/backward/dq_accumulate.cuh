// Accumulates dq in float32, ordered by semaphores. MMA warpgroups stage dq of an iteration (accumulate_dq), and one
// thread per part adds it to global memory (dq_accumulate_warp).
#pragma once
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/warpgroup_tile.cuh"

// Sets the address of an m_block's rows of dq in the caller's tensor.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void signal_dq_rows(const BackwardParams& p, SharedStorage<T>& s, int part,
                                  const SequenceCoords& sequence, int head, int m_block) {
  const i64 first = m_block * T.tile_m, at = dq_row_at(p, sequence.batch, first, head);
  s.dq_to[part] = reinterpret_cast<float4*>(static_cast<u16*>(p.dq) + at);
  s.dq_is_first_or_rows[part] = p.dq ? sequence.q_len - static_cast<int>(first) : 0;
}

// Adds the warpgroups' staged dq to the m_block's sums, or signals when their threads may add. A semaphore orders
// n_blocks: the first n_block finds 0 and stores. CTAs take tiles in this order and wait only for earlier tiles.
// Threads alternate, because publishing an addition takes about one iteration.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void dq_accumulate_warp(const BackwardParams& p, SharedStorage<T>& s, u32 thread) {
  constexpr int kAtOnce = T.captured_per_score ? T.dq_parts() : 1;  // else ptxas spills three registers
  // Else a thread could overwrite s.dq_to before the warpgroup has read the other thread's.
  static_assert(T.staged() || T.dq_parts() % T.dq_threads() == 0, "one thread signals all iterations of a part");
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
        const i64 at = dq_block_at(constant<T>, p, m_block_at(p, sequence, steps.head, steps.m_block),
                                   dq_split_of(constant<T>, p, tile, wrap_of<T>(steps)));
        const int of_all = cta_rank<T>() * T.dq_parts() + part;
        int* const semaphore = p.dq_semaphore + dq_semaphore_at(constant<T>, at, of_all);
        if constexpr (T.single_n_block) {
          signal_dq_rows(p, s, part, sequence, steps.head, steps.m_block);
          mbarrier_arrive(&s.dq_slot_free[part]);
          mbarrier_wait(dq_slot_full, parity);
          continue;
        }
        const int before = count_n_blocks_before<T>(p, sequence, steps, tile);
        float* const sums = p.dq_accum + dq_sums_at(constant<T>, at) + dq_part_at(constant<T>, of_all);
        if constexpr (!T.staged()) {
          s.dq_to[part] = reinterpret_cast<float4*>(sums);
          s.dq_is_first_or_rows[part] = before == 0;
        }
        while (load_acquire(semaphore) < before) {
        }
        if constexpr (T.staged()) {
          mbarrier_wait(dq_slot_full, parity);
          // The async proxy wrote the earlier additions, and it also writes this addition.
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

// Stores dq of an iteration of the only n_block.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void store_dq(const float (&dq)[T.dq_columns() / 2], const WarpgroupTile<T>& tile) {
  const BackwardParams& p = tile.p;
  const int index = tile.thread.index, rows = tile.s.dq_is_first_or_rows[index];
  const GradientPair at = T.dq_pair(128 * index + (threadIdx.x & 124), 0);
  store_chunks<T>(dq, p.scale, {tile.s.dq_to[index], 0, p.dq_row, rows, rows, p.head_dim, false}, at.row, at.column);
}

// Stages dq of an iteration for its addition (dq_accumulate_warp).
template <Sm90BackwardConfig T>
TANDEM_DEVICE void accumulate_dq(const float (&dq)[T.dq_columns() / 2], const WarpgroupTile<T>& tile, u32 step) {
  SharedStorage<T>& s = tile.s;
  const int index = tile.thread.index;
  mbarrier_wait(&s.dq_slot_free[index], step & 1);
  if constexpr (T.staged()) {
    if (!T.short_q || warp_uniform(tile.thread.warp) == 0) store_sums<T.dq_part_threads()>(s.dq[index], 0, dq);
    fence_proxy_async();
  } else if constexpr (T.single_n_block) {
    store_dq(dq, tile);
  } else if (warp_any(s.dq_is_first_or_rows[index])) {
    store_sums(s.dq_to[index], 0, dq);
  } else {
    float4* const to = s.dq_to[index] + threadIdx.x % 128;
#pragma unroll
    for (int r = 0; r < T.dq_columns() / 2; r += 4)
      global_add(to + r / 4 * 128, make_float4(dq[r], dq[r + 1], dq[r + 2], dq[r + 3]));
  }
  __syncwarp();
  arrive(&s.dq_slot_full[index][step % T.dq_threads()]);
}
