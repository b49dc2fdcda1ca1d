// Shared memory of a CTA of the Blackwell forward: work tiles, operand blocks, barriers.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "shared/sm100_forward.h"
#include "tile/chunk.cuh"
#include "tile/pair.cuh"
#include "tile/work_tile.cuh"

constexpr int kWorkSlots = 3;  // work tiles in flight

// A work tile with its one or two tiles of 128 rows, as load() publishes it to the CTA.
struct Work : WorkTile {
  enum class Kind { tiles, nothing, over } kind;
  int begin, end;          // n_blocks of all tiles
  int last_n_block;        // the first iteration's
  int begins[2], ends[2];  // per tile; empty without rows
  int unmasked_begins[2], unmasked_ends[2];

  TANDEM_DEVICE bool has(int i) const { return begins[i] < ends[i]; }
};

template <Sm100ForwardConfig T>
struct ForwardShared {
  alignas(1024) u16 q[T.q_tiles()][T.k_blocks() * T.kTileBlockBytes / 2];
  alignas(1024) u16 out[T.o_blocks()][T.kTileBlockBytes / 2];
  alignas(1024) u16 ring[T.ring_slots()][T.block_bytes() / 2];
  float sum[T.q_tiles()][T.kTileM], row_max[T.q_tiles()][T.kTileM];
  Work work[kWorkSlots];
  int overflowed_there[kWorkSlots];  // the other CTA's retry requests
  alignas(16) Chunk clc_response[2];
  u32 tensor_memory;
  // A barrier's name states what is true after the wait. Arrivals: 1 unless noted. In a CTA pair, barriers marked * are
  // the leader's and receive the arrivals of both CTAs.
  alignas(8) u64 work_full[kWorkSlots], work_empty[kWorkSlots];  // empty: every warp but load's
  u64 ring_landed[T.ring_slots()], ring_empty[T.ring_slots()];
  u64 q_landed[T.q_tiles()], q_empty[T.q_tiles()];
  u64 s_ready[T.kScoreSlots], p_ready[T.kScoreSlots][2];  // *p: 4 warps, for each part
  u64 o_added[T.q_tiles()];                               // one tile: the PV product of an iteration
  u64 sum_ready[T.q_tiles()], sum_empty[T.q_tiles()];     // 4 warps
  u64 o_full[T.q_tiles()], o_empty[T.q_tiles()];          // *empty: 4 warps
  u64 clc_full[2];
  u64 overflow_told[T.pair ? kWorkSlots : 1];  // CTA pair: overflowed_there is valid
  // Operands that have arrived in both CTAs and are zeroed beyond the sequence.
  u64 ring_relayed[T.relays() ? T.ring_slots() : 1], q_relayed[T.q_tiles()];  // *

  TANDEM_DEVICE u64* ring_full(u32 slot) { return T.relays() ? &ring_relayed[slot] : &ring_landed[slot]; }
  TANDEM_DEVICE u64* q_full(int i) { return T.relays() ? &q_relayed[i] : &q_landed[i]; }
};

// The first row of the CTA's i-th tile, in its sequence.
template <Sm100ForwardConfig T>
TANDEM_DEVICE int first_row_of(const TileCoords& t, int i) {
  return t.m_block * T.tile_m() + i * T.mma_m() + rank_of_cta<T>() * T.kTileM;
}
template <Sm100ForwardConfig T>
TANDEM_DEVICE void arrive_at_leader(u64* barrier) {
  if constexpr (T.pair) {
    mbarrier_arrive_at(barrier, 0);
  } else {
    mbarrier_arrive(barrier);
  }
}
