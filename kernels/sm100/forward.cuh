// Attention forward for Blackwell: out = softmax(scale q k^T) v and its log-sum-exp. Not yet run on hardware.
//
// One CTA per SM takes pairs of tiles, 128 rows each, the longest first, from a counter (ragged sequences: from a list
// that schedule() has made). Scores S, probabilities P and the result O of both tiles stay in tensor memory. The tiles
// take turns on the tensor core, so that the softmax of one runs under the products of the other:
//
//    load      | mma                  | softmax0            | softmax1            | correction
//    K1 Q0 Q1  | S0 = Q0 K1           |                     |                     |
//    V1        | S1 = Q1 K1           | P0 = softmax(S0)    |                     |
//    K0        | O0 += P0 V1, S0 = .. | (O0 *= factor)      | P1 = softmax(S1)    |
//    V0        | O1 += P1 V1, S1 = .. | P0 = softmax(S0)    | (O1 *= factor)      |
//    K' Q0'    | O0 += P0 V0, S0'= .. |                     | P1 = softmax(S1)    | O0 / sum -> out
//    Q1' V'    | O1 += P1 V0, S1'= .. | P0 = softmax(S0')   |                     | O1 / sum -> out
//
// The next pair of tiles (') begins before the last values of this one are multiplied: no turn is left out. P0 goes to
// the tensor core in two parts; its product starts under the softmax of the rest.
//
// A warp of softmax has 32 rows, a thread one of them: no shuffles. It moves a row's shift, and then scales its row of O
// by itself, only where sums or scores outgrow it (most steps do not): the other tile's products run meanwhile. So the
// correction is left with the exact one after the last step: the division by the sum.
//
// Barriers between products of one warp are none: the tensor core executes them in the order of their issue. (PTX
// promises that for products into the same columns only; that S may overwrite P behind the product that reads P is what
// FlashAttention-4 and CUTLASS rely on as well.)
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "shared/forward.h"
#include "tile/exp2.cuh"
#include "tile/ring.cuh"
#include "tile/row_softmax.cuh"
#include "tile/scores.cuh"
#include "tile/work.cuh"

constexpr int kWorkSlots = 3;  // pairs of tiles under way

struct alignas(16) Chunk {
  u32 x[4];
};

// What load() tells the others about a pair of tiles.
struct Work {
  enum class Kind { tiles, nothing, over } kind;
  int unit;
  Tile tile;
  int begin, end;   // steps of both
  Steps own[2];     // of each; none where it has no rows
  int careful;      // whether all steps are checked, because it is done again
  int lost;         // whether it has to be done again

  TANDEM_DEVICE bool has(int i) const { return own[i].begin < own[i].end; }
};

template <BlackwellTile T>
struct ForwardShared {
  alignas(1024) u16 q[T.kTiles][T.blocks_k() * T.kBlock / 2];
  alignas(1024) u16 ring[T.ring()][T.kBlock / 2];
  alignas(1024) u16 out[T.blocks_out()][T.kBlock / 2];
  float sum[T.kTiles][T.kTileRows], shift[T.kTiles][T.kTileRows];
  Work work[kWorkSlots];
  u32 tensor_memory;
  // A barrier is named for what is true after waiting for it. Arrivals: 1, but where another number is said.
  alignas(8) u64 work_full[kWorkSlots], work_empty[kWorkSlots];  // empty: 13 warps
  u64 ring_full[T.ring()], ring_empty[T.ring()];
  u64 q_full[T.kTiles], q_empty[T.kTiles];
  u64 s_ready[T.kTiles], p_ready[T.kTiles][2];  // p: 4 warps, for each part
  u64 sum_ready[T.kTiles];                      // 4 warps
  u64 o_full[T.kTiles], o_empty[T.kTiles];      // empty: 4 warps
};

// ---- Load: one thread ----

