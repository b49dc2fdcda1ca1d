// The softmax of the Blackwell forward: a warpgroup for each tile.
#pragma once
#include "ptx/float2.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/shared_plan.cuh"
#include "tile/block_mask.cuh"
#include "tile/coords.cuh"
#include "tile/dropout.cuh"
#include "tile/exp2.cuh"
#include "tile/mask.cuh"
#include "tile/pack.cuh"
#include "tile/ring.cuh"
#include "tile/row.cuh"
#include "tile/row_softmax.cuh"
#include "tile/score_mod.cuh"

constexpr int kChunk = 32;  // columns of scores that are loaded together

// Whether pair n of a chunk goes to the FMA units: spread evenly.
template <Sm100ForwardConfig T>
constexpr bool on_fma_units(int n) {
  return (n + 1) * T.fma_pairs / 16 > n * T.fma_pairs / 16;
}

// A chunk of scores becomes probabilities. plain: all on the exponential unit. Else, where nobody has looked at them,
// largest becomes the largest of those scores that are not. With dropout those are kept that `kept` tells; the sum is
// of all. The chunk that is next begins when this one is nearly done: mixed, both would be late.
template <Sm100ForwardConfig T, bool plain>
TANDEM_DEVICE void exponentials(const float (&x)[kChunk], Exponents& e, Float2* sum, u32 to, float* largest,
                                u32 kept = 0) {
  // From here on there is enough left to do for the chunk behind it to begin.
  constexpr int kNextFrom = !T.lazy_max() ? 8 : T.head_dim > 64 || T.left ? 12 : 10;
  u32 packed[kChunk / 2];
  Float2 known;
#pragma unroll
  for (int n = 0; n < kChunk / 2; ++n) {
    const Float2 scores = float2_of(x[2 * n], x[2 * n + 1]);
    const Float2 y =
        !plain && on_fma_units<T>(n) ? exp2_fma(scores, e, T.lazy_max() ? largest : nullptr) : exp2_mufu(scores, e);
    *sum = *sum + y;
    float low, high;
    split(y, &low, &high);
    if constexpr (T.dropout) {
      low = is_kept(kept, 2 * n) ? low : 0.0f;
      high = is_kept(kept, 2 * n + 1) ? high : 0.0f;
    }
    packed[n] = pack<T>(low, high);
    if (n == kNextFrom) known = *sum;
  }
  if (!plain) e.use_after(known);
  tmem_store(to, packed);
}

// Chunks of a step of which some rows of the warp see some columns, and those that all rows see whole, [0, all_end):
// all or all but one. From one row to the next a bound moves by one at most.
template <Sm100ForwardConfig T>
struct VisibleChunks {
  int some_end, all_end;
  u32 some_bits;  // a bit for each, where there is a left bound

  TANDEM_DEVICE VisibleChunks(const KeyRange& keys, int n_block) {
    const int most_end = __shfl_sync(~0u, keys.end - n_block * T.tile_n, 31);
    some_end = (most_end + 31) >> 5;
    all_end = (most_end - 31) >> 5;
    if constexpr (T.left) {
      const int least = max(uniform(keys.begin - n_block * T.tile_n), 0) >> 5;
      some_bits = bit_range(least, max(some_end - least, 0));
    }
  }
  TANDEM_DEVICE bool some(int c) const { return T.left ? some_bits >> c & 1 : c == 0 || c < some_end; }
  // With both bounds the question costs more than it saves.
  TANDEM_DEVICE bool all(int c) const { return !T.left && c < all_end; }
};

// Scores of chunk c of a step that the row does not see become -infinity.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void apply_mask(float (&x)[kChunk], const KeyRange& keys, int n_block, int c) {
  const int first = c * kChunk, end = keys.end - n_block * T.tile_n;
  u32 visible;
  if constexpr (T.left) {
    const int begin = max(keys.begin - n_block * T.tile_n, first);
    visible = bit_range(begin - first, max(end - begin, 0));
  } else {
    visible = bit_range(0, max(end - first, 0));
  }
#pragma unroll
  for (int n = 0; n < kChunk; ++n) x[n] = masked_score(visible, n, x[n]);
}

TANDEM_DEVICE float max_of(const float (&x)[kChunk], float largest) {
#pragma unroll
  for (int n = 0; n < kChunk; ++n) largest = fmaxf(largest, x[n]);
  return largest;
}

