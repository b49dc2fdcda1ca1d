// Attention forward for Blackwell: out = softmax(scale q k^T) v and its log-sum-exp. Run on the virtual GPU, not yet on
// hardware.
//
// One CTA per SM takes units of two tiles, 128 rows each, the longest first, from a counter (ragged sequences: from a
// list that schedule() has made). Scores S, probabilities P and the result O of both tiles stay in tensor memory. The
// tiles take turns on the tensor core, so that the softmax of one runs under the products of the other:
//
//    load      | mma                  | softmax0            | softmax1            | correction
//    K1 Q0 Q1  | S0 = Q0 K1           |                     |                     |
//    V1        | S1 = Q1 K1           | P0 = softmax(S0)    |                     |
//    K0        | O0 += P0 V1, S0 = .. | (O0 *= factor)      | P1 = softmax(S1)    |
//    V0        | O1 += P1 V1, S1 = .. | P0 = softmax(S0)    | (O1 *= factor)      |
//    K' Q0'    | O0 += P0 V0, S0'= .. |                     | P1 = softmax(S1)    | O0 / sum -> out
//    Q1' V'    | O1 += P1 V0, S1'= .. | P0 = softmax(S0')   |                     | O1 / sum -> out
//
// The next unit (') begins before the last values of this one are multiplied: no turn is left out. P0 goes to the
// tensor core in two parts; its product starts under the softmax of the rest.
//
// A warp of softmax has 32 rows, a thread one of them: no shuffles. It moves a row's shift, and then scales its row of
// O by itself, only where sums or scores outgrow it (most steps do not): the other tile's products run meanwhile. So
// the correction is left with the exact one after the last step: the division by the sum.
//
// Tensor memory, 512 columns. P takes the place of the S it is made from, from the left, two elements in a column:
//
//    two tiles                       | one tile (of a pair), head_dim_v over 128 or head_dim over 192
//    0    S0, P0                     | 0    S, P of even steps
//    128  S1, P1                     | 128  S, P of odd steps
//    256  O0 [head_dim_v <= 128]     | 256  O [head_dim_v <= 256]
//    ...  O1                         |
//
// With one tile the scores of the next step are multiplied before the values of this one, and a row of O is scaled once
// the values of the step before have been added.
//
// Two CTAs may multiply together (a pair): 256 rows in a product, 128 of them in each CTA, which loads half of the keys
// (64 rows) and half of the values (columns), so that shared memory and L2 are read half as often. Softmax and
// correction know nothing of it; the products are issued by the first CTA, which the relay of the other tells what has
// come there. Pairs whose units differ in length take over those of pairs that have not begun (cluster launch control).
//
// Barriers between products of one warp are none: the tensor core executes them in the order of their issue. (PTX
// promises that for products into the same columns only; that S may overwrite P behind the product that reads P is what
// FlashAttention-4 and CUTLASS rely on as well.)
#pragma once
#include "ptx/cluster.cuh"
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

constexpr int kWorkSlots = 3;  // units of work under way

struct alignas(16) Chunk {
  u32 x[4];
};

// What load() tells the others of its CTA about a unit of work: its tiles.
struct Work {
  enum class Kind { tiles, nothing, over } kind;
  int unit;
  Tile tile;
  int begin, end;          // steps of all tiles
  int begins[2], ends[2];  // of each; none where it has no rows
  int whole_begins[2], whole_ends[2];
  int careful;  // whether all steps are checked, because it is done again
  int lost;     // whether it has to be done again

  TANDEM_DEVICE bool has(int i) const { return begins[i] < ends[i]; }
};

template <BlackwellTile T>
struct ForwardShared {
  alignas(1024) u16 q[T.tiles()][T.blocks_k() * T.kTileBlock / 2];
  alignas(1024) u16 out[T.blocks_out()][T.kTileBlock / 2];
  alignas(1024) u16 ring[T.ring()][T.block() / 2];
  float sum[T.tiles()][T.kTileRows], shift[T.tiles()][T.kTileRows];
  Work work[kWorkSlots];
  alignas(16) Chunk blocks_taken[2];
  u32 tensor_memory;
  // A barrier is named for what is true after waiting for it. Arrivals: 1, but where another number is said. Of a pair
  // those marked * are the leader's, and get the arrivals of both CTAs.
  alignas(8) u64 work_full[kWorkSlots], work_empty[kWorkSlots];  // empty: every warp but load's
  u64 ring_here[T.ring()], ring_empty[T.ring()];
  u64 q_here[T.tiles()], q_empty[T.tiles()];
  u64 s_ready[T.kScores], p_ready[T.kScores][2];   // *p: 4 warps, for each part
  u64 o_added[T.tiles()];                          // one tile: the values of a step
  u64 sum_ready[T.tiles()], sum_empty[T.tiles()];  // 4 warps
  u64 o_full[T.tiles()], o_empty[T.tiles()];       // *empty: 4 warps
  u64 taken_full[2];
  // What has come and may be multiplied: in both CTAs, cleared beyond the sequence.
  u64 ring_relayed[T.relays() ? T.ring() : 1], q_relayed[T.tiles()];  // *

