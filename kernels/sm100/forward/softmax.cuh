// The softmax of the Blackwell forward: one warpgroup per tile.
#pragma once
#include "sm100/forward/softmax_steps.cuh"

// The n_blocks that all rows of a tile see whole.
struct UnmaskedBlocks {
  int begin, end;
};

// With a block mask: the iterations that tile i takes part in.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void go_through_steps(Softmax<T>& steps, const ForwardParams& p, const Sm100Work& work, int i,
                                    const UnmaskedBlocks& unmasked, bool strict) {
  const int* next_step = steps_of<T>(p, work.coords) + kListHeader;
  const int unit = i * T.ctas() + cta_rank<T>();
  [[maybe_unused]] bool shown = false;  // every row has seen a key
  [[maybe_unused]] bool moved = true;   // row_max has moved since e was computed
  [[maybe_unused]] Exponents e(steps.scale, steps.softmax.row_max);
  int ahead = *next_step++;
#pragma unroll 1
  for (int left = warp_uniform(work.end); warp_any(left > 0); --left) {
    const u32 step = warp_uniform(ahead);
    if (left > 1) ahead = *next_step++;
    if ((step & tile_bits<T>(i)) == 0) continue;
    const int n_block = n_block_of(step);
    steps.state = state_of(step, unit);
    const bool whole = steps.state == BlockState::full && n_block < unmasked.end &&
                       (!T.options.bounded_left || n_block >= unmasked.begin);
    // Options that read all scores may hide scores in every iteration.
    constexpr bool kModded = T.has_score_mod() || T.options.dropout;
    if (kModded || warp_any(!whole || (T.lazy_max() && (!shown || strict)))) {
      steps.modded_block(n_block);
      moved = true;
    } else {
      if (T.lazy_max() && warp_any(moved)) e = Exponents(steps.scale, steps.softmax.row_max);
      moved = false;
      steps.unmasked_block(n_block, e);
    }
    shown = shown || whole;
    steps.first = false;
  }
}

template <Sm100ForwardConfig T>
TANDEM_DEVICE void softmax(const ForwardParams& p, SharedStorage<T>& s, int i) {
  const int warp = warp_uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const ScoreScale scale(T.has_score_mod() ? 1.0f : p.scale_log2);
  TmemRows<T> rows(s, i, warp, lane);
  Dropout dropout;
  if constexpr (T.options.dropout) dropout = Dropout(p.dropout);
  u32 sum_parity = 1;
  PipelineState<kWorkSlots> slot;
  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.index], slot.phase);
    Sm100Work& work = s.work[slot.index];
    const auto kind = static_cast<Sm100Work::Kind>(warp_uniform(static_cast<int>(work.kind)));
    if (kind == Sm100Work::Kind::over) break;
    if (kind == Sm100Work::Kind::tiles && warp_any(work.has(i))) {
      const TileCoords& tile = work.coords;
      const int begin = warp_uniform(work.begins[i]), end = warp_uniform(work.ends[i]);
      const int unmasked_begin = warp_uniform(work.unmasked_begins[i]),
                unmasked_end = warp_uniform(work.unmasked_ends[i]);
      const bool strict = warp_any(work.strict);
      const Row row(p, tile, first_row_of<T>(tile, i) + warp * 32 + lane);
      const bool used = row.query < tile.q_len;
      Softmax<T> steps{p,   tile,           scale,        rows,   row, visible_keys<T>(p, tile, row),
                       end, unmasked_begin, unmasked_end, dropout};
      int n_block = end - 1;
      if constexpr (T.options.block_mask) {
        go_through_steps(steps, p, work, i, {unmasked_begin, unmasked_end}, strict);
      } else if constexpr (T.has_score_mod()) {
#pragma unroll 1
        for (; warp_any(n_block >= begin); --n_block) steps.modded_block(n_block);
      } else {
        // The first iteration without a mask may be the first in which a row sees a key.
        int strict_end = T.options.bounded_right ? min(n_block, unmasked_end - T.lazy_max()) : n_block;
        if (T.lazy_max() && strict) strict_end = begin;
        [[maybe_unused]] Exponents e(scale, steps.softmax.row_max);
        if constexpr (Softmax<T>::kOneKind) {
#pragma unroll 1
          for (; warp_any(n_block >= begin); --n_block) steps.masked_block(n_block);
        } else if constexpr (T.options.bounded_left) {
          // A window hides scores at both ends. Consecutive loops would contain the masked iteration twice, and compile
          // longer.
          [[maybe_unused]] bool moved = false;  // row_max, since e was computed
#pragma unroll 1
          for (; warp_any(n_block >= begin); --n_block) {
            if (warp_any(n_block >= strict_end || n_block < unmasked_begin)) {
              steps.masked_block(n_block);
              moved = true;
            } else {
              if (T.lazy_max() && warp_any(moved)) e = Exponents(scale, steps.softmax.row_max);
              moved = false;
              steps.unmasked_block(n_block, e);
            }
          }
        } else {
#pragma unroll 1
          for (; warp_any(n_block >= max(strict_end, begin)); --n_block) steps.masked_block(n_block);
          e = Exponents(scale, steps.softmax.row_max);
#pragma unroll 1
          for (; warp_any(n_block >= begin); --n_block) steps.unmasked_block(n_block, e);
        }
      }
      if (T.lazy_max() && !strict && __any_sync(~0u, used && (steps.overflowed || steps.softmax.overflowed())) &&
          lane == 0)
        work.request_retry();
      mbarrier_wait(&s.sum_empty[i], sum_parity);
      sum_parity ^= 1;
      s.sum[i][warp * 32 + lane] = steps.softmax.final_sum();
      s.row_max[i][warp * 32 + lane] = steps.softmax.row_max;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&s.sum_ready[i]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.index]);
  }
}
