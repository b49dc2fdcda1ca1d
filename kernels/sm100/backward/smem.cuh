// Shared memory of a CTA of the Blackwell backward: operands, barriers and the current n_block.
#pragma once
#include "config/backward.h"
#include "config/sm100_backward.h"
#include "device/cta_pair.cuh"
#include "device/n_block_work.cuh"
#include "device/pipeline_state.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// Additional storage of a CTA pair. A product needs half of the rows of one operand and half of the columns of the
// other. Queries and dout are therefore loaded twice: 64 rows of all columns for S and dP, all rows of 64 columns for
// dK and dV.
template <Sm100BackwardConfig T, bool = T.two_cta, bool = T.two_cta_ring()>
struct TwoCtaShared {
  static constexpr int kColumns = 64;
  alignas(1024) u16 kt[T.tile_n() * kColumns];  // operand of dQ: all keys of the pair
  alignas(1024) u16 qt[T.tile_m * kColumns], doutt[T.tile_m * kColumns];
  alignas(1024) u16 ds_sent[T.kCtaKeys * kColumns];  // dS of the other CTA's queries, to be sent
};
// kt has blocks of 32 columns, because a CTA's 96 columns are no multiple of 64.
template <Sm100BackwardConfig T>
struct TwoCtaShared<T, true, true> {
  alignas(1024) u16 kt[T.tile_n() * T.dq_columns()];
  alignas(1024) u16 ds_sent[T.kCtaKeys * 64];
};
template <Sm100BackwardConfig T>
struct TwoCtaShared<T, false, false> {};
template <Sm100BackwardConfig T>
struct TwoCtaBarriers {
  // The TMA barriers expect 1 arrival. The leader's barriers marked * expect one arrival of each CTA, or 1 and the
  // bytes of both with T.leader_counts().
  alignas(8) u64 kt_tma_full, qt_tma_full, doutt_tma_full;
  u64 kt_peer_full, qt_peer_full, doutt_peer_full;  // *
  u64 qt_empty, doutt_empty;
  u64 dp_half_empty;              // 4 warps each; ring: half of dP was read
  u64 ds_written;                 // 4 warps: this CTA's half of dS for its own dQ is written
  u64 ds_tma_full, ds_peer_full;  // dS received (bytes); leader: the peer has its dS
  u64 tile_signalled, tile_read;  // next tile's number received; leader: read by other CTA
  int next_tile;
};

// Operands of products, and results before their stores. With a ring, queries and dout share it.
template <Sm100BackwardConfig T, bool has_ring = T.has_ring(), bool of_dk = T.makes_dk()>
struct Operands {
  alignas(1024) u16 k[T.kCtaKeys * T.k_columns()];
  alignas(1024) u16 v[T.kCtaKeys * T.v_columns()];
  alignas(1024) u16 q[T.q_stages][T.q_box_rows() * T.k_columns()];
  alignas(1024) u16 dout[T.dout_stages][T.q_box_rows() * T.v_columns()];
  alignas(1024) u16 ds[T.kCtaKeys * T.tile_m];              // rows are keys; CTA pair: all keys, half of the queries
  alignas(1024) float dq[T.dq_stages][T.dq_part_floats()];  // in fragment order
};
template <Sm100BackwardConfig T, bool = T.two_pass()>
struct DqSlots {
  alignas(1024) float dq[T.dq_stages][T.dq_part_floats()];
};
template <Sm100BackwardConfig T>
struct DqSlots<T, true> {};
template <Sm100BackwardConfig T>
struct Operands<T, true, true> : DqSlots<T> {
  alignas(1024) u16 k[T.kCtaKeys * T.k_columns()];
  alignas(1024) u16 v[T.kCtaKeys * T.v_columns()];
  alignas(1024) u16 ds[T.kCtaKeys * T.tile_m];
  alignas(1024) u16 ring[T.ring_blocks()][T.ring_block_bytes() / 2];
};
template <Sm100BackwardConfig T>
struct Operands<T, true, false> {
  alignas(1024) u16 k[T.kCtaKeys * T.k_columns()];
  alignas(1024) u16 ring[T.ring_blocks()][T.ring_block_bytes() / 2];  // reused to stage dv at the end of a tile
};