  TANDEM_DEVICE u64* ring_full(u32 slot) { return T.relays() ? &ring_relayed[slot] : &ring_here[slot]; }
  TANDEM_DEVICE u64* q_full(int i) { return T.relays() ? &q_relayed[i] : &q_here[i]; }
};

// Of a pair: the CTA that multiplies for both is 0.
template <BlackwellTile T>
TANDEM_DEVICE int rank_of_cta() {
  return T.pair ? blockIdx.x & 1 : 0;
}
// The first row of the CTA's i-th tile, in its sequence.
template <BlackwellTile T>
TANDEM_DEVICE int first_row_of(const Tile& t, int i) {
  return t.m * T.rows() + i * T.rows_together() + rank_of_cta<T>() * T.kTileRows;
}
template <BlackwellTile T>
TANDEM_DEVICE void arrive_at_leader(u64* barrier) {
  if constexpr (T.pair) {
    mbarrier_arrive_at(barrier, 0);
  } else {
    mbarrier_arrive(barrier);
  }
}

// ---- Load: one thread ----

// The steps of a unit of work, of its tiles and of those rows of them that are the CTA's.
template <BlackwellTile T>
TANDEM_DEVICE void set_steps(const ForwardParams& p, Work& work) {
  const Tile& tile = work.tile;
  work.begin = 1 << 30;
  work.end = 0;
  for (int i = 0; i < T.tiles(); ++i) {
    const int row = tile.m * T.rows() + i * T.rows_together();
    work.begins[i] = work.ends[i] = 0;
    if (row >= tile.q_rows << log2_of(p.together)) continue;
    const Steps all = steps_of<T>(p, tile, row, T.rows_together());
    const Steps own = T.pair ? steps_of<T>(p, tile, first_row_of<T>(tile, i), T.kTileRows) : all;
    work.begins[i] = all.begin;
    work.ends[i] = all.end;
    work.whole_begins[i] = own.whole_begin;
    work.whole_ends[i] = own.whole_end;
    work.begin = min(work.begin, all.begin);
    work.end = max(work.end, all.end);
  }
}

// Units of work in the order of blocks: the hardware gives this cluster those of clusters that have not begun, so that
// the longest, which come first, are begun first, and no counter is needed. An answer is read before the queries of its
// unit are loaded, in both CTAs, and two units later, when its place is used again, those have been multiplied.
template <BlackwellTile T>
struct Takeover {
  ForwardShared<T>& s;
  Ring<2> at;
  bool asked = false;

  TANDEM_DEVICE void ask() {
    mbarrier_expect_tx(&s.taken_full[at.slot], 16);
    if (rank_of_cta<T>() == 0) ask_for_blocks<T.ctas()>(&s.blocks_taken[at.slot], &s.taken_full[at.slot]);
    asked = true;
  }
  // The unit that ask() has brought; -1: none is left.
  TANDEM_DEVICE int answer() {
    mbarrier_wait(&s.taken_full[at.slot], at.parity);
    const int first = blocks_in(&s.blocks_taken[at.slot]);
    fence_proxy_async();
    at.advance();
    return first < 0 ? -1 : first / T.ctas();
  }
};

