// The relay warp of the Blackwell forward, with T.relays().
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm100/forward/shared_plan.cuh"
#include "tile/ring.cuh"

// Zeroes rows [begin, T.tile_n) of an n_block's values, which have arrived.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void zero_v_tail(ForwardShared<T>& s, Ring<T.ring_slots()> ring, int begin) {
  constexpr int kRows = T.v_block_rows(), kRowChunks = 8;  // 16 bytes each, per row of 64 columns
  for (int b = 0; b < T.v_blocks(); ++b, ring.advance()) {
    mbarrier_wait(&s.ring_landed[ring.slot], ring.parity);
    auto* chunks = reinterpret_cast<Chunk*>(s.ring[ring.slot]);
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
TANDEM_DEVICE void relay(ForwardShared<T>& s) {
  const int lane = threadIdx.x % 32;
  Ring<T.ring_slots()> ring;
  Ring<kWorkSlots> slot;
  u32 q_parity = 0;  // one bit per tile
  auto pass = [&](u64* landed, u64* relayed, u32 parity, bool zeroed = false) {
    mbarrier_wait(landed, parity);
    __syncwarp();
    if (lane > 0) return;
    if (T.pair && zeroed) {
      mbarrier_release_at(relayed, 0);
    } else {
      arrive_at_leader<T>(relayed);
    }
  };
  auto pass_blocks = [&](int blocks, bool zeroed = false) {
#pragma unroll 1
    for (int b = 0; b < blocks; ++b, ring.advance())
      pass(&s.ring_landed[ring.slot], &s.ring_relayed[ring.slot], ring.parity, zeroed);
  };
  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Work& work = s.work[slot.slot];
    const Work::Kind kind = work.kind;
    if (kind == Work::Kind::over) break;
    if (kind == Work::Kind::nothing) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
      continue;
    }
    const int begin = work.begin, end = work.end, left = work.coords.k_len - work.last_n_block * T.tile_n;
    const int has = work.has(0) | (T.q_tiles() > 1 && work.has(1)) << 1;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
    for (int n_block = end - 1; n_block >= begin; --n_block) {
      pass_blocks(T.k_blocks());
      for (int i = 0; i < T.q_tiles() && n_block == end - 1; ++i) {
        if (!(has >> i & 1)) continue;
        pass(&s.q_landed[i], &s.q_relayed[i], q_parity >> i & 1);
        q_parity ^= 1 << i;
      }
      const bool zeroes = T.varlen && n_block == end - 1 && left < T.tile_n;
      if (zeroes) zero_v_tail<T>(s, ring, max(0, left));
      pass_blocks(T.v_blocks(), zeroes);
    }
  }
}
