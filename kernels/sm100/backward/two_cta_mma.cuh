// The products of a CTA pair in the Blackwell backward, issued by one thread of the leader.
//
// A CTA pair multiplies 256 keys at once. dQ has half of the queries in each CTA and all 256 keys, so that halves of dS
// are exchanged. Meanwhile S, dK and the next dP are multiplied:
//
//    load     | mma, for both CTAs  | two warpgroups, 64 queries each | exchange, dq
//    Q''      | S' = K Q''          | dS = P (dP - delta)             | halves of dS to the other CTA
//             | dK += dS Q          | S' is read                      |
//    dO'      | dP' = V dO''        | P' = exp(S' - lse), first half  |
//             | dQ = dS' K          | second half                     |
//             | dV += P' dO'        |                                 | dQ to shared memory
//             | S'' ...             | dS' = P' (dP' - delta)          | added to memory
//
// With wide keys (T.two_cta_ring()) S, dP and dQ share 192 columns of tensor memory. The order is then S', dK, dQ, half
// of dV, dP', half of dV. S' follows when half of dP has been read, and dP' when dQ has been read.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/backward/smem.cuh"

// S, dP, dV and dK have 256 rows, 128 keys in each CTA. dQ has 128 rows, 64 queries in each CTA, and sums over all
// keys. Halves of dS are exchanged while S, dK and the next dP are multiplied. dQ overwrites the next scores, next to
// their P, and is read during dV.
template <Sm100BackwardConfig T>
struct TwoCtaProducts {
  static constexpr int kSteps = T.tile_m / 16;  // products of 16 inner elements, if these are queries
  static constexpr u32 kBlock = T.kBlockBytes;
  static constexpr u32 kScoreProduct = tcgen05_instr_desc(MmaLayout::nt, T.options.f16, T.tile_n(), T.tile_m);
  static constexpr u32 kDkProduct = tcgen05_instr_desc(MmaLayout::nn, T.options.f16, T.tile_n(), T.head_dim);
  static constexpr u32 kDvProduct = tcgen05_instr_desc(MmaLayout::nn, T.options.f16, T.tile_n(), T.head_dim_v);
  static constexpr u32 kDqProduct = tcgen05_instr_desc(MmaLayout::tn, T.options.f16, T.tile_m, T.head_dim);

  SharedStorage<T>& s;
  u32 scores = 0, steps = 0, summed = 0;  // counts over all tiles: S; dP and dV; dK and dQ

  TANDEM_DEVICE static void wait(u64* barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
  }
  // Waits for data that the other CTA has stored or sent.
  TANDEM_DEVICE static void wait_cluster(u64* barrier, u32 parity) {
    mbarrier_wait_cluster(barrier, parity);
    tcgen05_fence_after();
  }
  TANDEM_DEVICE static void wait_peer_full(u64* barrier, u32 parity) {
    T.options.varlen ? wait_cluster(barrier, parity) : wait(barrier, parity);
  }
  // The offset of the c-th 16 columns of an operand with rows along the result. block: bytes of 64 columns.
  TANDEM_DEVICE static u64 in_row(int c, u32 block) { return static_cast<u64>(c / 4 * (block >> 4) + c % 4 * 2); }
  // The offset of the c-th 16 rows of an operand with rows along the inner dimension.
  TANDEM_DEVICE static u64 rows_16(int c) { return static_cast<u64>(c * (2048 >> 4)); }
  TANDEM_DEVICE static u64 by_columns(const u16* at) { return tcgen05_smem_desc(shared_address(at), kBlock, 1024); }
  TANDEM_DEVICE static u64 by_rows(const u16* at) { return tcgen05_smem_desc(shared_address(at), 0, 1024); }
  // Blocks of 32 columns.
  TANDEM_DEVICE static u64 by_32_columns(const u16* at, int rows) {
    return tcgen05_smem_desc(shared_address(at), rows * 64, 512, SmemSwizzle::b64);
  }