// For every unit of work its queries, and its keys and values from the last to the first. One that comes out lost is
// taken again, in the place where it was.
template <BlackwellTile T>
TANDEM_DEVICE void load(const ForwardParams& p, ForwardShared<T>& s) {
  Ring<T.ring()> ring;
  Ring<kWorkSlots> slot;
  u32 q_parity = 3;  // a bit for each tile
  const int together = log2_of(p.together), heads = p.heads_q >> together, rank = rank_of_cta<T>();
  const int listed = T.ragged ? p.counter[1] : 0, units = T.ragged ? listed * heads : p.tiles;
  const int stride = gridDim.x / T.ctas();
  int fresh = blockIdx.x / T.ctas();  // unit
  int idle = 0;                       // places that were found free, and not lost, since there is nothing fresh
  [[maybe_unused]] Takeover<T> takeover{s};
  for (;; slot.advance()) {
    Work& work = s.work[slot.slot];
    mbarrier_wait(&s.work_empty[slot.slot], slot.parity ^ 1);
    if constexpr (T.takes_over) {
      if (takeover.asked) fresh = takeover.answer();
      if (fresh < 0) fresh = units;
    }
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
    set_steps<T>(p, work);
    const int begin = work.begin, end = work.end;
    const int has = work.has(0) | (T.tiles() > 1 && work.has(1)) << 1;
    mbarrier_arrive(&s.work_full[slot.slot]);

    const int head_k = (tile.head << together) / (p.heads_q / p.heads_k);
    auto load_block = [&](const TensorMap* map, int column, int columns, int row, int rows) {
      mbarrier_wait(&s.ring_empty[ring.slot], ring.parity ^ 1);
      mbarrier_expect_tx(&s.ring_here[ring.slot], columns * rows * 2);
      for (int c = 0; c < columns; c += 64)
        tma_load(s.ring[ring.slot] + c * rows, map, &s.ring_here[ring.slot], column + c, row, head_k, tile.batch);
      ring.advance();
    };
    auto load_keys = [&](int step, int c) {
      const int row = tile.k_begin + step * T.keys + rank * T.keys_of_block();
      load_block(&p.k, 64 * c, 64, row, T.keys_of_block());
    };
    auto load_values = [&](int step) {
      constexpr int columns = 64 * T.blocks(T.columns_v());
      for (int r = 0; r < T.keys; r += T.keys_of_values())
        load_block(&p.v, rank * T.columns_v(), columns, tile.k_begin + step * T.keys + r, T.keys_of_values());
    };
    auto load_queries = [&](int i) {
      if (!(has >> i & 1)) return;
      mbarrier_wait(&s.q_empty[i], q_parity >> i & 1);
      q_parity ^= 1 << i;
      mbarrier_expect_tx(&s.q_here[i], T.blocks_k() * T.kTileBlock);
#pragma unroll 1
      for (int c = 0; c < T.blocks_k(); ++c)
        tma_load(s.q[i] + c * T.kTileBlock / 2, &p.q, &s.q_here[i], 64 * c, 0,
                 tile.q_begin + (first_row_of<T>(tile, i) >> together), tile.head, tile.batch);
    };
#pragma unroll 1
    for (int c = 0; c < T.blocks_k(); ++c) load_keys(end - 1, c);
#pragma unroll 1
    for (int i = 0; i < T.tiles(); ++i) load_queries(i);
    if constexpr (T.takes_over) {
      takeover.ask();
    } else {
      if (!careful) fresh = (p.counter && !T.pair ? atomicAdd(p.counter, 1) : fresh) + stride;
    }
#pragma unroll 1
    for (int step = end - 1; step >= begin; --step) {
      load_values(step);
      if (step == begin) break;
#pragma unroll
      for (int c = 0; c < T.blocks_k(); ++c) load_keys(step - 1, c);
    }
  }
}

// ---- Relay: a warp, where T.relays() ----

// Rows [begin, T.keys) of a step's values, which are here, become zeros.
template <BlackwellTile T>
TANDEM_DEVICE void clear_values(ForwardShared<T>& s, Ring<T.ring()> ring, int begin) {
  constexpr int kRows = T.keys_of_values(), kRowChunks = 8;  // of 16 bytes, in a row of 64 columns
  for (int b = 0; b < T.blocks_v(); ++b, ring.advance()) {
    mbarrier_wait(&s.ring_here[ring.slot], ring.parity);
    auto* chunks = reinterpret_cast<Chunk*>(s.ring[ring.slot]);
    const int first = max(0, begin - b * kRows) * kRowChunks;
    for (int c = 0; c < T.blocks(T.columns_v()); ++c)
      for (int i = first + threadIdx.x % 32; i < kRows * kRowChunks; i += 32) chunks[c * kRows * kRowChunks + i] = {};
  }
  if (T.pair) fence_cluster();
  fence_proxy_async();
  __syncwarp();
}

// Tells the warp that multiplies what has come. Values beyond the sequence are a neighbour's or nobody's, and 0 * NaN
// is NaN.
template <BlackwellTile T>
TANDEM_DEVICE void relay(ForwardShared<T>& s) {
  const int lane = threadIdx.x % 32;
  Ring<T.ring()> ring;
  Ring<kWorkSlots> slot;
  u32 q_parity = 0;  // a bit for each tile
  auto pass = [&](u64* here, u64* relayed, u32 parity) {
    mbarrier_wait(here, parity);
    __syncwarp();
    if (lane == 0) arrive_at_leader<T>(relayed);
  };
  auto pass_blocks = [&](int blocks) {
#pragma unroll 1
    for (int b = 0; b < blocks; ++b, ring.advance())
      pass(&s.ring_here[ring.slot], &s.ring_relayed[ring.slot], ring.parity);
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
    const int begin = work.begin, end = work.end, k_len = work.tile.k_len;
    const int has = work.has(0) | (T.tiles() > 1 && work.has(1)) << 1;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
    for (int step = end - 1; step >= begin; --step) {
      pass_blocks(T.blocks_k());
      for (int i = 0; i < T.tiles() && step == end - 1; ++i) {
        if (!(has >> i & 1)) continue;
        pass(&s.q_here[i], &s.q_relayed[i], q_parity >> i & 1);
        q_parity ^= 1 << i;
      }
      const int left = k_len - step * T.keys;
      if (T.ragged && step == end - 1 && left < T.keys) clear_values<T>(s, ring, max(0, left));
      pass_blocks(T.blocks_v());
    }
  }
}

