// Loads in a CTA pair of the Blackwell backward. With varlen a relay signals the leader when operands have arrived;
// otherwise the leader's barriers count the bytes of both CTAs.
#pragma once
#include "device/chunk.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/smem.cuh"
#include "sm100/operand_load.cuh"

// The rows of a tensor from a first row on.
struct TmaRows {
  const TensorMap* map;
  int row, head, batch;
};

// Each operand of an iteration has one buffer. The product that frees the buffer is S, dP, dV, or dK (issued after the
// next S). -lse and delta have two buffers; dK of the iteration frees a buffer.
template <Sm100BackwardConfig T>
struct TwoCtaLoads {
  const BackwardParams& p;
  SharedStorage<T>& s;
  const int rank = cta_rank<T>();
  u32 steps = 0;  // iterations of all tiles

  TANDEM_DEVICE void load_lse_delta(const SequenceCoords& sequence, const MBlockIterator<T>& step) {
    u64* const full = &s.lse_delta_tma_full[steps & 1];
    mbarrier_expect_tx(full, sizeof s.lse_delta[0]);
    bulk_load(s.lse_delta[steps & 1], p.lse_delta + m_block_at(p, sequence, step.head, step.m_block) * (2 * T.tile_m),
              sizeof s.lse_delta[0], full);
  }
  // Loads boxes of 64 columns, which are contiguous. rows: the number per box.
  TANDEM_DEVICE static void load_boxes(u16* to, const TmaRows& from, u64* full, int rows, int columns) {
#pragma unroll 1
    for (int c = 0; c < columns; c += 64)
      load_operand<T>(to + c * rows, from.map, full, c, from.row, from.head, from.batch);
  }
  // The barrier that counts the bytes of an operand.
  TANDEM_DEVICE static u64* full_of(u64* tma_full, u64* peer_full) { return T.leader_counts() ? peer_full : tma_full; }
  // Loads half of the rows and all columns.
  TANDEM_DEVICE void load_rows(u16* to, const TmaRows& from, u64* full, u64* empty) {
    mbarrier_wait(empty, (steps & 1) ^ 1);
    expect_operand<T>(full, T.kBlockBytes);
    load_boxes(to, {from.map, from.row + 64 * rank, from.head, from.batch}, full, 64, 128);
  }
  // Loads all rows and half of the columns.
  TANDEM_DEVICE void load_columns(u16* to, const TmaRows& from, u64* full, u64* empty) {
    mbarrier_wait(empty, (steps & 1) ^ 1);
    expect_operand<T>(full, T.kBlockBytes);
#pragma unroll 1
    for (int r = 0; r < T.tile_m; r += 64)
      load_operand<T>(to + r * 64, from.map, full, 64 * rank, from.row + r, from.head, from.batch);
  }
  TANDEM_DEVICE void load(const SequenceCoords& sequence, const MBlockIterator<T>& step) {
    const int row = sequence.q_begin + step.m_block * T.tile_m, batch = sequence.batch, head = step.head;
    load_rows(s.q[0], {&p.q, row, head, batch}, full_of(&s.q_tma_full[0], &s.q_peer_full[0]), s.s_ready);
    load_lse_delta(sequence, step);
    load_rows(s.dout[0], {&p.dout, row, head, batch}, full_of(&s.dout_tma_full[0], &s.dout_peer_full[0]), &s.dp_ready);
    load_columns(s.doutt, {&p.dout, row, head, batch}, full_of(&s.two_cta.doutt_tma_full, &s.two_cta.doutt_peer_full),
                 &s.two_cta.doutt_empty);
    load_columns(s.qt, {&p.q, row, head, batch}, full_of(&s.two_cta.qt_tma_full, &s.two_cta.qt_peer_full),
                 &s.two_cta.qt_empty);
    ++steps;
  }
  TANDEM_DEVICE void load_tile(const SequenceCoords& sequence, MBlockIterator<T> step) {
#pragma unroll 1
    for (; step.left > 0; step.advance()) load(sequence, step);
  }
  // Loads half of the columns of all keys.
  TANDEM_DEVICE void load_kt(int first_key, int head, int batch, u64* full) {
    for (int r = 0; r < T.tile_n(); r += T.kCtaKeys)
      load_operand<T>(s.kt + r * 64, &p.k, full, 64 * rank, first_key + r, head, batch);
  }
  // The leader's commits signal free buffers, and must not signal a CTA that has ended.
  TANDEM_DEVICE void wait_until_empty() {
    for (u64* empty : {&s.two_cta.doutt_empty, &s.two_cta.qt_empty}) mbarrier_wait(empty, (steps & 1) ^ 1);
  }
};

// The loads with a ring of queries and dout, as a visitor of in_pair_order().
template <Sm100BackwardConfig T>
struct TwoCtaRingLoads : TwoCtaLoads<T> {
  using Base = TwoCtaLoads<T>;
  using Base::p, Base::s, Base::rank, Base::steps;

  PipelineState<T.ring_blocks()> ring;
  SequenceCoords sequence;

