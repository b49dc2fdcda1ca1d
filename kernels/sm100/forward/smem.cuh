// Shared memory of a CTA of the Blackwell forward: work tiles, operand blocks, barriers.
#pragma once
#include "config/sm100_forward.h"
#include "device/chunk.cuh"
#include "device/cta_pair.cuh"
#include "device/work_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

constexpr int kWorkSlots = 3;  // work tiles in flight

// A work tile with its one or two tiles of 128 rows, as load() publishes it to the CTA.
struct Sm100Work : WorkTile {
  enum class Kind { tiles, nothing, over } kind;
  int begin, end;          // n_blocks of all tiles
  int last_n_block;        // last n_block of the first iteration
  int begins[2], ends[2];  // per tile; a tile without rows has an empty range
  int unmasked_begins[2], unmasked_ends[2];

  TANDEM_DEVICE bool has(int i) const { return begins[i] < ends[i]; }
};

template <Sm100ForwardConfig T>
struct SharedStorage {
  alignas(1024) u16 q[T.q_stage()][T.k_blocks() * T.kTileBlockBytes / 2];
  alignas(1024) u16 out[T.o_blocks()][T.kTileBlockBytes / 2];
  alignas(1024) u16 ring[T.ring_slots()][T.block_bytes() / 2];
  float sum[T.q_stage()][T.kTileM], row_max[T.q_stage()][T.kTileM];
  Sm100Work work[kWorkSlots];
  int overflowed_there[kWorkSlots];  // retry requests of the other CTA
  alignas(16) Chunk clc_response[2];
  u32 tensor_memory;
  // A barrier's name states what is true after the wait. Barriers expect 1 arrival unless noted. In a CTA pair,
  // barriers marked * are in the leader and receive the arrivals of both CTAs.
  alignas(8) u64 work_full[kWorkSlots], work_empty[kWorkSlots];  // work_empty: all warps except load()'s
  u64 ring_tma_full[T.ring_slots()], ring_empty[T.ring_slots()];
  u64 q_tma_full[T.q_stage()], q_empty[T.q_stage()];
  u64 s_ready[T.kScoreSlots], p_ready[T.kScoreSlots][2];  // p_ready *: 4 warps, for each part
  u64 o_added[T.q_stage()];                               // one tile, T.wait_products: PV of an iteration is complete
  u64 sum_ready[T.q_stage()], sum_empty[T.q_stage()];     // 4 warps each
  u64 o_full[T.q_stage()], o_empty[T.q_stage()];          // o_empty *: 4 warps
  u64 clc_full[2];
  u64 overflow_signalled[T.two_cta ? kWorkSlots : 1];  // CTA pair: overflowed_there is valid
  // Operands that have arrived in both CTAs and are zeroed beyond the sequence.
  u64 ring_peer_full[T.has_relay_warp() ? T.ring_slots() : 1], q_peer_full[T.q_stage()];  // *

  TANDEM_DEVICE u64* ring_full(u32 slot) { return T.has_relay_warp() ? &ring_peer_full[slot] : &ring_tma_full[slot]; }
  TANDEM_DEVICE u64* q_full(int i) { return T.has_relay_warp() ? &q_peer_full[i] : &q_tma_full[i]; }
};

// The first row of the CTA's i-th tile, in its sequence.
template <Sm100ForwardConfig T>
TANDEM_DEVICE int first_row_of(const TileCoords& t, int i) {
  return t.m_block * T.tile_m() + i * T.mma_m() + cta_rank<T>() * T.kTileM;
}
template <Sm100ForwardConfig T>
TANDEM_DEVICE void arrive_at_leader(u64* barrier) {
  if constexpr (T.two_cta) {
    mbarrier_arrive_at(barrier, 0);
  } else {
    mbarrier_arrive(barrier);
  }
}