// For every pair of tiles its queries, and its keys and values from the last to the first. One that comes out lost is
// taken again, in the place where it was.
template <BlackwellTile T>
TANDEM_DEVICE void load(const ForwardParams& p, ForwardShared<T>& s) {
  Ring<T.ring()> ring;
  Ring<kWorkSlots> slot;
  u32 q_parity[T.kTiles] = {1, 1};
  const int together = log2_of(p.together), heads = p.heads_q >> together;
  const int listed = T.ragged ? p.counter[1] : 0, units = T.ragged ? listed * heads : p.tiles;
  int fresh = blockIdx.x;  // unit
  int idle = 0;            // places that were found free, and not lost, since there is nothing fresh
  for (;; slot.advance()) {
    Work& work = s.work[slot.slot];
    mbarrier_wait(&s.work_empty[slot.slot], slot.parity ^ 1);
    const bool careful = T.unchecked() && work.lost;
    if (!careful && fresh >= units) {
      const bool over = !T.unchecked() || ++idle == kWorkSlots;
      work.kind = over ? Work::Kind::over : Work::Kind::nothing;
      mbarrier_arrive(&s.work_full[slot.slot]);
      if (over) break;
      continue;
    }
    idle = 0;
    if (!careful) work.unit = fresh;
    const Tile tile = tile_at<T>(p, work.unit, listed);
    work.kind = Work::Kind::tiles;
    work.tile = tile;
    work.careful = careful;
    work.lost = 0;
    work.begin = 1 << 30;
    work.end = 0;
    for (int i = 0; i < T.kTiles; ++i) {
      const int row = tile.m * T.rows() + i * T.kTileRows;
      Steps own{0, 0, 0, 0, 0};
      if (row < tile.q_rows << together) {
        own = steps_of<T>(p, tile, row, T.kTileRows);
        work.begin = min(work.begin, own.begin);
        work.end = max(work.end, own.end);
      }
      work.own[i] = own;
    }
    const int begin = work.begin, end = work.end;
    const bool has[T.kTiles] = {work.has(0), work.has(1)};
    mbarrier_arrive(&s.work_full[slot.slot]);

    const int head_k = (tile.head << together) / (p.heads_q / p.heads_k);
    auto load_block = [&](const TensorMap* map, int column, int columns, int row, int rows) {
      mbarrier_wait(&s.ring_empty[ring.slot], ring.parity ^ 1);
      mbarrier_expect_tx(&s.ring_full[ring.slot], columns * rows * 2);
      for (int c = 0; c < columns; c += 64)
        tma_load(s.ring[ring.slot] + c * rows, map, &s.ring_full[ring.slot], column + c, row, head_k, tile.batch);
      ring.advance();
    };
    auto load_keys = [&](int step) {
      for (int c = 0; c < T.blocks_k(); ++c) load_block(&p.k, 64 * c, 64, tile.k_begin + step * T.keys, T.keys);
    };
    auto load_values = [&](int step) {
      constexpr int rows = T.keys_of_values();
      for (int r = 0; r < T.keys; r += rows)
        load_block(&p.v, 0, 64 * T.blocks_v(), tile.k_begin + step * T.keys + r, rows);
    };
    auto load_queries = [&](int i) {
      if (!has[i]) return;
      mbarrier_wait(&s.q_empty[i], q_parity[i]);
      q_parity[i] ^= 1;
      mbarrier_expect_tx(&s.q_full[i], T.blocks_k() * T.kBlock);
      for (int c = 0; c < T.blocks_k(); ++c)
        tma_load(s.q[i] + c * T.kBlock / 2, &p.q, &s.q_full[i], 64 * c, 0,
                 tile.q_begin + (tile.m * T.rows() + i * T.kTileRows >> together), tile.head, tile.batch);
    };
    load_keys(end - 1);
    load_queries(0);
    load_queries(1);
    if (!careful) fresh = (p.counter ? atomicAdd(p.counter, 1) : fresh) + gridDim.x;
    for (int step = end - 1; step >= begin; --step) {
      load_values(step);
      if (step > begin) load_keys(step - 1);
    }
  }
}