  TANDEM_DEVICE void wait_for_block() { mbarrier_wait(&s.ring_empty[ring.index], ring.phase ^ 1); }
  // Loads a box to the next block.
  TANDEM_DEVICE void load_block(const TensorMap* map, const MBlockIterator<T>& step, int column, int row) {
    u64* const full = Base::full_of(&s.ring_tma_full[ring.index], &s.ring_peer_full[ring.index]);
    wait_for_block();
    expect_operand<T>(full, sizeof s.ring[0]);
    load_operand<T>(s.ring[ring.index], map, full, column, sequence.q_begin + step.m_block * T.tile_m + row, step.head,
                    sequence.batch);
    ring.advance();
  }
  TANDEM_DEVICE void scores(const MBlockIterator<T>& step) {
    // The last block's buffer was free after dK of the iteration that used the buffer of -lse and delta.
    static_assert(T.ring_blocks() <= 2 + T.v_blocks());
    Base::load_lse_delta(sequence, step);
    ++steps;
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64) load_block(&p.q, step, c, 64 * rank);
  }
  TANDEM_DEVICE void dq(bool) {}
  TANDEM_DEVICE void dk(const MBlockIterator<T>& step) {
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64) load_block(&p.qt, step, c + 32 * rank, 0);
  }
  TANDEM_DEVICE void dp(const MBlockIterator<T>& step) {
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64) load_block(&p.dout, step, c, 64 * rank);
  }
  TANDEM_DEVICE void dv(const MBlockIterator<T>& step, int half) { load_block(&p.dout, step, 64 * rank, 64 * half); }

  TANDEM_DEVICE void load_tile(const SequenceCoords& of_tile, const MBlockIterator<T>& first) {
    sequence = of_tile;
    in_pair_order(first, *this);
  }
  TANDEM_DEVICE void load_kt(int first_key, int head, int batch, u64* full) {
    for (int c = 0; c < T.dq_columns(); c += 32) {
      for (int r = 0; r < T.tile_n(); r += T.kCtaKeys)
        load_operand<T>(s.kt + c * T.tile_n() + r * 32, &p.kt, full, T.dq_columns() * rank + c, first_key + r, head,
                        batch);
    }
  }
  TANDEM_DEVICE void wait_until_empty() {
    for (int i = 0; i < T.ring_blocks(); ++i, ring.advance()) wait_for_block();
  }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void load_two_cta(const BackwardParams& p, SharedStorage<T>& s) {
  const int rank = cta_rank<T>();
  typename OneOf<T.two_cta_ring(), TwoCtaRingLoads<T>, TwoCtaLoads<T>>::Type steps{p, s};
  u32 tile_idx = 0;
  for (u32 asked = 0;; ++asked) {
    const int n = next_cta_pair_tile<T>(s.two_cta, asked, [&] { return atomicAdd(counter_of<T>(p), 1); });
    if (n >= p.tiles) break;
    const NBlockWork tile = n_block_work_at<T>(p, n);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    if (skip_empty_tiles<T>(p, counter_of<T>(p), n, tile, sequence)) continue;
    const MBlockIterator<T> step(p, tile);
    mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
    s.tile = tile;
    ++tile_idx;
    if (step.left == 0) {  // no visible key: gradients are zeros
      for (u64* barrier : {&s.k_tma_full, &s.v_tma_full, &s.two_cta.kt_tma_full}) mbarrier_arrive(barrier);
      if (T.leader_counts() && rank == 0) {
        for (u64* barrier : {&s.k_peer_full, &s.v_peer_full, &s.two_cta.kt_peer_full}) mbarrier_arrive(barrier);
      }
      continue;
    }
    const int first = sequence.k_begin + tile.n_block * T.tile_n(), own = first + rank * T.kCtaKeys;
    if (T.leader_counts()) mbarrier_arrive(&s.k_tma_full);  // publishes the tile
    u64* const k_full = steps.full_of(&s.k_tma_full, &s.k_peer_full);
    expect_operand<T>(k_full, sizeof s.k);
    steps.load_boxes(s.k, {&p.k, own, tile.head_k, sequence.batch}, k_full, T.kCtaKeys, T.head_dim);
    u64* const v_full = steps.full_of(&s.v_tma_full, &s.v_peer_full);
    expect_operand<T>(v_full, sizeof s.v);
    steps.load_boxes(s.v, {&p.v, own, tile.head_k, sequence.batch}, v_full, T.kCtaKeys, T.head_dim_v);
    u64* const kt_full = steps.full_of(&s.two_cta.kt_tma_full, &s.two_cta.kt_peer_full);
    expect_operand<T>(kt_full, sizeof s.kt);
    steps.load_kt(first, tile.head_k, sequence.batch, kt_full);
    steps.load_tile(sequence, step);
  }
  mbarrier_wait(&s.kv_empty, (tile_idx & 1) ^ 1);
  s.tile = {-1, 0, 0, 0, 0};
  mbarrier_arrive(&s.k_tma_full);
  if (T.leader_counts() && rank == 0) mbarrier_arrive(&s.k_peer_full);
  steps.wait_until_empty();
}