// ---- Products: a thread, of a pair the leader's ----

// Probabilities that wait for their product with the values.
template <BlackwellTile T>
struct Pending {
  bool any = false, first, last;  // first, last: of the steps of its tile
  Ring<T.scores_of_tile()> place;
};

template <BlackwellTile T>
TANDEM_DEVICE void mma(ForwardShared<T>& s) {
  constexpr int kCtas = T.ctas(), kTiles = T.tiles(), kRows = T.rows_together();
  Ring<T.ring()> ring;
  Ring<kWorkSlots> slot;
  Ring<T.scores_of_tile()> place[kTiles];
  u32 q_parity[kTiles] = {}, o_parity[kTiles];
  Pending<T> pending[kTiles];
  Ring<T.ring()> values;  // of the pending products
  bool any_pending = false;
  const u64 q = tcgen05_matrix(shared_address(s.q), 0, 1024), k = tcgen05_matrix(shared_address(s.ring), 0, 1024);
  const u64 v = tcgen05_matrix(shared_address(s.ring), T.keys_of_values() * 128, 1024);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) o_parity[i] = 1;

  auto wait = [](u64* barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
  };
  auto multiply_keys = [&](int i, Ring<T.ring()> at) {
    const int scores = kTiles > 1 ? i : place[i].slot;
#pragma unroll
    for (int b = 0; b < T.blocks_k(); ++b, at.advance()) {
      wait(s.ring_full(at.slot), at.parity);
      const u64 k_b = k + at.slot * (T.block() >> 4), q_b = q + (i * T.blocks_k() + b) * (T.kTileBlock >> 4);
#pragma unroll
      for (int c = 0; c < 4 && 4 * b + c < T.head_dim / 16; ++c)
        tcgen05_mma<kCtas>(T.scores_at(scores), q_b + c * 2, k_b + c * 2, tcgen05_product(T.f16, kRows, T.keys, false),
                           b + c > 0);
    }
    tcgen05_commit<kCtas>(&s.s_ready[scores]);
  };
  auto multiply_values = [&](int i) {
    const Pending<T> it = pending[i];
    const int from = kTiles > 1 ? i : it.place.slot;
    if (it.first) {
      wait(&s.o_empty[i], o_parity[i]);
      o_parity[i] ^= 1;
    }
    Ring<T.ring()> at = values;
    u64 v_b = 0;
#pragma unroll
    for (int c = 0; c < T.keys / 16; ++c) {
      if (c == 0 || c == T.kFirstPart / 16) wait(&s.p_ready[from][c > 0], it.place.parity);
      if (c * 16 % T.keys_of_values() == 0) {
        if (c > 0) at.advance();
        wait(s.ring_full(at.slot), at.parity);
        v_b = v + at.slot * (T.block() >> 4);
      }
      tcgen05_mma<kCtas>(T.result_at(i), T.probabilities_at(from) + 8 * c,
                         v_b + c % (T.keys_of_values() / 16) * (2048 >> 4),
                         tcgen05_product(T.f16, kRows, T.result_columns(), true), !(it.first && c == 0));
    }
    if (kTiles == 1) tcgen05_commit<kCtas>(&s.o_added[i]);
    if (it.last) tcgen05_commit<kCtas>(&s.o_full[i]);
  };
  auto release = [&](Ring<T.ring()> at, int blocks) {
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
      if (pending[i].any) multiply_values(i);
      if (i == kTiles - 1 && any_pending) release(values, T.blocks_v());
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
    if (!over) mbarrier_arrive(&s.work_empty[slot.slot]);
#pragma unroll 1
    for (int step = end - 1; step >= begin; --step) {
      const Ring<T.ring()> keys = ring;
      turn([&](int i) {
        if (step < begins[i] || step >= ends[i]) return Pending<T>();
        if (step == ends[i] - 1) {
          wait(s.q_full(i), q_parity[i]);
          q_parity[i] ^= 1;
        }
        multiply_keys(i, keys);
        if (step == begins[i]) tcgen05_commit<kCtas>(&s.q_empty[i]);
        const Pending<T> now{true, step == ends[i] - 1, step == begins[i], place[i]};
        place[i].advance();
        return now;
      });
      any_pending = tiles;
      if (!tiles) break;
      release(keys, T.blocks_k());
#pragma unroll
      for (int b = 0; b < T.blocks_k(); ++b) ring.advance();
      values = ring;
#pragma unroll
      for (int b = 0; b < T.blocks_v(); ++b) ring.advance();
    }
  }
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