// ---- Products: a warp ----

// Rows [begin, T.keys) of a step's values become zeros.
template <BlackwellTile T>
TANDEM_DEVICE void clear_values(ForwardShared<T>& s, Ring<T.ring()> ring, int begin) {
  constexpr int kRows = T.keys_of_values(), kRowChunks = 8;  // of 16 bytes, in a row of 64 columns
  for (int b = 0; b < T.blocks_v(); ++b, ring.advance()) {
    mbarrier_wait(&s.ring_full[ring.slot], ring.parity);
    auto* chunks = reinterpret_cast<Chunk*>(s.ring[ring.slot]);
    const int first = max(0, begin - b * kRows) * kRowChunks;
    for (int c = 0; c < T.blocks_v(); ++c)
      for (int i = first + threadIdx.x % 32; i < kRows * kRowChunks; i += 32) chunks[c * kRows * kRowChunks + i] = {};
  }
  fence_proxy_async();
  __syncwarp();
}

// A tile's probabilities that wait for their product with the values.
struct Pending {
  bool any = false, first, last;  // first, last: of the steps of its tile
};

template <BlackwellTile T>
TANDEM_DEVICE void mma(ForwardShared<T>& s) {
  Ring<T.ring()> ring;
  Ring<kWorkSlots> slot;
  u32 q_parity[T.kTiles] = {}, p_parity[T.kTiles] = {}, o_parity[T.kTiles] = {1, 1};
  Pending pending[T.kTiles];
  Ring<T.ring()> values;  // of the pending products
  bool any_pending = false;

  auto wait_for = [](u64* barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
  };

  auto multiply_keys = [&](int i, Ring<T.ring()> keys) {
    const u64 q = tcgen05_matrix(shared_address(s.q[i]), 0, 1024);
#pragma unroll
    for (int b = 0; b < T.blocks_k(); ++b, keys.advance()) {
      wait_for(&s.ring_full[keys.slot], keys.parity);
      const u64 k = tcgen05_matrix(shared_address(s.ring[keys.slot]), 0, 1024);
#pragma unroll
      for (int c = 4 * b; c < 4 * b + 4 && c < T.head_dim / 16; ++c)
        tcgen05_mma(T.scores_at(i), q + b * (T.kBlock >> 4) + c % 4 * 2, k + c % 4 * 2,
                    tcgen05_product(T.f16, T.keys, false), c > 0);
    }
    tcgen05_commit(&s.s_ready[i]);
  };
  auto multiply_values = [&](int i) {
    constexpr int kRows = T.keys_of_values();
    Pending& it = pending[i];
    if (it.first) {
      wait_for(&s.o_empty[i], o_parity[i]);
      o_parity[i] ^= 1;
    }
    Ring<T.ring()> at = values;
#pragma unroll
    for (int c = 0; c < T.keys / 16; ++c) {
      if (c == 0 || c == T.kFirstPart / 16) wait_for(&s.p_ready[i][c > 0], p_parity[i]);
      if (c * 16 % kRows == 0) {
        if (c > 0) at.advance();
        wait_for(&s.ring_full[at.slot], at.parity);
      }
      const u64 v = tcgen05_matrix(shared_address(s.ring[at.slot]), kRows * 128, 1024);
      tcgen05_mma(T.result_at(i), T.probabilities_at(i) + 8 * c, v + c % (kRows / 16) * (2048 >> 4),
                  tcgen05_product(T.f16, T.head_dim_v, true), !(it.first && c == 0));
    }
    p_parity[i] ^= 1;
    if (it.last) tcgen05_commit(&s.o_full[i]);
    it.any = false;
  };
  auto release = [&](Ring<T.ring()> at, int blocks) {
#pragma unroll
    for (int b = 0; b < blocks; ++b, at.advance()) tcgen05_commit(&s.ring_empty[at.slot]);
  };
  // The products of the step before with its values, beside those of this one with its keys.
  auto turn = [&](auto&& begin_scores) {
#pragma unroll
    for (int i = 0; i < T.kTiles; ++i) {
      if (pending[i].any) multiply_values(i);
      if (i == T.kTiles - 1 && any_pending) release(values, T.blocks_v());
      begin_scores(i);
    }
  };

  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Work& work = s.work[slot.slot];
    const auto kind = static_cast<Work::Kind>(uniform(static_cast<int>(work.kind)));
    if (kind == Work::Kind::over) break;
    if (kind == Work::Kind::nothing) {  // load() wants to know how the last one comes out
      turn([](int) {});
      any_pending = false;
    }
    const bool some = kind == Work::Kind::tiles;
    const int begin = some ? uniform(work.begin) : 0, end = some ? uniform(work.end) : 0;
    int begins[T.kTiles] = {}, ends[T.kTiles] = {};
    for (int i = 0; some && i < T.kTiles; ++i) {
      begins[i] = uniform(work.own[i].begin);
      ends[i] = uniform(work.own[i].end);
    }
    const int k_len = T.ragged && some ? uniform(work.tile.k_len) : 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
    for (int step = end - 1; agreed(step >= begin); --step) {
      const Ring<T.ring()> keys = ring;
#pragma unroll
      for (int b = 0; b < T.blocks_k(); ++b) ring.advance();
      turn([&](int i) {
        if (step < begins[i] || step >= ends[i]) return;
        if (step == ends[i] - 1) {
          wait_for(&s.q_full[i], q_parity[i]);
          q_parity[i] ^= 1;
        }
        multiply_keys(i, keys);
        if (step == begins[i]) tcgen05_commit(&s.q_empty[i]);
        pending[i] = {true, step == ends[i] - 1, step == begins[i]};
      });
      release(keys, T.blocks_k());
      // Values beyond the sequence are a neighbour's or nobody's, and 0 * NaN is NaN.
      if constexpr (T.ragged) {
        if (step == end - 1 && k_len - step * T.keys < T.keys) clear_values<T>(s, ring, max(0, k_len - step * T.keys));
      }
      values = ring;
      any_pending = true;
#pragma unroll
      for (int b = 0; b < T.blocks_v(); ++b) ring.advance();
    }
  }
  turn([](int) {});
}