// An operand in shared memory. used: its rows within the sequence.
struct OperandRows {
  u16* block;
  int rows, columns, used;
};
// Zeroes rows beyond the sequence after an operand has arrived, and signals the leader. kChunks: of a row of a block.
template <Sm100BackwardConfig T, int kChunks = 8>
TANDEM_DEVICE void pass_to_leader(u64* tma_full, u64* peer_full, u32 parity, const OperandRows& at) {
  mbarrier_wait(tma_full, parity);
  const bool clears = T.options.varlen && warp_any(at.used < at.rows);
  if (clears) {
    zero_rows<kChunks>(at.block, at.rows, at.columns, max(0, at.used), threadIdx.x % 32, 32);
    fence_proxy_async();
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive_at_leader<T>(peer_full, clears);
}

// The relay of the ring, as a visitor of in_pair_order().
template <Sm100BackwardConfig T>
struct TwoCtaRingRelay {
  SharedStorage<T>& s;
  int queries = 0;  // number within the sequence
  PipelineState<T.ring_blocks()> ring;

  // Passes a block of 64 rows from `row` on, or of 128 rows and 32 columns.
  template <int kChunks = 8>
  TANDEM_DEVICE void pass(const MBlockIterator<T>& step, int row) {
    pass_to_leader<T, kChunks>(
        &s.ring_tma_full[ring.index], &s.ring_peer_full[ring.index], ring.phase,
        {s.ring[ring.index], 512 / kChunks, 8 * kChunks, queries - step.m_block * T.tile_m - row});
    ring.advance();
  }
  TANDEM_DEVICE void pass_rows(const MBlockIterator<T>& step, int columns) {
#pragma unroll 1
    for (int c = 0; c < columns; c += 64) pass(step, cta_rank<T>() * 64);
  }
  TANDEM_DEVICE void scores(const MBlockIterator<T>& step) { pass_rows(step, T.head_dim); }
  TANDEM_DEVICE void dp(const MBlockIterator<T>& step) { pass_rows(step, T.head_dim_v); }
  TANDEM_DEVICE void dv(const MBlockIterator<T>& step, int half) { pass(step, 64 * half); }
  TANDEM_DEVICE void dq(bool) {}
  TANDEM_DEVICE void dk(const MBlockIterator<T>& step) {
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64) pass<4>(step, 0);
  }
};

// Signals the leader after operands have arrived.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void relay_two_cta(const BackwardParams& p, SharedStorage<T>& s) {
  const int lane = threadIdx.x % 32, own_queries = cta_rank<T>() * T.q_box_rows();
  constexpr int kKtChunks = T.two_cta_ring() ? 4 : 8;
  u32 steps = 0;
  [[maybe_unused]] TwoCtaRingRelay<T> ring{s};
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_tma_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (warp_any(tile.n_block < 0)) break;
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
    MBlockIterator<T> step(p, tile);
    const bool any = warp_any(step.left > 0);
    const int keys = any ? sequence.k_len - tile.n_block * T.tile_n() : T.tile_n();
    const int own = any ? sequence.k_len - first_key_of<T>(tile) : T.kCtaKeys;
    const u32 tile_parity = tile_idx & 1;
    pass_to_leader<T>(&s.k_tma_full, &s.k_peer_full, tile_parity, {s.k, T.kCtaKeys, T.head_dim, own});
    pass_to_leader<T>(&s.v_tma_full, &s.v_peer_full, tile_parity, {s.v, T.kCtaKeys, T.head_dim_v, own});
    pass_to_leader<T, kKtChunks>(&s.two_cta.kt_tma_full, &s.two_cta.kt_peer_full, tile_parity,
                                 {s.kt, T.tile_n(), T.dq_columns(), keys});
    if constexpr (T.two_cta_ring()) {
      ring.queries = sequence.q_len;
      in_pair_order(step, ring);
    } else {
#pragma unroll 1
      for (; warp_any(step.left > 0); step.advance(), ++steps) {
        const u32 parity = steps & 1;
        const int queries = sequence.q_len - step.m_block * T.tile_m, rows = queries - own_queries;
        pass_to_leader<T>(&s.q_tma_full[0], &s.q_peer_full[0], parity, {s.q[0], T.q_box_rows(), T.head_dim, rows});
        pass_to_leader<T>(&s.dout_tma_full[0], &s.dout_peer_full[0], parity,
                          {s.dout[0], T.q_box_rows(), T.head_dim_v, rows});
        pass_to_leader<T>(&s.two_cta.doutt_tma_full, &s.two_cta.doutt_peer_full, parity,
                          {s.doutt, T.tile_m, 64, queries});
        pass_to_leader<T>(&s.two_cta.qt_tma_full, &s.two_cta.qt_peer_full, parity, {s.qt, T.tile_m, 64, queries});
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.kv_empty);
  }
  __syncwarp();
  if (lane == 0) arrive_at_leader<T>(&s.k_peer_full);
}