template <Sm100BackwardConfig T>
struct SharedStorage : TwoCtaShared<T>, Operands<T> {
  alignas(16) float lse_delta[T.lse_delta_slots()][2 * T.tile_m];  // per query: -lse in log2 units, delta
  // A barrier's name states what is true after the wait; kernel.cuh lists the arrivals. In a CTA pair only the leader's
  // barriers gate products; they receive the arrivals of both CTAs.
  alignas(8) u64 k_tma_full, v_tma_full;
  u64 q_tma_full[T.q_stages], dout_tma_full[T.dout_stages];
  u64 q_empty[T.q_stages], dout_empty[T.dout_stages];  // unused in a pair: s_ready and dp_ready signal the same
  u64 kv_empty;                                        // kTileWarps arrivals: tile, keys and values were read
  // The results are in tensor memory. After dp_ready all products of the previous iteration are complete (CTA pair:
  // except dQ).
  u64 s_ready[T.s_slots()], dp_ready;
  u64 p_ready[T.p_parts()], ds_ready;                        // 4 warps of each MMA warpgroup
  u64 s_empty;                                               // 4 warps each; dk pass and CTA pair: scores were read
  u64 dq_ready, dq_empty, dq_loaded;                         // empty: 4 warps have loaded dq; loaded: its first columns
  u64 dq_slot_full[T.dq_stages], dq_slot_free[T.dq_stages];  // full: 4 warps; free: the addition has read the slot
  u64 ds_empty;                                              // dk pass: the store to global memory has read dS
  u64 dkv_ready;                                             // two passes: dk or dv of the tile is complete
  u64 lse_delta_tma_full[2], lse_delta_empty[2];             // T.lse_delta_alone(); empty: by commit, unused in a pair
  // barriers of the ring
  u64 ring_tma_full[T.ring_blocks()], ring_empty[T.ring_blocks()], ring_peer_full[T.ring_blocks()];
  // Operands that have arrived and are zeroed beyond the sequence.
  u64 k_peer_full, v_peer_full, q_peer_full[T.q_stages], dout_peer_full[T.dout_stages];
  TwoCtaBarriers<T> two_cta;
  NBlockWork tile;  // valid after k_tma_full and k_full(); n_block -1: no tile
  u32 tensor_memory;

  static constexpr int kTileWarps = 4 * T.kComputing + T.has_relay_warp() + (!T.two_pass() ? 6 : T.makes_dk() ? 2 : 1);

  static constexpr bool kPeerFull = T.has_relay_warp() || T.two_cta;

  TANDEM_DEVICE u64* k_full() { return T.has_relay_warp() ? &k_peer_full : &k_tma_full; }
  TANDEM_DEVICE u64* v_full() { return T.has_relay_warp() ? &v_peer_full : &v_tma_full; }
  TANDEM_DEVICE u64* q_full(u32 slot) { return kPeerFull ? &q_peer_full[slot] : &q_tma_full[slot]; }
  TANDEM_DEVICE u64* dout_full(u32 slot) { return kPeerFull ? &dout_peer_full[slot] : &dout_tma_full[slot]; }
  TANDEM_DEVICE u64* ring_full(u32 slot) { return kPeerFull ? &ring_peer_full[slot] : &ring_tma_full[slot]; }
};

// The index of the CTA's first key.
template <Sm100BackwardConfig T>
TANDEM_DEVICE int first_key_of(const NBlockWork& tile) {
  return tile.n_block * T.tile_n() + cta_rank<T>() * T.kCtaKeys;
}
// written: ordinary stores wrote data that the other CTA's products read.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void arrive_at_leader(u64* barrier, bool written = false) {
  if constexpr (!T.two_cta) {
    mbarrier_arrive(barrier);
  } else if (written) {
    mbarrier_release_at(barrier, 0);
  } else {
    mbarrier_arrive_at(barrier, 0);
  }
}

// The dv pass counts its tiles separately.
template <Sm100BackwardConfig T>
TANDEM_DEVICE int* counter_of(const BackwardParams& p) {
  return p.counter + (T.accumulators == Accumulators::dv ? 3 : 0);
}

// Reads tile `tile_idx`. Whole warps must call this function. n_block -1: no tiles remain.
template <Sm100BackwardConfig T>
TANDEM_DEVICE NBlockWork wait_for_tile(SharedStorage<T>& s, u32 tile_idx) {
  mbarrier_wait(T.two_cta ? &s.k_tma_full : s.k_full(), tile_idx & 1);
  return {warp_uniform(s.tile.n_block),
          warp_uniform(s.tile.head_k),
          warp_uniform(s.tile.sequence),
          warp_uniform(s.tile.m_begin),
          warp_uniform(s.tile.m_end),
          0,
          spt<T>() ? warp_uniform(s.tile.diagonal) : 0};
}