// ---- Softmax: a warpgroup for each tile ----

template <BlackwellTile T>
TANDEM_DEVICE u32 pack(float low, float high) {
  u32 both;
  if constexpr (T.f16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

constexpr int kChunk = 32;  // columns of scores that are loaded together

// Whether pair n of a chunk goes to the FMA units: spread evenly.
template <BlackwellTile T>
constexpr bool on_fma_units(int n) {
  return (n + 1) * T.fma_pairs / 16 > n * T.fma_pairs / 16;
}

// A chunk of scores becomes probabilities. plain: all on the exponential unit.
template <BlackwellTile T, bool plain>
TANDEM_DEVICE void exponentials(const float (&x)[kChunk], const Exponents& e, Pair* sum, u32 to) {
  u32 packed[kChunk / 2];
#pragma unroll
  for (int n = 0; n < kChunk / 2; ++n) {
    const Pair scores = pair_of(x[2 * n], x[2 * n + 1]);
    const Pair y = !plain && on_fma_units<T>(n) ? exp2_of_fma_units(scores, e) : exp2_of_exponential_unit(scores, e);
    *sum = *sum + y;
    float low, high;
    split(y, &low, &high);
    packed[n] = pack<T>(low, high);
  }
  tmem_store(to, packed);
}

template <BlackwellTile T>
TANDEM_DEVICE void softmax(const ForwardParams& p, ForwardShared<T>& s, int i) {
  constexpr int kChunks = T.keys / kChunk;
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  const u32 scores = lanes + T.scores_at(i), probabilities = lanes + T.probabilities_at(i);
  const ScoreScale scale(T.changed() ? 1.0f : p.scale_log2);
  u32 s_parity = 0, o_parity = 1;
  Ring<kWorkSlots> slot;

  auto wait_for_scores = [&] {
    mbarrier_wait(&s.s_ready[i], s_parity);
    s_parity ^= 1;
    tcgen05_fence_after();
  };
  auto hand_over = [&](int part) {
    tmem_wait_store();
    tcgen05_fence_before();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.p_ready[i][part]);
  };
  auto hand_over_after = [&](int chunk) {
    if (chunk == T.kFirstPart / kChunk - 1) hand_over(0);
    if (chunk == kChunks - 1) hand_over(1);
  };

  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    Work& work = s.work[slot.slot];
    const auto kind = static_cast<Work::Kind>(uniform(static_cast<int>(work.kind)));
    if (kind == Work::Kind::over) break;
    if (kind == Work::Kind::tiles && agreed(work.has(i))) {
      const Tile& tile = work.tile;
      const int begin = uniform(work.own[i].begin), end = uniform(work.own[i].end);
      const int whole_begin = uniform(work.own[i].whole_begin), whole_end = uniform(work.own[i].whole_end);
      const bool careful = agreed(work.careful);
      const Row row(p, tile, tile.m * T.rows() + i * T.kTileRows + warp * 32 + lane);
      const Seen seen = seen_by<T>(p, tile, row);
      const bool used = row.query < tile.q_len;
      RowSoftmax softmax;
      bool lost = false;

      auto rescale_result = [&] {
        const Pair factor = pair_of(softmax.factor);
        const u32 result = lanes + T.result_at(0) + i * T.head_dim_v;
#pragma unroll 1
        for (int c = 0; c < T.head_dim_v; c += 16) {
          float x[16];
          tmem_load(x, result + c);
          tmem_wait_load(x);
#pragma unroll
          for (int n = 0; n < 16; n += 2) split(pair_of(x[n], x[n + 1]) * factor, &x[n], &x[n + 1]);
          tmem_store(result + c, x);
        }
      };
      // Hides scores from this row. False: all are hidden from all rows of the warp.
      auto hide = [&](float (&x)[kChunk], int column0) __attribute__((always_inline)) {
        const u32 bits = columns_within(seen.begin - column0, seen.end - column0);
        if (!__any_sync(~0u, bits != 0)) return false;
        if (__any_sync(~0u, ~bits != 0)) {
#pragma unroll
          for (int n = 0; n < kChunk; ++n)
            if (!(bits >> n & 1)) x[n] = -kInfinity;
        }
        return true;
      };
      auto largest_of = [](const float (&x)[kChunk], float largest) {
#pragma unroll
        for (int n = 0; n < kChunk; ++n) largest = fmaxf(largest, x[n]);
        return largest;
      };
      // Moves this row's shift where a score is too far beyond it.
      auto look_at = [&](float largest, int step) {
        softmax.look_at_scores(largest, scale);
        if (softmax.rescale && step < end - 1) rescale_result();
        return Exponents(scale, softmax.shift);
      };
      // A step that looks at its scores, and hides some of them.
      auto hiding = [&](int step) __attribute__((always_inline)) {
        float x[kChunks][kChunk], largest = -kInfinity;
        bool some[kChunks];  // columns are seen
        wait_for_scores();
#pragma unroll
        for (int c = 0; c < kChunks; ++c) tmem_load(x[c], scores + c * kChunk);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          tmem_wait_load(x[c]);
          some[c] = hide(x[c], step * T.keys + c * kChunk);
          if (some[c]) largest = largest_of(x[c], largest);
        }
        const Exponents e = look_at(largest, step);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (some[c]) {
            exponentials<T, true>(x[c], e, &softmax.sum, probabilities + c * (kChunk / 2));
          } else {
            const u32 zeros[kChunk / 2] = {};
            tmem_store(probabilities + c * (kChunk / 2), zeros);
          }
          hand_over_after(c);
        }
      };
      // One that hides nothing. Half of the scores are loaded twice: registers for all would leave none to take
      // exponentials of one chunk while another is stored.
      auto checked = [&](int step) __attribute__((always_inline)) {
        float x[kChunks][kChunk], largest = -kInfinity;
        wait_for_scores();
#pragma unroll
        for (int c = kChunks - 1; c >= 0; --c) tmem_load(x[c], scores + c * kChunk);
#pragma unroll
        for (int c = kChunks - 1; c >= 0; --c) {
          tmem_wait_load(x[c]);
          largest = largest_of(x[c], largest);
        }
        const Exponents e = look_at(largest, step);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (c >= kChunks / 2) tmem_wait_load(x[c]);
          if (c >= kChunks / 2 - 1 && c < kChunks - 1) tmem_load(x[c + 1], scores + (c + 1) * kChunk);
          exponentials<T, false>(x[c], e, &softmax.sum, probabilities + c * (kChunk / 2));
          hand_over_after(c);
        }
      };
      // The same of scores that are more than products: they are changed where they lie.
      auto changed = [&](int step) __attribute__((always_inline)) {
        const Change<T> change(p, tile, row);
        float x[kChunk], largest = -kInfinity;
        wait_for_scores();
#pragma unroll 1
        for (int c = 0; c < kChunks; ++c) {
          const int column0 = step * T.keys + c * kChunk;
          tmem_load(x, scores + c * kChunk);
          tmem_wait_load(x);
#pragma unroll
          for (int n = 0; n < kChunk; ++n) x[n] = change(x[n], p, tile, column0 + n);
          if (!hide(x, column0)) {
#pragma unroll
            for (int n = 0; n < kChunk; ++n) x[n] = -kInfinity;
          }
          largest = largest_of(x, largest);
          tmem_store(scores + c * kChunk, x);
        }
        tmem_wait_store();
        const Exponents e = look_at(largest, step);
#pragma unroll 1
        for (int c = 0; c < kChunks; ++c) {
          tmem_load(x, scores + c * kChunk);
          tmem_wait_load(x);
          exponentials<T, true>(x, e, &softmax.sum, probabilities + c * (kChunk / 2));
          hand_over_after(c);
        }
      };
      auto unchecked = [&](Exponents& e) __attribute__((always_inline)) {
        softmax.look_at_sums();
        wait_for_scores();
        if (softmax.rescale) {
          lost |= softmax.move_by_sums(scale);
          e = Exponents(scale, softmax.shift);
          rescale_result();
        }
        float x[2][kChunk];
        tmem_load(x[0], scores);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          tmem_wait_load(x[c % 2]);
          if (c < kChunks - 1) tmem_load(x[(c + 1) % 2], scores + (c + 1) * kChunk);
          exponentials<T, false>(x[c % 2], e, &softmax.sum, probabilities + c * (kChunk / 2));
          hand_over_after(c);
        }
      };
      int step = end - 1;
      if constexpr (T.changed()) {
#pragma unroll 1
        for (; agreed(step >= begin); --step) changed(step);
      } else {
        // The first step that hides nothing may be the first in which a row sees a key.
        int checked_end = T.right ? min(step, whole_end - T.unchecked()) : step;
        if (T.unchecked() && careful) checked_end = begin;
#pragma unroll 1
        for (; agreed(step >= max(checked_end, begin)); --step) hiding(step);
        [[maybe_unused]] Exponents e(scale, softmax.shift);
#pragma unroll 1
        for (; agreed(step >= max(whole_begin, begin)); --step) {
          if constexpr (T.unchecked()) unchecked(e);
          else checked(step);
        }
        if constexpr (T.left) {
#pragma unroll 1
          for (; agreed(step >= begin); --step) hiding(step);
        }
      }

      if (T.unchecked() && !careful && __any_sync(~0u, used && (lost || softmax.lost())) && lane == 0)
        store_relaxed(&work.lost, 1);
      mbarrier_wait(&s.o_empty[i], o_parity);  // the sums of the tile before have been read
      o_parity ^= 1;
      s.sum[i][warp * 32 + lane] = softmax.final_sum();
      s.shift[i][warp * 32 + lane] = softmax.shift;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&s.sum_ready[i]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
  }
}