// A chunk of scores becomes probabilities. plain: all on the exponential unit. Else, where nobody has looked at them,
// largest becomes the largest of those scores that are not.
template <BlackwellTile T, bool plain>
TANDEM_DEVICE void exponentials(const float (&x)[kChunk], const Exponents& e, Pair* sum, u32 to, float* largest) {
  u32 packed[kChunk / 2];
#pragma unroll
  for (int n = 0; n < kChunk / 2; ++n) {
    const Pair scores = pair_of(x[2 * n], x[2 * n + 1]);
    const Pair y = !plain && on_fma_units<T>(n) ? exp2_of_fma_units(scores, e, T.unchecked() ? largest : nullptr)
                                                : exp2_of_exponential_unit(scores, e);
    *sum = *sum + y;
    float low, high;
    split(y, &low, &high);
    packed[n] = pack<T>(low, high);
  }
  tmem_store(to, packed);
}

// Chunks of a step of which some rows of the warp see some columns, and those that all rows see whole, [0, all_end):
// all or all but one. From one row to the next a bound moves by one at most.
template <BlackwellTile T>
struct SeenChunks {
  int some_end, all_end;
  u32 some_bits;  // a bit for each, where there is a left bound

  TANDEM_DEVICE SeenChunks(const Seen& seen, int step) {
    const int most_end = __shfl_sync(~0u, seen.end - step * T.keys, 31);
    some_end = (most_end + 31) >> 5;
    all_end = (most_end - 31) >> 5;
    if constexpr (T.left) {
      const int least = max(uniform(seen.begin - step * T.keys), 0) >> 5;
      some_bits = columns_of(least, max(some_end - least, 0));
    }
  }
  TANDEM_DEVICE bool some(int c) const { return T.left ? some_bits >> c & 1 : c == 0 || c < some_end; }
  // With both bounds the question costs more than it saves.
  TANDEM_DEVICE bool all(int c) const { return !T.left && c < all_end; }
};

// Scores of chunk c of a step that the row does not see become -infinity.
template <BlackwellTile T>
TANDEM_DEVICE void hide(float (&x)[kChunk], const Seen& seen, int step, int c) {
  const int first = c * kChunk, end = seen.end - step * T.keys;
  u32 visible;
  if constexpr (T.left) {
    const int begin = max(seen.begin - step * T.keys, first);
    visible = columns_of(begin - first, max(end - begin, 0));
  } else {
    visible = columns_of(0, max(end - first, 0));
  }
#pragma unroll
  for (int n = 0; n < kChunk; ++n) x[n] = score_where(visible, n, x[n]);
}

TANDEM_DEVICE float largest_of(const float (&x)[kChunk], float largest) {
#pragma unroll
  for (int n = 0; n < kChunk; ++n) largest = fmaxf(largest, x[n]);
  return largest;
}

// A warp's rows of tile i in tensor memory, from one step to the next.
template <BlackwellTile T>
struct TensorRows {
  ForwardShared<T>& s;
  const int i, lane;
  const u32 lanes;
  Ring<T.scores_of_tile()> turn;
  int place;  // of this step's scores
  u32 scores, probabilities;

  TANDEM_DEVICE TensorRows(ForwardShared<T>& s, int i, int warp, int lane)
      : s(s), i(i), lane(lane), lanes(static_cast<u32>(warp) * 32 << 16), place(i) {
    scores = probabilities = lanes + T.scores_at(i);
  }
  TANDEM_DEVICE void wait_for_scores() {
    if (T.tiles() == 1) {
      place = turn.slot;
      scores = probabilities = lanes + T.scores_at(place);
    }
    mbarrier_wait(&s.s_ready[place], turn.parity);
    turn.advance();
    tcgen05_fence_after();
  }
  TANDEM_DEVICE void hand_over(int part) {
    tmem_wait_store();
    tcgen05_fence_before();
    __syncwarp();
    if (lane == 0) arrive_at_leader<T>(&s.p_ready[place][part]);
  }
  TANDEM_DEVICE void hand_over_first_after(int chunk) {
    if (chunk == T.kFirstPart / kChunk - 1) hand_over(0);
  }
  TANDEM_DEVICE void scale_result(float by) {
    const Pair factor = pair_of(by);
    const u32 result = lanes + T.result_at(0) + i * T.result_columns();
    if (T.tiles() == 1) {  // the values of the step before may still be under way
      mbarrier_wait(&s.o_added[i], place ^ 1);
      tcgen05_fence_after();
    }
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 16) {
      float x[16];
      tmem_load(x, result + c);
      tmem_wait_load(x);
#pragma unroll
      for (int n = 0; n < 16; n += 2) split(pair_of(x[n], x[n + 1]) * factor, &x[n], &x[n + 1]);
      tmem_store(result + c, x);
    }
  }
};

