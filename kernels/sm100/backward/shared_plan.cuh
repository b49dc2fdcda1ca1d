// What the warps of a CTA of the Blackwell backward share: the n_block at hand, shared memory, barriers.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "shared/backward.h"
#include "shared/sm100_backward.h"
#include "tile/key_tile.cuh"
#include "tile/pair.cuh"
#include "tile/ring.cuh"

// What a CTA of a pair has besides: it gives a product half of the rows of one operand, and half of the columns of the
// other. So queries and dout come twice: 64 rows of all columns for S and dP, all rows of 64 columns for dK and dV.
template <Sm100BackwardConfig T, bool = T.pair>
struct PairShared {
  static constexpr int kColumns = 64;
  alignas(1024) u16 kt[T.tile_n() * kColumns];  // for dQ: all keys of the pair
  alignas(1024) u16 qt[T.tile_m * kColumns], doutt[T.tile_m * kColumns];
  alignas(1024) u16 ds_sent[T.kCtaKeys * kColumns];  // dS of the other CTA's queries, on its way there
};
template <Sm100BackwardConfig T>
struct PairShared<T, false> {};
template <Sm100BackwardConfig T>
struct PairBarriers {
  // Arrivals: 1; of those marked * one of each CTA, at the leader.
  alignas(8) u64 kt_landed, qt_landed, doutt_landed;
  u64 kt_relayed, qt_relayed, doutt_relayed;  // *
  u64 qt_empty, doutt_empty;
  u64 ds_written;             // of the leader: 4 warps of each CTA have written their own half of dS for dQ
  u64 ds_landed, ds_relayed;  // the other CTA's half of dS is here, and bytes; of the leader: is there too
  u64 tile_told, tile_taken;  // the number of the next tile is here; of the leader: has been read there
  int next_tile;
};

// What products multiply, and their results on the way out. Apart, queries and dout are in one ring.
template <Sm100BackwardConfig T, Sums = T.sums>
struct Operands {
  alignas(1024) u16 k[T.kCtaKeys * T.k_columns()];
  alignas(1024) u16 v[T.kCtaKeys * T.v_columns()];
  alignas(1024) u16 q[T.q_stages][T.q_box_rows() * T.k_columns()];
  alignas(1024) u16 dout[T.dout_stages][T.q_box_rows() * T.v_columns()];
  alignas(1024) u16 ds[T.kCtaKeys * T.tile_m];              // keys in rows; of a pair all keys, half of the queries
  alignas(1024) float dq[T.dq_stages][T.dq_part_floats()];  // as threads hold it
};
template <Sm100BackwardConfig T>
struct Operands<T, Sums::dk> {
  alignas(1024) u16 k[T.kCtaKeys * T.k_columns()];
  alignas(1024) u16 v[T.kCtaKeys * T.v_columns()];
  alignas(1024) u16 ds[T.kCtaKeys * T.tile_m];
  alignas(1024) float dq[T.dq_stages][T.dq_part_floats()];
  alignas(1024) u16 ring[T.ring_blocks()][T.tile_m * 64];
};
template <Sm100BackwardConfig T>
struct Operands<T, Sums::dv> {
  alignas(1024) u16 k[T.kCtaKeys * T.k_columns()];
  alignas(1024) u16 ring[T.ring_blocks()][T.tile_m * 64];  // at the end of a tile the place of dv
};