// A warp's rows of tile i in tensor memory, from one step to the next.
template <Sm100ForwardConfig T>
struct TmemRows {
  ForwardShared<T>& s;
  const int i, lane;
  const u32 lanes;
  Ring<T.score_slots()> s_ring;
  int s_slot;  // of this step's scores
  u32 scores, probabilities;

  TANDEM_DEVICE TmemRows(ForwardShared<T>& s, int i, int warp, int lane)
      : s(s), i(i), lane(lane), lanes(static_cast<u32>(warp) * 32 << 16), s_slot(i) {
    scores = probabilities = lanes + T.tmem_s(i);
  }
  TANDEM_DEVICE void wait_s() {
    if (T.q_tiles() == 1) {
      s_slot = s_ring.slot;
      scores = probabilities = lanes + T.tmem_s(s_slot);
    }
    mbarrier_wait(&s.s_ready[s_slot], s_ring.parity);
    s_ring.advance();
    tcgen05_fence_after();
  }
  TANDEM_DEVICE void signal_p(int part) {
    tmem_wait_store();
    tcgen05_fence_before();
    __syncwarp();
    if (lane == 0) arrive_at_leader<T>(&s.p_ready[s_slot][part]);
  }
  TANDEM_DEVICE void signal_p_after(int chunk) {
    if (chunk == T.first_part() / kChunk - 1) signal_p(0);
  }
  // Of this step's probabilities, before they are signalled.
  TANDEM_DEVICE float sum_of_p() const {
    float sum = 0;
    tmem_wait_store();
#pragma unroll 1
    for (int c = 0; c < T.tile_n / 2; c += 16) {
      float x[16];
      tmem_load(x, probabilities + c);
      tmem_wait_load(x);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const u32 two = __float_as_uint(x[n]);
        sum += to_float<T.f16>(static_cast<u16>(two)) + to_float<T.f16>(static_cast<u16>(two >> 16));
      }
    }
    return sum;
  }
  TANDEM_DEVICE void rescale_o(float by) {
    const Float2 alpha = float2_of(by);
    const u32 result = lanes + T.tmem_o(0) + i * T.o_columns();
    if (T.q_tiles() == 1) {  // the values of the step before may still be under way
      mbarrier_wait(&s.o_added[i], s_slot ^ 1);
      tcgen05_fence_after();
    }
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 16) {
      float x[16];
      tmem_load(x, result + c);
      tmem_wait_load(x);
#pragma unroll
      for (int n = 0; n < 16; n += 2) split(float2_of(x[n], x[n + 1]) * alpha, &x[n], &x[n + 1]);
      tmem_store(result + c, x);
    }
  }
};

// The steps of one work tile, for a warp's rows of one of its tiles.
template <Sm100ForwardConfig T>
struct Softmax {
  static constexpr int kChunks = T.tile_n / kChunk;
  // Whether steps that hide and others are of the same code: all scores are looked at, and all exponentials are taken
  // on the exponential unit.
  static constexpr bool kOneKind = !T.lazy_max() && T.fma_pairs == 0;

  const ForwardParams& p;
  const TileCoords& tile;
  const ScoreScale& scale;
  TmemRows<T>& rows;
  const Row row;
  const KeyRange keys;
  const int end, unmasked_begin, unmasked_end;
  const Dropout& dropout;
  RowSoftmax<T.f16> softmax;
  bool overflowed = false;
  StepState state = StepState::full;  // of a block mask: in the step at hand
  bool first = true;                  // and whether it is the tile's first

  // Of the row's scores in chunk c of a step.
  TANDEM_DEVICE u32 draw_kept(int n_block, int c) const {
    if constexpr (!T.dropout) return 0;
    return dropout.of_row(row.query, tile.sequence * p.heads_q + row.head, n_block * T.tile_n + c * kChunk);
  }

  // Moves this row's row_max where a score is too far beyond it.
  TANDEM_DEVICE Exponents update_max(float largest, int n_block) {
    softmax.update_max(largest, scale);
    softmax.step_sum = 0;
    if (softmax.rescale && (T.block_mask ? !first : n_block < end - 1)) rows.rescale_o(softmax.alpha);
    return Exponents(scale, softmax.row_max);
  }