// Two passes: calls the visitor that loads, zeroes or multiplies operands, in the order of issue. S runs two iterations
// before the sum (dk or dv), dP one iteration before.
template <Sm100BackwardConfig T, class Visitor>
TANDEM_DEVICE void in_order(const MBlockIterator<T>& first, Visitor& visit) {
  MBlockIterator<T> scores = first, dp = first, sum = first;
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

// CTA pair with a ring: calls the visitor that loads, zeroes or multiplies operands, in the order of issue. S, dV and
// dP run one iteration before dK and dQ. dV comes in halves of the queries; one half is multiplied while dQ is read.
template <class Iterator, class Visitor>
TANDEM_DEVICE void in_pair_order(const Iterator& first, Visitor& visit) {
  Iterator next = first, sum = first;
#pragma unroll 1
  for (bool more = true; more;) {
    const bool sums = next.left < first.left;
    more = next.left > 0;
    if (more) visit.scores(next);
    if (sums) visit.dk(sum);
    if (sums) visit.dq(!more);
    if (more) visit.dv(next, 0);
    if (more) visit.dp(next);
    if (more) visit.dv(next, 1);
    if (sums) sum.advance();
    next.advance();
  }
}

// One thread calls this function. kernel.cuh lists the arrivals.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void init_barriers(SharedStorage<T>& s) {
  constexpr int kComputeWarps = 4 * T.kComputing;
  constexpr int ctas = T.ctas(), kPeers = T.leader_counts() ? 1 : ctas;
  for (u64* barrier : {&s.k_tma_full, &s.v_tma_full, &s.dp_ready, &s.ds_empty, &s.dkv_ready}) mbarrier_init(barrier, 1);
  for (u64* barrier : {&s.k_peer_full, &s.v_peer_full}) mbarrier_init(barrier, kPeers);
  for (int i = 0; i < T.q_stages; ++i) {
    for (u64* barrier : {&s.q_tma_full[i], &s.q_empty[i]}) mbarrier_init(barrier, 1);
    mbarrier_init(&s.q_peer_full[i], kPeers);
  }
  for (int i = 0; i < T.dout_stages; ++i) {
    for (u64* barrier : {&s.dout_tma_full[i], &s.dout_empty[i]}) mbarrier_init(barrier, 1);
    mbarrier_init(&s.dout_peer_full[i], kPeers);
  }
  if constexpr (T.lse_delta_alone()) {
    for (u64* barrier : {&s.lse_delta_tma_full[0], &s.lse_delta_tma_full[1]}) mbarrier_init(barrier, 1);
  }
  if constexpr (T.two_pass()) {
    for (u64* barrier : {&s.lse_delta_empty[0], &s.lse_delta_empty[1]}) mbarrier_init(barrier, 1);
  }
  if constexpr (T.has_ring()) {
    for (int i = 0; i < T.ring_blocks(); ++i) {
      for (u64* barrier : {&s.ring_tma_full[i], &s.ring_empty[i]}) mbarrier_init(barrier, 1);
      mbarrier_init(&s.ring_peer_full[i], kPeers);
    }
  }
  if constexpr (T.reads_scores_ahead()) mbarrier_init(&s.s_empty, kComputeWarps * ctas);
  if constexpr (T.two_cta) {
    for (u64* barrier : {&s.two_cta.kt_tma_full, &s.two_cta.qt_tma_full, &s.two_cta.doutt_tma_full, &s.two_cta.qt_empty,
                         &s.two_cta.doutt_empty, &s.two_cta.ds_tma_full, &s.two_cta.ds_peer_full,
                         &s.two_cta.tile_signalled, &s.two_cta.tile_read})
      mbarrier_init(barrier, 1);
    for (u64* barrier : {&s.two_cta.kt_peer_full, &s.two_cta.qt_peer_full, &s.two_cta.doutt_peer_full})
      mbarrier_init(barrier, kPeers);
    mbarrier_init(&s.two_cta.ds_written, 4);
    mbarrier_init(&s.two_cta.dp_half_empty, kComputeWarps * ctas);
  }
  mbarrier_init(&s.kv_empty, s.kTileWarps);
  for (int i = 0; i < T.s_slots(); ++i) mbarrier_init(&s.s_ready[i], 1);
  for (int i = 0; i < T.p_parts(); ++i) mbarrier_init(&s.p_ready[i], kComputeWarps * ctas);
  mbarrier_init(&s.ds_ready, kComputeWarps * ctas);
  mbarrier_init(&s.dq_ready, 1);
  mbarrier_init(&s.dq_empty, 4 * ctas);
  mbarrier_init(&s.dq_loaded, 4);
  for (int i = 0; i < T.dq_stages; ++i) {
    mbarrier_init(&s.dq_slot_full[i], 4);
    mbarrier_init(&s.dq_slot_free[i], 1);
  }
  fence_mbarrier_init();
  fence_proxy_async();
}
