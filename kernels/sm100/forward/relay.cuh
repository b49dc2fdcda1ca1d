// The relay warp of the Blackwell forward, with T.has_relay_warp().
#pragma once
#include "device/pipeline_state.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm100/forward/smem.cuh"

// Zeroes rows [begin, T.tile_n) of an n_block's values, after they have arrived.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void zero_v_tail(SharedStorage<T>& s, PipelineState<T.ring_slots()> ring, int begin) {
  constexpr int kRows = T.v_block_rows(), kRowChunks = 8;  // 16 bytes each, per row of 64 columns
  for (int b = 0; b < T.v_blocks(); ++b, ring.advance()) {
    mbarrier_wait(&s.ring_tma_full[ring.index], ring.phase);
    auto* chunks = reinterpret_cast<Chunk*>(s.ring[ring.index]);
    const int first = max(0, begin - b * kRows) * kRowChunks;
    for (int c = 0; c < T.blocks(T.columns_v()); ++c)
      for (int i = first + threadIdx.x % 32; i < kRows * kRowChunks; i += 32) chunks[c * kRows * kRowChunks + i] = {};
  }
  fence_proxy_async();
  __syncwarp();
}

// Signals the MMA warp when operands have arrived. Values beyond the sequence are zeroed first, because they are
// undefined and 0 * NaN is NaN.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void relay(SharedStorage<T>& s) {
  const int lane = threadIdx.x % 32;
  PipelineState<T.ring_slots()> ring;
  PipelineState<kWorkSlots> slot;
  u32 q_parity = 0;  // one bit per tile
  auto pass = [&](u64* tma_full, u64* peer_full, u32 parity, bool zeroed = false) {
    mbarrier_wait(tma_full, parity);
    __syncwarp();
    if (lane > 0) return;
    if (T.two_cta && zeroed) {
      mbarrier_release_at(peer_full, 0);
    } else {
      arrive_at_leader<T>(peer_full);
    }
  };
  auto pass_blocks = [&](int blocks, bool zeroed = false) {
#pragma unroll 1
    for (int b = 0; b < blocks; ++b, ring.advance())
      pass(&s.ring_tma_full[ring.index], &s.ring_peer_full[ring.index], ring.phase, zeroed);
  };
  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.index], slot.phase);
    const Sm100Work& work = s.work[slot.index];
    const Sm100Work::Kind kind = work.kind;
    if (kind == Sm100Work::Kind::over) break;
    if (kind == Sm100Work::Kind::nothing) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&s.work_empty[slot.index]);
      continue;
    }
    const int begin = work.begin, end = work.end, left = work.coords.k_len - work.last_n_block * T.tile_n;
    const int has = work.has(0) | (T.q_stage() > 1 && work.has(1)) << 1;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.index]);
    for (int n_block = end - 1; n_block >= begin; --n_block) {
      pass_blocks(T.k_blocks());
      for (int i = 0; i < T.q_stage() && n_block == end - 1; ++i) {
        if (!(has >> i & 1)) continue;
        pass(&s.q_tma_full[i], &s.q_peer_full[i], q_parity >> i & 1);
        q_parity ^= 1 << i;
      }
      const bool zeroes = T.options.varlen && n_block == end - 1 && left < T.tile_n;
      if (zeroes) zero_v_tail<T>(s, ring, max(0, left));
      pass_blocks(T.v_blocks(), zeroes);
    }
  }
}