// The steps of one unit of work, for a warp's rows of one of its tiles.
template <BlackwellTile T>
struct Softmax {
  static constexpr int kChunks = T.keys / kChunk;
  // Whether steps that hide and others are of the same code: all scores are looked at, and all exponentials are taken
  // on the exponential unit.
  static constexpr bool kOneKind = !T.unchecked() && T.fma_pairs == 0;

  const ForwardParams& p;
  const Tile& tile;
  const ScoreScale& scale;
  TensorRows<T>& rows;
  const Row row;
  const Seen seen;
  const int end, whole_begin, whole_end;
  RowSoftmax softmax;
  bool lost = false;

  // Moves this row's shift where a score is too far beyond it.
  TANDEM_DEVICE Exponents look_at(float largest, int step) {
    softmax.look_at_scores(largest, scale);
    if (softmax.rescale && step < end - 1) rows.scale_result(softmax.factor);
    return Exponents(scale, softmax.shift);
  }

  // A step that looks at its scores, and hides some of them; where there is one kind of steps, if it must.
  TANDEM_DEVICE void masked(int step) {
    float x[kChunks][kChunk], largest = -kInfinity;
    const SeenChunks<T> chunks(seen, step);
    rows.wait_for_scores();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) tmem_load(x[c], rows.scores + c * kChunk);
    tmem_wait_load(x);
    if (kOneKind && agreed(step >= whole_end || step < whole_begin)) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (chunks.some(c) && !chunks.all(c)) hide<T>(x[c], seen, step, c);
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!chunks.some(c)) continue;
      if (!kOneKind && !chunks.all(c)) hide<T>(x[c], seen, step, c);
      largest = largest_of(x[c], largest);
    }
    const Exponents e = look_at(largest, step);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (chunks.some(c)) {
        exponentials<T, true>(x[c], e, &softmax.sum, rows.probabilities + c * (kChunk / 2), &largest);
      } else {
        const u32 zeros[kChunk / 2] = {};
        tmem_store(rows.probabilities + c * (kChunk / 2), zeros);
      }
      rows.hand_over_first_after(c);
    }
    rows.hand_over(1);
  }

  // One that hides nothing. Half of the scores are loaded twice: registers for all would leave none to take
  // exponentials of one chunk while another is stored.
  TANDEM_DEVICE void checked(int step) {
    float x[kChunks][kChunk], largest = -kInfinity;
    rows.wait_for_scores();
#pragma unroll
    for (int c = kChunks - 1; c >= 0; --c) tmem_load(x[c], rows.scores + c * kChunk);
#pragma unroll
    for (int c = kChunks - 1; c >= 0; --c) {
      tmem_wait_load(x[c]);
      largest = largest_of(x[c], largest);
    }
    const Exponents e = look_at(largest, step);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c >= kChunks / 2) tmem_wait_load(x[c]);
      if (c >= kChunks / 2 - 1 && c < kChunks - 1) tmem_load(x[c + 1], rows.scores + (c + 1) * kChunk);
      exponentials<T, false>(x[c], e, &softmax.sum, rows.probabilities + c * (kChunk / 2), &largest);
      rows.hand_over_first_after(c);
    }
    rows.hand_over(1);
  }

  // The same of scores that are more than products: they are changed where they lie.
  TANDEM_DEVICE void changed(int step) {
    const Change<T> change(p, tile, row);
    float x[kChunk], largest = -kInfinity;
    rows.wait_for_scores();
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      const int column0 = step * T.keys + c * kChunk;
      tmem_load(x, rows.scores + c * kChunk);
      tmem_wait_load(x);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) x[n] = change(x[n], p, column0 + n);
      hide<T>(x, seen, step, c);
      largest = largest_of(x, largest);
      tmem_store(rows.scores + c * kChunk, x);
    }
    tmem_wait_store();
    const Exponents e = look_at(largest, step);
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      tmem_load(x, rows.scores + c * kChunk);
      tmem_wait_load(x);
      exponentials<T, true>(x, e, &softmax.sum, rows.probabilities + c * (kChunk / 2), &largest);
      rows.hand_over_first_after(c);
    }
    rows.hand_over(1);
  }

  // One that hides nothing and does not look before: the sums of the steps before say whether the shift must move.
  TANDEM_DEVICE void unchecked(Exponents& e) {
    softmax.look_at_sums();
    rows.wait_for_scores();
    if (softmax.rescale) {
      lost |= softmax.move_by_sums(scale);
      e = Exponents(scale, softmax.shift);
      rows.scale_result(softmax.factor);
    }
    float x[2][kChunk], largest = -kInfinity;
    tmem_load(x[0], rows.scores);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      tmem_wait_load(x[c % 2]);
      if (c < kChunks - 1) tmem_load(x[(c + 1) % 2], rows.scores + (c + 1) * kChunk);
      exponentials<T, false>(x[c % 2], e, &softmax.sum, rows.probabilities + c * (kChunk / 2), &largest);
      rows.hand_over_first_after(c);
    }
    rows.hand_over(1);
    lost |= softmax.outgrown_by(largest, scale);  // its exponential may be anything, and the sum look well
  }

  TANDEM_DEVICE void plain(int step, Exponents& e) {
    if constexpr (T.unchecked()) {
      unchecked(e);
    } else {
      checked(step);
    }
  }
};

