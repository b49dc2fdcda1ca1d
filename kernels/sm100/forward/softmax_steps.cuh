// The iterations of the Blackwell forward's softmax in several forms: with a mask, without a mask, lazy, and with score
// options.
#pragma once
#include "device/block_mask.cuh"
#include "device/pipeline_state.cuh"
#include "device/row.cuh"
#include "device/row_softmax.cuh"
#include "device/score_mod.cuh"
#include "ptx/mbarrier.cuh"
#include "sm100/forward/score_chunks.cuh"
#include "sm100/forward/smem.cuh"

// A warp's rows of tile i in tensor memory. The state continues over iterations.
template <Sm100ForwardConfig T>
struct TmemRows {
  SharedStorage<T>& s;
  const int i, lane;
  const u32 lanes;
  PipelineState<T.score_slots()> s_ring;
  int s_slot;  // slot of this iteration's scores
  u32 scores, probabilities;

  TANDEM_DEVICE TmemRows(SharedStorage<T>& s, int i, int warp, int lane)
      : s(s), i(i), lane(lane), lanes(static_cast<u32>(warp) * 32 << 16), s_slot(i) {
    scores = probabilities = lanes + T.tmem_s(i);
  }
  TANDEM_DEVICE void wait_s() {
    if (T.q_stage() == 1) {
      s_slot = s_ring.index;
      scores = probabilities = lanes + T.tmem_s(s_slot);
    }
    mbarrier_wait(&s.s_ready[s_slot], s_ring.phase);
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
  // Returns the sum of this iteration's probabilities. The call comes before the probabilities are signalled.
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
        sum += to_float<T.options.f16>(static_cast<u16>(two)) + to_float<T.options.f16>(static_cast<u16>(two >> 16));
      }
    }
    return sum;
  }
  TANDEM_DEVICE void rescale_o(float by) {
    const Float2 alpha = float2_of(by);
    const u32 result = lanes + T.tmem_o(0) + i * T.o_columns();
    if (T.q_stage() == 1) {  // the previous PV product may be outstanding
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

// The iterations of one work tile, for a warp's rows of one of its tiles.
template <Sm100ForwardConfig T>
struct Softmax {
  static constexpr int kChunks = T.tile_n / kChunk;
  // True if masked and other iterations share one code path, which computes every maximum and uses only the
  // exponential unit.
  static constexpr bool kOneKind = !T.lazy_max() && T.ex2_emu_pairs == 0;

  const ForwardParams& p;
  const TileCoords& tile;
  const ScoreScale& scale;
  TmemRows<T>& rows;
  const Row row;
  const KeyRange keys;
  const int end, unmasked_begin, unmasked_end;
  const Dropout& dropout;
  RowSoftmax<T.options.f16> softmax;
  bool overflowed = false;
  BlockState state = BlockState::full;  // block mask: current iteration
  bool first = true;                    // block mask: first iteration of the tile

  // The dropout mask of the row's scores in chunk c of an iteration.
  TANDEM_DEVICE u32 draw_dropout_mask(int n_block, int c) const {
    if constexpr (!T.options.dropout) return 0;
    return dropout.of_row(row.query, dropout_head<T>(p, tile.sequence, row.head), n_block * T.tile_n + c * kChunk);
  }

  // Moves row_max of this thread's row if a score exceeds row_max by too much.
  TANDEM_DEVICE Exponents update_max(float largest, int n_block) {
    softmax.update_max(largest, scale);
    softmax.step_sum = 0;
    if (softmax.rescale && (T.options.block_mask ? !first : n_block < end - 1)) rows.rescale_o(softmax.alpha);
    return Exponents(scale, softmax.row_max);
  }

  // An iteration that computes the maximum and hides some scores. With kOneKind this function hides scores only if a
  // mask requires it.
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
                              draw_dropout_mask(n_block, c));
      } else {
        const u32 zeros[kChunk / 2] = {};
        tmem_store(rows.probabilities + c * (kChunk / 2), zeros);
      }
      rows.signal_p_after(c);
    }
    rows.signal_p(1);
  }

  // An iteration that hides nothing and computes the maximum, with one chain of maxima per chunk.
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

  // Sets scores from column0 on that a block mask hides to -infinity.
  TANDEM_DEVICE void apply_block_mask(float (&x)[kChunk], int column0) const {
    if (state == BlockState::full) return;
    if constexpr (T.options.mask_mod) {
      if (state == BlockState::partial) {
        const MaskMod<T> mod(tile, row);
#pragma unroll
        for (int n = 0; n < kChunk; ++n) x[n] = mod(p, column0 + n) ? x[n] : -kInfinity;
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kChunk; ++n) x[n] = -kInfinity;
  }

  // An iteration with score options, which change scores in place.
  TANDEM_DEVICE void modded_block(int n_block) {
    const ScoreMod<T> mod(p, tile, row);
    float x[kChunk], largest = -kInfinity;
    rows.wait_s();
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      const int column0 = n_block * T.tile_n + c * kChunk;
      tmem_load(x, rows.scores + c * kChunk);
      tmem_wait_load(x);
      if constexpr (T.options.softcap) apply_softcap<true>(x, p);
      if constexpr (T.has_score_mod()) {
#pragma unroll
        for (int n = 0; n < kChunk; ++n) x[n] = mod(x[n], p, column0, n);
      }
      if constexpr (T.options.block_mask) apply_block_mask(x, column0);
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
      exponentials<T, true>(x, e, &softmax.sum, rows.probabilities + c * (kChunk / 2), &largest,
                            draw_dropout_mask(n_block, c));
      rows.signal_p_after(c);
    }
    rows.signal_p(1);
  }

  // An iteration that hides nothing and computes no maximum. The preceding iteration's sum decides whether row_max
  // moves.
  TANDEM_DEVICE void lazy_block(Exponents& e) {
    const bool late = softmax.outgrown();
    rows.wait_s();
    if (late) {
      overflowed |= softmax.catch_up(scale);
      e = Exponents(scale, softmax.row_max);
      rows.rescale_o(softmax.alpha);
    }
    // Chunks kept in registers: few with both bounds or a block mask.
    constexpr int kHeld = T.options.bounded_left || T.options.block_mask ? 2 : kChunks;
    float x[kHeld][kChunk], largest = -kInfinity;
    Float2 sum = float2_of(0);
    // Chunks run from last to first, because the compiler moves a load down to its use, but not past another load.
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
    if (softmax.jumped()) softmax.add_rounding(rows.sum_of_p());
    rows.signal_p(1);
    overflowed |= softmax.overflows(largest, scale);  // exp2 may be undefined although the sum seems valid
  }

  TANDEM_DEVICE void unmasked_block(int n_block, Exponents& e) {
    if constexpr (T.lazy_max()) {
      lazy_block(e);
    } else {
      strict_block(n_block);
    }
  }
};