  // A step that looks at its scores, and hides some of them; where there is one kind of steps, if it must.
  TANDEM_DEVICE void masked_block(int n_block) {
    float x[kChunks][kChunk], largest = -kInfinity;
    const VisibleChunks<T> chunks(keys, n_block);
    rows.wait_s();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) tmem_load(x[c], rows.scores + c * kChunk);
    tmem_wait_load(x);
    if (kOneKind && warp_any(n_block >= unmasked_end || n_block < unmasked_begin)) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (chunks.some(c) && !chunks.all(c)) apply_mask<T>(x[c], keys, n_block, c);
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!chunks.some(c)) continue;
      if (!kOneKind && !chunks.all(c)) apply_mask<T>(x[c], keys, n_block, c);
      largest = max_of(x[c], largest);
    }
    Exponents e = update_max(largest, n_block);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (chunks.some(c)) {
        exponentials<T, true>(x[c], e, &softmax.sum, rows.probabilities + c * (kChunk / 2), &largest,
                              draw_kept(n_block, c));
      } else {
        const u32 zeros[kChunk / 2] = {};
        tmem_store(rows.probabilities + c * (kChunk / 2), zeros);
      }
      rows.signal_p_after(c);
    }
    rows.signal_p(1);
  }

  // One that hides nothing. A chain of maxima for each chunk.
  TANDEM_DEVICE void strict_block(int n_block) {
    float x[kChunks][kChunk], largest[kChunks];
    rows.wait_s();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) tmem_load(x[c], rows.scores + c * kChunk);
    tmem_wait_load(x);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) largest[c] = max_of(x[c], -kInfinity);
    static_assert(kChunks == 4);
    Exponents e = update_max(fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3])), n_block);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      exponentials<T, false>(x[c], e, &softmax.sum, rows.probabilities + c * (kChunk / 2), nullptr);
      rows.signal_p_after(c);
    }
    rows.signal_p(1);
  }

  // Of scores from column0 on: those that a block mask hides become -infinity.
  TANDEM_DEVICE void apply_block_mask(float (&x)[kChunk], int column0) const {
    if (state == StepState::full) return;
    if constexpr (T.mask_mod) {
      if (state == StepState::partial) {
        const MaskMod<T> mod(tile, row);
#pragma unroll
        for (int n = 0; n < kChunk; ++n) x[n] = mod(p, column0 + n) ? x[n] : -kInfinity;
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kChunk; ++n) x[n] = -kInfinity;
  }

  // The same of scores that are more than products: they are changed where they lie.
  TANDEM_DEVICE void modded_block(int n_block) {
    const ScoreMod<T> mod(p, tile, row);
    float x[kChunk], largest = -kInfinity;
    rows.wait_s();
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      const int column0 = n_block * T.tile_n + c * kChunk;
      tmem_load(x, rows.scores + c * kChunk);
      tmem_wait_load(x);
      if constexpr (T.softcap) apply_softcap<true>(x, p);
      if constexpr (T.has_score_mod()) {
#pragma unroll
        for (int n = 0; n < kChunk; ++n) x[n] = mod(x[n], p, column0 + n);
      }
      if constexpr (T.block_mask) apply_block_mask(x, column0);
      apply_mask<T>(x, keys, n_block, c);
      largest = max_of(x, largest);
      tmem_store(rows.scores + c * kChunk, x);
    }
    tmem_wait_store();
    Exponents e = update_max(largest, n_block);
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      tmem_load(x, rows.scores + c * kChunk);
      tmem_wait_load(x);
      exponentials<T, true>(x, e, &softmax.sum, rows.probabilities + c * (kChunk / 2), &largest, draw_kept(n_block, c));
      rows.signal_p_after(c);
    }
    rows.signal_p(1);
  }

  // One that hides nothing and does not look before: the sum of the step before says whether the row_max must move.
  TANDEM_DEVICE void lazy_block(Exponents& e) {
    const bool late = softmax.outgrown();
    rows.wait_s();
    if (late) {
      overflowed |= softmax.catch_up(scale);
      e = Exponents(scale, softmax.row_max);
      rows.rescale_o(softmax.alpha);
    }
    // Chunks in registers: with both bounds, or a block mask, there are few.
    constexpr int kHeld = T.left || T.block_mask ? 2 : kChunks;
    float x[kHeld][kChunk], largest = -kInfinity;
    Float2 sum = float2_of(0);
    // From the last to the first: the compiler moves a load down to what needs it, but not over another load.
#pragma unroll
    for (int c = kHeld - 1; c >= 0; --c) tmem_load(x[c], rows.scores + c * kChunk);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c == 0 || kHeld < kChunks) tmem_wait_load(x);
      exponentials<T, false>(x[c % kHeld], e, &sum, rows.probabilities + c * (kChunk / 2), &largest);
      if (c + kHeld < kChunks) tmem_load(x[c % kHeld], rows.scores + (c + kHeld) * kChunk);
      rows.signal_p_after(c);
    }
    softmax.add_step(sum);
    if (softmax.outgrown()) softmax.add_rounding(rows.sum_of_p());
    rows.signal_p(1);
    overflowed |= softmax.overflows(largest, scale);  // its exponential may be anything, and the sum look well
  }

  TANDEM_DEVICE void unmasked_block(int n_block, Exponents& e) {
    if constexpr (T.lazy_max()) {
      lazy_block(e);
    } else {
      strict_block(n_block);
    }
  }
};