// ---- Correction: a warpgroup for both tiles ----

// Ordinary stores of 64 columns from column0 on, where a tile goes beyond the sequence: count of its rows belong to it.
template <BlackwellTile T>
TANDEM_DEVICE void store_rows(const ForwardParams& p, const Tile& t, const u16* from, int first_row, int count,
                              int column0) {
  const int together = log2_of(p.together), chunks = min(8, (p.head_dim_v - column0) / 8);
  for (int i = threadIdx.x % 128; i < count * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks, at = first_row + row;
    u16* to = static_cast<u16*>(p.out_data) + t.batch * p.out_batch + (t.q_begin + (at >> together)) * p.out_row +
              ((t.head << together) + (at & (p.together - 1))) * p.out_head + column0 + chunk * 8;
    *reinterpret_cast<Chunk*>(to) = reinterpret_cast<const Chunk*>(from)[row * 8 + (chunk ^ (row & 7))];
  }
}

template <BlackwellTile T>
TANDEM_DEVICE void correction(const ForwardParams& p, ForwardShared<T>& s) {
  constexpr int kTogether = 1;  // named barrier
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32, thread = threadIdx.x % 128;
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  const int together = log2_of(p.together);
  Ring<kWorkSlots> slot;
  Ring<T.blocks_out()> out;
  u32 parities = 0;  // a bit for each tile

  auto finish = [&](const Work& work, int i) {
    const Tile& tile = work.tile;
    const int first_row = tile.m * T.rows() + i * T.kTileRows;
    const int rows_left = (tile.q_rows << together) - first_row;
    const Row row(p, tile, first_row + thread);
    const u32 parity = parities >> i & 1;
    parities ^= 1 << i;
    mbarrier_wait(&s.sum_ready[i], parity);
    const RowEnd end =
        end_of_row<T>(p, row, !T.ragged || row.query < tile.q_len, s.sum[i][thread], s.shift[i][thread]);
    if (p.lse && row.query < tile.q_rows)
      p.lse[tile.batch * p.lse_batch + row.head * p.lse_head + (tile.q_begin + row.query) * p.lse_row] = end.lse;
    mbarrier_wait(&s.o_full[i], parity);
    for (int block = 0; block < T.blocks_v(); ++block, out.advance()) {
      // Once the last store from this place has read it.
      if (warp == 0 && elect_one()) tma_store_wait_read<T.blocks_out() - 1>();
      named_sync(kTogether, 128);
      tcgen05_fence_after();
      auto* to = reinterpret_cast<Chunk*>(s.out[out.slot]) + thread * 8;
#pragma unroll
      for (int c = 0; c < 8; c += 2) {  // chunks of 8 columns
        const int column = 64 * block + 8 * c;
        if (column >= T.head_dim_v) break;
        float x[16];
        tmem_load(x, lanes + T.result_at(0) + i * T.head_dim_v + column);
        tmem_wait_load(x);
        u32 packed[8];
#pragma unroll
        for (int n = 0; n < 8; ++n)
          packed[n] = end.inverse == 0  // a row that sees nothing, whatever it met
                          ? 0
                          : pack<T>(x[2 * n] * end.inverse, x[2 * n + 1] * end.inverse);
        to[c ^ (thread & 7)] = {{packed[0], packed[1], packed[2], packed[3]}};
        to[(c + 1) ^ (thread & 7)] = {{packed[4], packed[5], packed[6], packed[7]}};
      }
      if (block == T.blocks_v() - 1) {
        tcgen05_fence_before();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&s.o_empty[i]);
      }
      fence_proxy_async();
      named_sync(kTogether, 128);
      if (T.ragged && rows_left < T.kTileRows) {
        store_rows<T>(p, tile, s.out[out.slot], first_row, rows_left, 64 * block);
        named_sync(kTogether, 128);
      } else if (warp == 0 && elect_one()) {
        if (T.unchecked() && work.careful) tma_store_wait();  // for the result that was no good
        tma_store(&p.out, s.out[out.slot], 64 * block, 0, tile.q_begin + (first_row >> together), tile.head, tile.batch);
      }
      if (warp == 0 && elect_one()) tma_store_commit();
    }
  };
  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Work& work = s.work[slot.slot];
    const auto kind = static_cast<Work::Kind>(uniform(static_cast<int>(work.kind)));
    if (kind == Work::Kind::over) break;
    if (kind == Work::Kind::tiles) {
#pragma unroll 1
      for (int i = 0; i < T.kTiles; ++i)
        if (agreed(work.has(i))) finish(work, i);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
  }
  if (warp == 0 && elect_one()) tma_store_wait();
}