template <BlackwellTile T>
TANDEM_DEVICE void softmax(const ForwardParams& p, ForwardShared<T>& s, int i) {
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  const ScoreScale scale(T.changed() ? 1.0f : p.scale_log2);
  TensorRows<T> rows(s, i, warp, lane);
  u32 sum_parity = 1;
  Ring<kWorkSlots> slot;
  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    Work& work = s.work[slot.slot];
    const auto kind = static_cast<Work::Kind>(uniform(static_cast<int>(work.kind)));
    if (kind == Work::Kind::over) break;
    if (kind == Work::Kind::tiles && agreed(work.has(i))) {
      const Tile& tile = work.tile;
      const int begin = uniform(work.begins[i]), end = uniform(work.ends[i]);
      const int whole_begin = uniform(work.whole_begins[i]), whole_end = uniform(work.whole_ends[i]);
      const bool careful = agreed(work.careful);
      const Row row(p, tile, first_row_of<T>(tile, i) + warp * 32 + lane);
      const bool used = row.query < tile.q_len;
      Softmax<T> steps{p, tile, scale, rows, row, seen_by<T>(p, tile, row), end, whole_begin, whole_end};
      int step = end - 1;
      if constexpr (T.changed()) {
#pragma unroll 1
        for (; agreed(step >= begin); --step) steps.changed(step);
      } else {
        // The first step that hides nothing may be the first in which a row sees a key.
        int checked_end = T.right ? min(step, whole_end - T.unchecked()) : step;
        if (T.unchecked() && careful) checked_end = begin;
        [[maybe_unused]] Exponents e(scale, steps.softmax.shift);
        if constexpr (Softmax<T>::kOneKind) {
#pragma unroll 1
          for (; agreed(step >= begin); --step) steps.masked(step);
        } else if constexpr (T.left) {
          // A window hides at both ends: loops one after the other would have the step that hides twice, and compile
          // longer.
          [[maybe_unused]] bool moved = false;  // the shift, since e was made
#pragma unroll 1
          for (; agreed(step >= begin); --step) {
            if (agreed(step >= checked_end || step < whole_begin)) {
              steps.masked(step);
              moved = true;
            } else {
              if (T.unchecked() && agreed(moved)) e = Exponents(scale, steps.softmax.shift);
              moved = false;
              steps.plain(step, e);
            }
          }
        } else {
#pragma unroll 1
          for (; agreed(step >= max(checked_end, begin)); --step) steps.masked(step);
          e = Exponents(scale, steps.softmax.shift);
#pragma unroll 1
          for (; agreed(step >= begin); --step) steps.plain(step, e);
        }
      }
      if (T.unchecked() && !careful && __any_sync(~0u, used && (steps.lost || steps.softmax.lost())) && lane == 0)
        store_relaxed(&work.lost, 1);
      mbarrier_wait(&s.sum_empty[i], sum_parity);
      sum_parity ^= 1;
      s.sum[i][warp * 32 + lane] = steps.softmax.final_sum();
      s.shift[i][warp * 32 + lane] = steps.softmax.shift;
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
    const int first_row = first_row_of<T>(tile, i);
    const int rows_left = (tile.q_rows << together) - first_row;
    const Row row(p, tile, first_row + thread);
    const u32 parity = parities >> i & 1;
    parities ^= 1 << i;
    mbarrier_wait(&s.sum_ready[i], parity);
    const RowEnd end = end_of_row<T>(p, row, !T.ragged || row.query < tile.q_len, s.sum[i][thread], s.shift[i][thread]);
    if (p.lse && row.query < tile.q_rows)
      p.lse[tile.batch * p.lse_batch + row.head * p.lse_head + (tile.q_begin + row.query) * p.lse_row] = end.lse;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.sum_empty[i]);
    mbarrier_wait(&s.o_full[i], parity);
    constexpr int kBlocks = T.blocks(T.head_dim_v);
    for (int block = 0; block < kBlocks; ++block, out.advance()) {
      // Once the last store from this place has read it.
      if (warp == 0 && elect_one()) tma_store_wait_read<T.blocks_out() - 1>();
      named_sync(kTogether, 128);
      tcgen05_fence_after();
      auto* to = reinterpret_cast<Chunk*>(s.out[out.slot]) + thread * 8;
#pragma unroll 1
      for (int c = 0; c < 8; c += 2) {  // chunks of 8 columns
        const int column = 64 * block + 8 * c;
        if (column >= T.head_dim_v) break;
        float x[16];
        tmem_load(x, lanes + T.result_at(0) + i * T.result_columns() + column);
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
      if (block == kBlocks - 1) {
        tcgen05_fence_before();
        __syncwarp();
        if (lane == 0) arrive_at_leader<T>(&s.o_empty[i]);
      }
      fence_proxy_async();
      named_sync(kTogether, 128);
      if (T.ragged && rows_left < T.kTileRows) {
        store_rows<T>(p, tile, s.out[out.slot], first_row, rows_left, 64 * block);
        named_sync(kTogether, 128);
      } else if (warp == 0 && elect_one()) {
        if (T.unchecked() && work.careful) tma_store_wait();  // for the result that was no good
        tma_store(&p.out, s.out[out.slot], 64 * block, 0, tile.q_begin + (first_row >> together), tile.head,
                  tile.batch);
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
      for (int i = 0; i < T.tiles(); ++i)
        if (agreed(work.has(i))) finish(work, i);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.slot]);
  }
  if (warp == 0 && elect_one()) tma_store_wait();
}