// With a block mask: the steps that tile i takes part in.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void go_through_steps(Softmax<T>& steps, const ForwardParams& p, const Work& work, int i,
                                    int unmasked_begin, int unmasked_end, bool strict) {
  const int* next_step = steps_of<T>(p, work.coords) + kStepHeader;
  const int unit = i * T.ctas() + rank_of_cta<T>();
  [[maybe_unused]] bool shown = false;  // a step has shown each row some key
  [[maybe_unused]] bool moved = true;   // the row_max, since e was made
  [[maybe_unused]] Exponents e(steps.scale, steps.softmax.row_max);
  int ahead = *next_step++;
#pragma unroll 1
  for (int left = uniform(work.end); warp_any(left > 0); --left) {
    const u32 step = uniform(ahead);
    if (left > 1) ahead = *next_step++;
    if ((step & tile_bits<T>(i)) == 0) continue;
    const int n_block = n_block_of(step);
    steps.state = state_of(step, unit);
    const bool whole =
        steps.state == StepState::full && n_block < unmasked_end && (!T.left || n_block >= unmasked_begin);
    // Where others look at their scores each step may hide some.
    constexpr bool kModded = T.has_score_mod() || T.dropout;
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
TANDEM_DEVICE void softmax(const ForwardParams& p, ForwardShared<T>& s, int i) {
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const ScoreScale scale(T.has_score_mod() ? 1.0f : p.scale_log2);
  TmemRows<T> rows(s, i, warp, lane);
  Dropout dropout;
  if constexpr (T.dropout) dropout = Dropout(p.dropout);
  u32 sum_parity = 1;
  Ring<kWorkSlots> slot;
  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    Work& work = s.work[slot.slot];
    const auto kind = static_cast<Work::Kind>(uniform(static_cast<int>(work.kind)));
    if (kind == Work::Kind::over) break;
    if (kind == Work::Kind::tiles && warp_any(work.has(i))) {
      const TileCoords& tile = work.coords;
      const int begin = uniform(work.begins[i]), end = uniform(work.ends[i]);
      const int unmasked_begin = uniform(work.unmasked_begins[i]), unmasked_end = uniform(work.unmasked_ends[i]);
      const bool strict = warp_any(work.strict);
      const Row row(p, tile, first_row_of<T>(tile, i) + warp * 32 + lane);
      const bool used = row.query < tile.q_len;
      Softmax<T> steps{p,   tile,           scale,        rows,   row, visible_keys<T>(p, tile, row),
                       end, unmasked_begin, unmasked_end, dropout};
      int n_block = end - 1;
      if constexpr (T.block_mask) {
        go_through_steps(steps, p, work, i, unmasked_begin, unmasked_end, strict);
      } else if constexpr (T.has_score_mod()) {
#pragma unroll 1
        for (; warp_any(n_block >= begin); --n_block) steps.modded_block(n_block);
      } else {
        // The first step that hides nothing may be the first in which a row sees a key.
        int strict_end = T.right ? min(n_block, unmasked_end - T.lazy_max()) : n_block;
        if (T.lazy_max() && strict) strict_end = begin;
        [[maybe_unused]] Exponents e(scale, steps.softmax.row_max);
        if constexpr (Softmax<T>::kOneKind) {
#pragma unroll 1
          for (; warp_any(n_block >= begin); --n_block) steps.masked_block(n_block);
        } else if constexpr (T.left) {
          // A window hides at both ends: loops one after the other would have the step that hides twice, and compile
          // longer.
          [[maybe_unused]] bool moved = false;  // the row_max, since e was made
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
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
  }
}