// ---- The kernel ----

enum class Role { softmax0, softmax1, correction, mma, load, none };
TANDEM_DEVICE Role role_of(int warp) {
  if (warp < 4) return Role::softmax0;
  if (warp < 8) return Role::softmax1;
  if (warp < 12) return Role::correction;
  return warp == 12 ? Role::mma : warp == 13 ? Role::load : Role::none;
}

template <BlackwellTile T>
TANDEM_DEVICE void begin(ForwardShared<T>& s, int warp) {
  constexpr int kWarps = 13;  // that learn from load() what there is to do
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWorkSlots; ++i) {
      s.work[i].lost = 0;
      mbarrier_init(&s.work_full[i], 1);
      mbarrier_init(&s.work_empty[i], kWarps);
    }
    for (int i = 0; i < T.ring(); ++i) {
      mbarrier_init(&s.ring_full[i], 1);
      mbarrier_init(&s.ring_empty[i], 1);
    }
    for (int i = 0; i < T.kTiles; ++i) {
      mbarrier_init(&s.q_full[i], 1);
      mbarrier_init(&s.q_empty[i], 1);
      mbarrier_init(&s.s_ready[i], 1);
      mbarrier_init(&s.p_ready[i][0], 4);
      mbarrier_init(&s.p_ready[i][1], 4);
      mbarrier_init(&s.sum_ready[i], 4);
      mbarrier_init(&s.o_full[i], 1);
      mbarrier_init(&s.o_empty[i], 4);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  if (role_of(warp) == Role::mma) tmem_alloc(&s.tensor_memory, T.kColumns);  // all there are: they begin at 0
  __syncthreads();
}

template <BlackwellTile T>
TANDEM_DEVICE void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<ForwardShared<T>*>(memory);
  static_assert(sizeof(ForwardShared<T>) <= T.shared_bytes());
  static_assert(T.ring_suffices() && T.columns_suffice());
  const int warp = uniform(threadIdx.x / 32);
  begin(s, warp);
  switch (role_of(warp)) {
    case Role::softmax0:
    case Role::softmax1:
      registers_up<T.kSoftmaxRegisters>();
      softmax(p, s, warp / 4);
      break;
    case Role::correction:
      registers_down<T.kCorrectionRegisters>();
      correction(p, s);
      break;
    case Role::mma:
      registers_down<T.kOtherRegisters>();
      mma(s);
      break;
    case Role::load:
      registers_down<T.kOtherRegisters>();
      if (elect_one()) load(p, s);
      __syncwarp();
      break;
    case Role::none: registers_down<T.kOtherRegisters>(); break;
  }
  __syncthreads();
  if (role_of(uniform(threadIdx.x / 32)) == Role::mma) tmem_free(s.tensor_memory, T.kColumns);
}