  TANDEM_DEVICE void mma_s() {
    wait_peer_full(s.q_full(0), scores & 1);
    wait(&s.dq_empty, (summed & 1) ^ 1);
    const u64 k = by_rows(s.k), q = by_rows(s.q[0]);
#pragma unroll
    for (int c = 0; c < T.head_dim / 16; ++c)
      tcgen05_mma_ss<2>(T.tmem_s(), k + in_row(c, kBlock), q + in_row(c, kBlock / 2), kScoreProduct, c > 0);
    // One commit per product: PTX does not specify which CTAs an empty multicast commit signals.
    tcgen05_commit<2>(s.s_ready);
    ++scores;
  }
  TANDEM_DEVICE void mma_dp() {
    wait_peer_full(s.dout_full(0), steps & 1);
    const u64 v = by_rows(s.v), dout = by_rows(s.dout[0]);
#pragma unroll
    for (int c = 0; c < T.head_dim_v / 16; ++c)
      tcgen05_mma_ss<2>(T.tmem_dp(), v + in_row(c, kBlock), dout + in_row(c, kBlock / 2), kScoreProduct, c > 0);
    tcgen05_commit<2>(&s.dp_ready);
  }
  TANDEM_DEVICE void mma_dv(bool first) {
    wait_peer_full(&s.two_cta.doutt_peer_full, steps & 1);
    const u64 dout = by_columns(s.doutt);
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      constexpr int kOfPart = kSteps / T.p_parts();
      if (c % kOfPart == 0) wait(&s.p_ready[c / kOfPart], steps & 1);
      tcgen05_mma_ts<2>(T.tmem_dv(), T.tmem_operand(T.tmem_s(), c), dout + rows_16(c), kDvProduct, !first || c > 0);
    }
    tcgen05_commit<2>(&s.two_cta.doutt_empty);
    if (T.wait_products) wait(&s.two_cta.doutt_empty, steps & 1);
    ++steps;
  }
  TANDEM_DEVICE void mma_dk(bool first) {
    wait_peer_full(&s.two_cta.qt_peer_full, summed & 1);
    wait(&s.ds_ready, summed & 1);
    const u64 q = by_columns(s.qt);
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
      tcgen05_mma_ts<2>(T.tmem_dk(), T.tmem_operand(T.tmem_ds(), c), q + rows_16(c), kDkProduct, !first || c > 0);
    tcgen05_commit<2>(&s.two_cta.qt_empty);
    if (T.wait_products) wait(&s.two_cta.qt_empty, summed & 1);
  }
  TANDEM_DEVICE void mma_dq(bool last) {
    mbarrier_expect_tx(&s.two_cta.ds_tma_full, T.kBlockBytes);
    wait(&s.two_cta.ds_written, summed & 1);
    wait(&s.two_cta.ds_tma_full, summed & 1);
    wait_cluster(&s.two_cta.ds_peer_full, summed & 1);
    if (last) {
      wait(&s.dq_empty, (summed & 1) ^ 1);  // overwrites the previous dQ
    } else {
      wait(&s.s_empty, (scores & 1) ^ 1);  // overwrites the next iteration's scores
    }
    const u64 ds = by_columns(s.ds), k = T.two_cta_ring() ? by_32_columns(s.kt, T.tile_n()) : by_columns(s.kt);
#pragma unroll
    for (int c = 0; c < T.tile_n() / 16; ++c)
      tcgen05_mma_ss<2>(T.tmem_dq(), ds + rows_16(c), k + rows_16(c) / (T.two_cta_ring() ? 2 : 1), kDqProduct, c > 0);
    tcgen05_commit<2>(&s.dq_ready);
    ++summed;
  }

  // Multiplies a tile with `count` iterations.
  TANDEM_DEVICE void multiply(int count) {
    mma_s();
    mma_dp();
    mma_dv(true);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool last = i + 1 == count;
      if (!last) mma_s();
      mma_dk(i == 0);
      if (!last) mma_dp();
      mma_dq(last);
      if (!last) mma_dv(false);
    }
  }
};

// The products with a ring of queries and dout, as a visitor of in_pair_order().
template <Sm100BackwardConfig T>
struct TwoCtaRingProducts : TwoCtaProducts<T> {
  using Base = TwoCtaProducts<T>;
  using Base::s, Base::summed, Base::wait, Base::rows_16;

  PipelineState<T.ring_blocks()> ring;
  int count = 0;  // iterations of the tile

