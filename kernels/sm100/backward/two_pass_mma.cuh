// The products of wide heads in the Blackwell backward, issued by one thread.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/backward/smem.cuh"

// The order of issue protects products that share columns of tensor memory: dP overwrites dS after dK has read it.
// Barriers protect the threads' reads. ds_ready orders dP after the previous dP has been read.
template <Sm100BackwardConfig T>
struct TwoPassProducts {
  static constexpr int kSteps = T.tile_m / 16;  // products of 16 inner elements (queries or keys)

  SharedStorage<T>& s;
  bool first;                                 // first iteration of the tile
  u32 issued = 0, steps = 0;                  // counts over all tiles: S, and sums
  PipelineState<T.ring_blocks()> ring;        // the blocks of queries and dout
  PipelineState<T.s_slots()> s_ring, p_ring;  // S, and the P computed from it

  TANDEM_DEVICE static void wait(u64* barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
  }
  // The offset of the c-th 16 rows of an operand with rows along the inner dimension.
  TANDEM_DEVICE static u64 rows_16(int c) { return static_cast<u64>(c * (2048 >> 4)); }
  TANDEM_DEVICE static u64 by_columns(const u16* at) {
    return tcgen05_smem_desc(shared_address(at), T.kBlockBytes, 1024);
  }
  TANDEM_DEVICE static u64 by_rows(const u16* at) { return tcgen05_smem_desc(shared_address(at), 0, 1024); }

  // Issues multiply(block) after the next block has arrived; the block is free when the product is complete.
  template <class Multiply>
  TANDEM_DEVICE void with_block(Multiply&& multiply) {
    wait(s.ring_full(ring.index), ring.phase);
    multiply(s.ring[ring.index]);
    tcgen05_commit<1>(&s.ring_empty[ring.index]);
    ring.advance();
  }
  // Computes S or dP: keys in rows, summed over columns.
  TANDEM_DEVICE void multiply_rows(u32 to, const u16* keys, int columns) {
    constexpr u32 kProduct = tcgen05_instr_desc(MmaLayout::nt, T.options.f16, T.kCtaKeys, T.tile_m);
#pragma unroll 1
    for (int c = 0; c < columns; c += 64) {
      with_block([&](const u16* block) {
        const u64 a = by_rows(keys + c * T.kCtaKeys), b = by_rows(block);
#pragma unroll
        for (int k = 0; k < 4; ++k) tcgen05_mma_ss<1>(to, a + 2 * k, b + 2 * k, kProduct, c > 0 || k > 0);
      });
    }
  }
  // Computes dV += P dO or dK += dS Q, 64 columns at a time.
  TANDEM_DEVICE void add_columns(u32 to, u32 operand, int columns) {
    constexpr u32 kProduct = tcgen05_instr_desc(MmaLayout::nn, T.options.f16, T.kCtaKeys, 64);
#pragma unroll 1
    for (int c = 0; c < columns; c += 64) {
      with_block([&](const u16* block) {
        const u64 b = by_columns(block);
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
          tcgen05_mma_ts<1>(to + c, T.tmem_operand(operand, k), b + rows_16(k), kProduct, !first || k > 0);
      });
    }
    first = false;
    tcgen05_commit<1>(&s.lse_delta_empty[steps & 1]);
    if (T.wait_products) wait(&s.lse_delta_empty[steps & 1], steps / 2 & 1);
  }
  TANDEM_DEVICE void scores(const MBlockIterator<T>&) {
    if constexpr (T.makes_dk()) wait(&s.s_empty, (issued & 1) ^ 1);
    multiply_rows(T.tmem_s() + s_ring.index * T.tile_m, s.k, T.head_dim);
    tcgen05_commit<1>(&s.s_ready[s_ring.index]);
    s_ring.advance();
    ++issued;
  }
  TANDEM_DEVICE void dp(const MBlockIterator<T>&) {
    if constexpr (T.makes_dk()) {
      multiply_rows(T.tmem_dp(), s.v, T.head_dim_v);
      tcgen05_commit<1>(&s.dp_ready);
    }
  }
  TANDEM_DEVICE void sum(const MBlockIterator<T>&) {
    if constexpr (T.makes_dk()) {
      wait(&s.ds_ready, steps & 1);
      add_columns(T.tmem_dk(), T.tmem_dp(), T.head_dim);
    } else {
      wait(&s.p_ready[p_ring.index], p_ring.phase);
      add_columns(T.tmem_dv(), T.tmem_s() + p_ring.index * T.tile_m, T.head_dim_v);
      p_ring.advance();
    }
    ++steps;
  }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void mainloop_two_pass_mma(const BackwardParams& p, SharedStorage<T>& s) {
  TwoPassProducts<T> products{s};
  for (u32 tile_idx = 0;; ++tile_idx) {
    products.wait(s.k_full(), tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    if constexpr (T.makes_dk()) products.wait(s.v_full(), tile_idx & 1);
    const MBlockIterator<T> steps(p, tile);
    if (steps.left > 0) {
      products.first = true;
      in_order<T>(steps, products);
      tcgen05_commit<1>(&s.dkv_ready);
    }
    mbarrier_arrive(&s.kv_empty);
  }
}