// ---- The kernel ----

enum class Role { softmax, correction, mma, load, relay, none };
template <BlackwellTile T>
TANDEM_DEVICE Role role_of(int warp) {
  constexpr int kOthers = 4 * (T.tiles() + 1);
  if (warp < 4 * T.tiles()) return Role::softmax;
  if (warp < kOthers) return Role::correction;
  if (warp == kOthers) return rank_of_cta<T>() == 0 ? Role::mma : Role::none;
  if (warp == kOthers + 1) return Role::load;
  return T.relays() && warp == kOthers + 2 ? Role::relay : Role::none;
}

template <BlackwellTile T>
TANDEM_DEVICE void sync_all() {
  if constexpr (T.pair) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

template <BlackwellTile T>
TANDEM_DEVICE void begin(ForwardShared<T>& s, int warp) {
  // Warps that learn from load() what there is to do.
  const int warps = 4 * (T.tiles() + 1) + (rank_of_cta<T>() == 0) + T.relays();
  constexpr int ctas = T.ctas();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kWorkSlots; ++i) {
      s.work[i].lost = 0;
      mbarrier_init(&s.work_full[i], 1);
      mbarrier_init(&s.work_empty[i], warps);
    }
#pragma unroll 1
    for (int i = 0; i < T.ring(); ++i) {
      mbarrier_init(&s.ring_here[i], 1);
      mbarrier_init(&s.ring_empty[i], 1);
      if (T.relays()) mbarrier_init(&s.ring_relayed[i], ctas);
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(&s.taken_full[i], 1);
#pragma unroll 1
    for (int i = 0; i < T.kScores; ++i) {
      mbarrier_init(&s.s_ready[i], 1);
      mbarrier_init(&s.p_ready[i][0], 4 * ctas);
      mbarrier_init(&s.p_ready[i][1], 4 * ctas);
    }
#pragma unroll 1
    for (int i = 0; i < T.tiles(); ++i) {
      mbarrier_init(&s.q_here[i], 1);
      mbarrier_init(&s.q_empty[i], 1);
      mbarrier_init(&s.q_relayed[i], ctas);
      mbarrier_init(&s.o_added[i], 1);
      mbarrier_init(&s.sum_ready[i], 4);
      mbarrier_init(&s.sum_empty[i], 4);
      mbarrier_init(&s.o_full[i], 1);
      mbarrier_init(&s.o_empty[i], 4 * ctas);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  if (warp == 0) tmem_alloc<ctas>(&s.tensor_memory, T.kColumns);  // all there are: they begin at 0
  sync_all<T>();
}

template <BlackwellTile T>
TANDEM_DEVICE void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<ForwardShared<T>*>(memory);
  static_assert(sizeof(ForwardShared<T>) <= T.shared_bytes());
  static_assert(T.fits());
  const int warp = uniform(threadIdx.x / 32);
  begin(s, warp);
  const Role role = role_of<T>(warp);
  switch (role) {
    case Role::softmax:
      registers_up<T.softmax_registers()>();
      softmax(p, s, warp / 4);
      break;
    case Role::correction:
      registers_down<T.correction_registers()>();
      correction(p, s);
      break;
    default:
      registers_down<T.other_registers()>();
      if (role == Role::mma && elect_one()) mma(s);
      if (role == Role::load && elect_one()) load(p, s);
      if constexpr (T.relays()) {
        if (role == Role::relay) relay(s);
      }
      __syncwarp();
  }
  sync_all<T>();
  if (uniform(threadIdx.x / 32) == 0) tmem_free<T.ctas()>(s.tensor_memory, T.kColumns);
}