  // Issues multiply(block) after the next block has arrived; the block is free when the product is complete.
  template <class Multiply>
  TANDEM_DEVICE void with_block(Multiply&& multiply) {
    Base::wait_peer_full(s.ring_full(ring.index), ring.phase);
    multiply(s.ring[ring.index]);
    tcgen05_commit<2>(&s.ring_empty[ring.index]);
    if (T.wait_products) wait(&s.ring_empty[ring.index], ring.phase);
    ring.advance();
  }
  // Computes S or dP: keys in rows, summed over columns.
  TANDEM_DEVICE void multiply_rows(u32 to, const u16* keys, int columns) {
#pragma unroll 1
    for (int c = 0; c < columns; c += 64) {
      with_block([&](const u16* block) {
        const u64 a = Base::by_rows(keys + c * T.kCtaKeys), b = Base::by_rows(block);
#pragma unroll
        for (int k = 0; k < 4; ++k) tcgen05_mma_ss<2>(to, a + 2 * k, b + 2 * k, Base::kScoreProduct, c > 0 || k > 0);
      });
    }
  }
  struct Steps {
    int left;
    TANDEM_DEVICE void advance() { --left; }
  };
  TANDEM_DEVICE void scores(const Steps&) {
    wait(&s.dq_empty, (summed & 1) ^ 1);
    wait(&s.two_cta.dp_half_empty, (Base::scores & 1) ^ 1);
    multiply_rows(T.tmem_s(), s.k, T.head_dim);
    tcgen05_commit<2>(s.s_ready);
    ++Base::scores;
  }
  TANDEM_DEVICE void dv(const Steps& step, int half) {
    wait(&s.p_ready[half], (Base::scores & 1) ^ 1);
    with_block([&](const u16* block) {
      const u64 dout = Base::by_columns(block);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        tcgen05_mma_ts<2>(T.tmem_dv(), T.tmem_operand(T.tmem_s(), 4 * half + k), dout + rows_16(k), Base::kDvProduct,
                          step.left < count || half > 0 || k > 0);
    });
  }
  TANDEM_DEVICE void dp(const Steps&) {
    wait(&s.dq_empty, (summed & 1) ^ 1);
    multiply_rows(T.tmem_dp(), s.v, T.head_dim_v);
    tcgen05_commit<2>(&s.dp_ready);
  }
  TANDEM_DEVICE void dk(const Steps& step) {
    constexpr u32 kProduct = tcgen05_instr_desc(MmaLayout::nn, T.options.f16, T.tile_n(), 64);
    wait(&s.ds_ready, summed & 1);
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64) {
      with_block([&](const u16* block) {
        const u64 q = Base::by_32_columns(block, T.tile_m);
#pragma unroll
        for (int k = 0; k < Base::kSteps; ++k)
          tcgen05_mma_ts<2>(T.tmem_dk() + c, T.tmem_operand(T.tmem_ds(), k), q + rows_16(k) / 2, kProduct,
                            step.left < count || k > 0);
      });
    }
  }
  TANDEM_DEVICE void dq(bool last) { Base::mma_dq(last); }

  TANDEM_DEVICE void multiply(int iterations) {
    count = iterations;
    in_pair_order(Steps{count}, *this);
  }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void mainloop_two_cta_mma(const BackwardParams& p, SharedStorage<T>& s) {
  typename OneOf<T.two_cta_ring(), TwoCtaRingProducts<T>, TwoCtaProducts<T>>::Type products{s};
  for (u32 tile_idx = 0;; ++tile_idx) {
    products.wait_peer_full(&s.k_peer_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    products.wait_peer_full(&s.v_peer_full, tile_idx & 1);
    products.wait_peer_full(&s.two_cta.kt_peer_full, tile_idx & 1);
    const int count = MBlockIterator<T>(p, tile).left;
    if (count > 0) products.multiply(count);
    mbarrier_arrive(&s.kv_empty);
  }
}

// The thread of this role in the other CTA signals the leader when its dS is written and received.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void relay_ds(const BackwardParams& p, SharedStorage<T>& s) {
  u32 steps = 0;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_tma_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    const int count = MBlockIterator<T>(p, tile).left;
#pragma unroll 1
    for (int i = 0; i < count; ++i, ++steps) {
      mbarrier_expect_tx(&s.two_cta.ds_tma_full, T.kBlockBytes);
      mbarrier_wait(&s.two_cta.ds_written, steps & 1);
      mbarrier_wait(&s.two_cta.ds_tma_full, steps & 1);
      arrive_at_leader<T>(&s.two_cta.ds_peer_full, true);
    }
    mbarrier_arrive(&s.kv_empty);
  }
}
