// The products of the Blackwell backward, issued by one thread.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/backward/smem.cuh"

// The order of issue, or T.wait_products, protects products that share columns of tensor memory. S of the next
// iteration overwrites P after dV has read P. dQ overwrites dS after dK has read dS. dP of the next iteration
// overwrites both.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void mainloop_one_cta_mma(const BackwardParams& p, SharedStorage<T>& s) {
  constexpr int kSteps = T.tile_m / 16;  // products of 16 inner elements (queries or keys)
  constexpr u32 kBlock = T.kBlockBytes;
  constexpr u32 kScoreProduct = tcgen05_instr_desc(MmaLayout::nt, T.options.f16, T.kCtaKeys, T.tile_m);
  constexpr u32 kDkProduct = tcgen05_instr_desc(MmaLayout::nn, T.options.f16, T.kCtaKeys, T.dk_columns());
  constexpr u32 kDvProduct = tcgen05_instr_desc(MmaLayout::nn, T.options.f16, T.kCtaKeys, T.dv_columns());
  constexpr u32 kDqProduct = tcgen05_instr_desc(MmaLayout::tn, T.options.f16, T.tile_m, T.dk_columns());
  PipelineState<T.q_stages> q_next, q_ring;
  PipelineState<T.dout_stages> dout_ring;
  u32 steps = 0;  // iterations of all tiles

  auto wait = [](u64* barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
  };
  // The offset of the c-th 16 columns of an operand with rows along the result, in blocks of 64.
  auto in_row = [](int c) { return static_cast<u64>(c / 4 * (kBlock >> 4) + c % 4 * 2); };
  // The offset of the c-th 16 rows of an operand with rows along the inner dimension.
  auto rows_16 = [](int c) { return static_cast<u64>(c * (2048 >> 4)); };
  auto by_columns = [](const u16* at) { return tcgen05_smem_desc(shared_address(at), kBlock, 1024); };
  auto by_rows = [](const u16* at) { return tcgen05_smem_desc(shared_address(at), 0, 1024); };

  auto mma_s = [&] {
    wait(s.q_full(q_next.index), q_next.phase);
    const u64 k = by_rows(s.k), q = by_rows(s.q[q_next.index]);
#pragma unroll
    for (int c = 0; c < T.head_dim / 16; ++c)
      tcgen05_mma_ss<1>(T.tmem_s(), k + in_row(c), q + in_row(c), kScoreProduct, c > 0);
    tcgen05_commit<1>(s.s_ready);
    q_next.advance();
  };
  auto mma_dp = [&] {
    wait(s.dout_full(dout_ring.index), dout_ring.phase);
    if (!T.dq_has_place()) wait(&s.dq_empty, (steps & 1) ^ 1);  // previous iteration's dQ
    const u64 v = by_rows(s.v), dout = by_rows(s.dout[dout_ring.index]);
#pragma unroll
    for (int c = 0; c < T.head_dim_v / 16; ++c)
      tcgen05_mma_ss<1>(T.tmem_dp(), v + in_row(c), dout + in_row(c), kScoreProduct, c > 0);
    tcgen05_commit<1>(&s.dp_ready);
  };
  auto mma_dv = [&](bool first) {
    wait(s.p_ready, steps & 1);
    const u64 dout = by_columns(s.dout[dout_ring.index]);
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
      tcgen05_mma_ts<1>(T.tmem_dv(), T.tmem_operand(T.tmem_s(), c), dout + rows_16(c), kDvProduct, !first || c > 0);
    tcgen05_commit<1>(&s.dout_empty[dout_ring.index]);
    if (T.wait_products) wait(&s.dout_empty[dout_ring.index], dout_ring.phase);
    dout_ring.advance();
  };
  auto mma_dk = [&](bool first) {
    const u64 q = by_columns(s.q[q_ring.index]);
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
      tcgen05_mma_ts<1>(T.tmem_dk(), T.tmem_operand(T.tmem_dp(), c), q + rows_16(c), kDkProduct, !first || c > 0);
    tcgen05_commit<1>(&s.q_empty[q_ring.index]);
    if (T.wait_products) wait(&s.q_empty[q_ring.index], q_ring.phase);
    q_ring.advance();
  };
  auto mma_dq = [&] {
    if (T.dq_has_place()) wait(&s.dq_empty, (steps & 1) ^ 1);
    const u64 ds = by_columns(s.ds), k = by_columns(s.k);
#pragma unroll
    for (int c = 0; c < kSteps; ++c) tcgen05_mma_ss<1>(T.tmem_dq(), ds + rows_16(c), k + rows_16(c), kDqProduct, c > 0);
    tcgen05_commit<1>(&s.dq_ready);
  };

  for (u32 tile_idx = 0;; ++tile_idx) {
    wait(s.k_full(), tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    const int count = MBlockIterator<T>(p, tile).left;
    if (count > 0) {
      mma_s();
      wait(s.v_full(), tile_idx & 1);
      mma_dp();
      mma_dv(true);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const bool more = i + 1 < count;
        if (more) mma_s();
        wait(&s.ds_ready, steps & 1);
        mma_dk(i == 0);
        mma_dq();
        ++steps;
        if (!more) break;
        mma_dp();
        mma_dv(false);
      }
    }
    mbarrier_arrive(&s.kv_empty);
  }
}