template <Sm100BackwardConfig T>
struct BackwardShared : PairShared<T>, Operands<T> {
  alignas(16) float stats[T.stats_slots()][2 * T.tile_m];  // of the queries: -lse in log2 units, delta
  // A barrier is named for what is true after waiting for it. Arrivals: 1, but where another number is said. "landed"
  // ones count the bytes that TMA brings, those of "ready" ones without a number and of q_empty and dout_empty are
  // commits of products. Of a pair the leader's alone say what products wait for, and get the arrivals of both CTAs.
  alignas(8) u64 k_landed, v_landed;
  u64 q_landed[T.q_stages], q_empty[T.q_stages], dout_landed[T.dout_stages], dout_empty[T.dout_stages];
  u64 kv_empty;  // kTileWarps: nobody needs the tile, its keys or its values any more
  // In tensor memory. Behind dp_ready all products of the step before are done, of a pair but for dQ.
  u64 s_ready[T.s_slots()], dp_ready;
  u64 p_ready[T.p_parts()], ds_ready;                    // 4 warps of each computing warpgroup
  u64 s_empty;                                           // likewise: apart, for dk, and of a pair: scores were read
  u64 dq_ready[T.dq_pieces()], dq_empty[T.dq_pieces()];  // empty: 4 warps
  u64 sums_ready;                                        // dk and dv of the tile
  u64 stats_landed[2], stats_empty[2];                   // T.stats_alone(); empty: by commit, of a pair unused
  u64 ring_landed[T.ring_blocks()], ring_empty[T.ring_blocks()], ring_relayed[T.ring_blocks()];  // apart
  // What has come and may be multiplied: cleared beyond the sequence.
  u64 k_relayed, v_relayed, q_relayed[T.q_stages], dout_relayed[T.dout_stages];
  PairBarriers<T> pair;
  KeyTile tile;  // told by k_landed, and by k_full(); n_block -1: there are no more
  u32 tensor_memory;

  static constexpr int kTileWarps = 4 * T.kComputing + (T.makes_dk() ? 4 : 0) + 1 + T.relays();

  TANDEM_DEVICE u64* k_full() { return T.relays() ? &k_relayed : &k_landed; }
  TANDEM_DEVICE u64* v_full() { return T.relays() ? &v_relayed : &v_landed; }
  TANDEM_DEVICE u64* q_full(u32 slot) { return T.relays() ? &q_relayed[slot] : &q_landed[slot]; }
  TANDEM_DEVICE u64* dout_full(u32 slot) { return T.relays() ? &dout_relayed[slot] : &dout_landed[slot]; }
  TANDEM_DEVICE u64* ring_full(u32 slot) { return T.relays() ? &ring_relayed[slot] : &ring_landed[slot]; }
};

// The first of the CTA's own keys.
template <Sm100BackwardConfig T>
TANDEM_DEVICE int first_key_of(const KeyTile& tile) {
  return tile.n_block * T.tile_n() + rank_of_cta<T>() * T.kCtaKeys;
}
// written: what the other CTA's products read was written by ordinary stores.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void arrive_at_leader(u64* barrier, bool written = false) {
  if constexpr (!T.pair) {
    mbarrier_arrive(barrier);
  } else if (written) {
    mbarrier_release_at(barrier, 0);
  } else {
    mbarrier_arrive_at(barrier, 0);
  }
}

// Tiles of dv that are apart are counted by themselves.
template <Sm100BackwardConfig T>
TANDEM_DEVICE int* counter_of(const BackwardParams& p) {
  return p.counter + (T.sums == Sums::dv ? 1 : 0);
}

// Of tile `taken`, whole warps alike. n_block -1: there are no more.
template <Sm100BackwardConfig T>
TANDEM_DEVICE KeyTile wait_for_tile(BackwardShared<T>& s, u32 taken) {
  mbarrier_wait(T.pair ? &s.k_landed : s.k_full(), taken & 1);
  return {uniform(s.tile.n_block),
          uniform(s.tile.head_k),
          uniform(s.tile.sequence),
          uniform(s.tile.m_begin),
          uniform(s.tile.m_end),
          0,
          from_diagonal<T>() ? uniform(s.tile.diagonal) : 0};
}

// Apart: calls what loads, clears or multiplies the operands of a tile's products, in the order of their issue. S is
// two steps ahead of the sum, dk or dv, and dP one.
template <Sm100BackwardConfig T, class Visitor>
TANDEM_DEVICE void in_order(const KeySteps<T>& first, Visitor& visit) {
  KeySteps<T> scores = first, dp = first, sum = first;
#pragma unroll 1
  for (int i = 0; i < first.left + 2; ++i) {
    if (i >= 2) {
      visit.sum(sum);
      sum.advance();
    }
    if (T.makes_dk() && i >= 1 && dp.left > 0) {
      visit.dp(dp);
      dp.advance();
    }
    if (scores.left > 0) {
      visit.scores(scores);
      scores.advance();
    }
  }
}
