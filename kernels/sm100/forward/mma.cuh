// The products of the Blackwell forward: a thread, of a pair the leader's.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/forward/shared_plan.cuh"
#include "tile/block_mask.cuh"
#include "tile/ring.cuh"

// Probabilities that wait for their product with the values.
template <Sm100ForwardConfig T>
struct Pending {
  bool any = false, first, last;  // first, last: of the steps of its tile
  Ring<T.score_slots()> s_ring;
};

template <Sm100ForwardConfig T>
TANDEM_DEVICE void mma(const ForwardParams& p, ForwardShared<T>& s) {
  constexpr int kCtas = T.ctas(), kTiles = T.q_tiles(), kRows = T.mma_m();
  Ring<T.ring_slots()> ring;
  Ring<kWorkSlots> slot;
  Ring<T.score_slots()> s_ring[kTiles];
  u32 q_parity[kTiles] = {}, o_parity[kTiles];
  Pending<T> pending[kTiles];
  Ring<T.ring_slots()> values;  // of the pending products
  bool any_pending = false;
  const u64 q = tcgen05_smem_desc(shared_address(s.q), 0, 1024), k = tcgen05_smem_desc(shared_address(s.ring), 0, 1024);
  const u64 v = tcgen05_smem_desc(shared_address(s.ring), T.v_block_rows() * 128, 1024);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) o_parity[i] = 1;

  auto wait = [](u64* barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
  };
  auto wait_for_block = [&](Ring<T.ring_slots()> at) {
    if constexpr (T.pair && T.varlen) {  // the other CTA's relay may have zeroed values
      mbarrier_wait_cluster(s.ring_full(at.slot), at.parity);
      tcgen05_fence_after();
    } else {
      wait(s.ring_full(at.slot), at.parity);
    }
  };
  auto mma_qk = [&](int i, Ring<T.ring_slots()> at) {
    const int scores = kTiles > 1 ? i : s_ring[i].slot;
#pragma unroll
    for (int b = 0; b < T.k_blocks(); ++b, at.advance()) {
      wait_for_block(at);
      const u64 k_b = k + at.slot * (T.block_bytes() >> 4), q_b = q + (i * T.k_blocks() + b) * (T.kTileBlockBytes >> 4);
#pragma unroll
      for (int c = 0; c < 4 && 4 * b + c < T.head_dim / 16; ++c)
        tcgen05_mma_ss<kCtas>(T.tmem_s(scores), q_b + c * 2, k_b + c * 2,
                              tcgen05_instr_desc(Layout::nt, T.f16, kRows, T.tile_n), b + c > 0);
    }
    tcgen05_commit<kCtas>(&s.s_ready[scores]);
  };
  auto mma_pv = [&](int i) {
    const Pending<T> it = pending[i];
    const int from = kTiles > 1 ? i : it.s_ring.slot;
    if (it.first) {
      wait(&s.o_empty[i], o_parity[i]);
      o_parity[i] ^= 1;
    }
    Ring<T.ring_slots()> at = values;
    u64 v_b = 0;
#pragma unroll
    for (int c = 0; c < T.tile_n / 16; ++c) {
      if (c * 16 % T.v_block_rows() == 0) {
        if (c > 0) at.advance();
        wait_for_block(at);
        v_b = v + at.slot * (T.block_bytes() >> 4);
      }
      if (c == 0 || c == T.first_part() / 16) wait(&s.p_ready[from][c > 0], it.s_ring.parity);
      tcgen05_mma_ts<kCtas>(T.tmem_o(i), T.tmem_p(from) + 8 * c, v_b + c % (T.v_block_rows() / 16) * (2048 >> 4),
                            tcgen05_instr_desc(Layout::nn, T.f16, kRows, T.o_columns()), !(it.first && c == 0));
    }
    if (kTiles == 1) tcgen05_commit<kCtas>(&s.o_added[i]);
    if (it.last) tcgen05_commit<kCtas>(&s.o_full[i]);
  };
  auto release = [&](Ring<T.ring_slots()> at, int blocks) {
#pragma unroll
    for (int b = 0; b < blocks; ++b, at.advance()) tcgen05_commit<kCtas>(&s.ring_empty[at.slot]);
  };
  // The products of the step before with its values, beside those of this one with its keys: begin_scores(i) begins the
  // latter and says what is pending then. With one tile the latter come first, as its softmax runs behind.
  auto turn = [&](auto&& begin_scores) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      Pending<T> next;
      if (kTiles == 1) next = begin_scores(i);
      if (pending[i].any) mma_pv(i);
      if (i == kTiles - 1 && any_pending) release(values, T.v_blocks());
      if (kTiles > 1) next = begin_scores(i);
      pending[i] = next;
    }
  };

  for (bool over = false; !over; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Work& work = s.work[slot.slot];
    const bool tiles = work.kind == Work::Kind::tiles;
    over = work.kind == Work::Kind::over;
    // Without tiles one turn is left, in which the last values are multiplied: if it is not over, load() wants to know
    // how they come out.
    const int begin = tiles ? work.begin : 0, end = tiles ? work.end : 1;
    int begins[kTiles], ends[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      begins[i] = tiles ? work.begins[i] : 0;
      ends[i] = tiles ? work.ends[i] : 0;
    }
    [[maybe_unused]] const int* const steps = T.block_mask && tiles ? steps_of<T>(p, work.coords) : nullptr;
    if (!over) mbarrier_arrive(&s.work_empty[slot.slot]);
    [[maybe_unused]] int left[kTiles];  // of a block mask: steps that a tile has still to take part in
#pragma unroll
    for (int i = 0; T.block_mask && i < kTiles; ++i) left[i] = ends[i];
#pragma unroll 1
    for (int n_block = end - 1; n_block >= begin; --n_block) {
      const Ring<T.ring_slots()> keys = ring;
      [[maybe_unused]] u32 step = 0;
      if constexpr (T.block_mask) {
        if (tiles) step = steps[kStepHeader + end - 1 - n_block];
      }
      // Where tile i is in its steps.
      auto takes_part = [&](int i) {
        if constexpr (T.block_mask) return (step & tile_bits<T>(i)) != 0;
        return !(n_block < begins[i] || n_block >= ends[i]);
      };
      auto is_first = [&](int i) { return T.block_mask ? left[i] == ends[i] : n_block == ends[i] - 1; };
      auto is_last = [&](int i) { return T.block_mask ? left[i] == 1 : n_block == begins[i]; };
      turn([&](int i) {
        if (!takes_part(i)) return Pending<T>();
        if (is_first(i)) {
          wait(s.q_full(i), q_parity[i]);
          q_parity[i] ^= 1;
        }
        mma_qk(i, keys);
        if (is_last(i)) tcgen05_commit<kCtas>(&s.q_empty[i]);
        const Pending<T> now{true, is_first(i), is_last(i), s_ring[i]};
        if constexpr (T.block_mask) --left[i];
        s_ring[i].advance();
        return now;
      });
      any_pending = tiles;
      if (!tiles) break;
      release(keys, T.k_blocks());
#pragma unroll
      for (int b = 0; b < T.k_blocks(); ++b) ring.advance();
      values = ring;
#pragma unroll
      for (int b = 0; b < T.v_blocks(); ++b) ring.advance();
    }
  }
}
