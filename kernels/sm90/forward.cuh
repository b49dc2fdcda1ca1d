// Attention forward for Hopper: out = softmax(scale q k^T) v and its log-sum-exp.
//
// One CTA per SM takes tiles of 64 rows per computing warpgroup, the longest first, from a counter (ragged sequences:
// from a list that schedule() has made). A warpgroup leaves out the steps of its tile that its own rows do not see. One
// warp loads with TMA; the warpgroups may take turns on the tensor core ("->": passes the turn), so that the softmax of
// one runs under the products of the others, and each issues the next q k^T before it waits for p v:
//
//    load        | warpgroup 0              | warpgroup 1
//    K1, Q, K0   | S = Q K1              -> |
//    V1          | softmax                  | S = Q K1              ->
//    K', V0      | S' = Q K0, O += P V1  -> | softmax
//                | softmax of S' under P V1 | S' = Q K0, O += P V1  ->
//                | (O *= factor), P = S'    | softmax of S' under P V1
//
// Shared memory: Q [queries][head_dim] in blocks of 64 columns, K and V rings and O alike, all swizzled by 128 bytes.
// Each warpgroup has its own part of Q and of O (or, where there is no room, all have one in turn), so that the queries
// of the next tile come in while it computes. Registers of a computing thread at head_dim 128: S 64, O 64, P 32, Q 32.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "shared/forward.h"
#include "tile/ring.cuh"
#include "tile/scores.cuh"
#include "tile/softmax.cuh"
#include "tile/work.cuh"

template <ForwardTile T>
struct ForwardShared {
  alignas(1024) u16 q[T.rows() * T.columns_k()];
  alignas(1024) u16 k[T.stages][T.keys * T.columns_k()];
  alignas(1024) u16 v[T.stages][T.keys * T.columns_v()];
  alignas(1024) u16 out[T.result_rows() * T.columns_v()];
  alignas(8) u64 q_full[T.warpgroups], q_empty[T.warpgroups];
  u64 k_full[T.stages], k_empty[T.stages], v_full[T.stages], v_empty[T.stages];
  // Of tiles under way: a warpgroup may be at the end of one when the queries of the next but one come in.
  static constexpr int kTiles = 4;
  int unit[kTiles];      // beyond the last: -1
  bool careful[kTiles];  // whether all steps are checked, because it is done again
  int lost[kTiles];      // whether it has to be done again
  Tile tile[kTiles];     // ragged: what load() found out about it
};

// One thread: for every tile its queries, and its keys and values from the last to the first. A tile that comes out
// lost is taken again when its slot is wanted, or when there are no others.
template <ForwardTile T>
TANDEM_DEVICE void load(const ForwardParams& p, ForwardShared<T>& s) {
  constexpr int kTiles = ForwardShared<T>::kTiles;
  Ring<T.stages> k_ring, v_ring;
  u32 begun = 0;  // tiles
  const int together = log2_of(p.together), heads = p.heads_q >> together;
  const int listed = T.ragged ? p.counter[1] : 0, units = T.ragged ? listed * heads : p.tiles;
  // Until all values have been given up, and with them all tiles are done.
  auto wait_for_tiles = [&] {
    Ring<T.stages> ring = v_ring;
#pragma unroll 1
    for (int i = 0; i < T.stages; ++i, ring.advance()) mbarrier_wait(&s.v_empty[ring.slot], ring.parity ^ 1);
  };
  for (int fresh = blockIdx.x;;) {
    int n = fresh;
    bool careful = false;
    auto take_lost = [&](int at) {
      if (careful || !s.lost[at]) return;
      careful = true;
      n = s.unit[at];
      s.lost[at] = 0;
    };
    if constexpr (T.unchecked()) take_lost(begun % kTiles);
    if (!careful && fresh >= units) {
      wait_for_tiles();
      for (int at = 0; T.unchecked() && at < kTiles; ++at) take_lost(at);
      if (!careful) break;
    }
    const Tile tile = tile_at<T>(p, n, listed);
    const int head_k = (tile.head << together) / (p.heads_q / p.heads_k);
    auto load_step = [&](auto& slots, auto& full, auto& empty, Ring<T.stages>& ring, const TensorMap& map, int columns,
                         int step) {
      mbarrier_wait(&empty[ring.slot], ring.parity ^ 1);
      mbarrier_expect_tx(&full[ring.slot], sizeof slots[0]);
#pragma unroll 1
      for (int c = 0; c < columns; c += 64)
        tma_load(slots[ring.slot] + c * T.keys, &map, &full[ring.slot], c, tile.k_begin + step * T.keys, head_k,
                 tile.batch);
      ring.advance();
    };
    auto load_keys = [&](int step) { load_step(s.k, s.k_full, s.k_empty, k_ring, p.k, T.head_dim, step); };
    auto load_values = [&](int step) { load_step(s.v, s.v_full, s.v_empty, v_ring, p.v, T.head_dim_v, step); };
    const Steps steps = steps_of<T>(p, tile);
    load_keys(steps.end - 1);
    const u32 slot = begun % kTiles;
#pragma unroll 1
    for (int i = 0; i < T.warpgroups; ++i) {
      mbarrier_wait(&s.q_empty[i], begun & 1 ^ 1);
      if (i == 0) {
        s.unit[slot] = n;
        s.careful[slot] = careful;
        if constexpr (T.ragged) s.tile[slot] = tile;
      }
      mbarrier_expect_tx(&s.q_full[i], 64 * T.columns_k() * 2);
#pragma unroll 1
      for (int c = 0; c < T.head_dim; c += 64)
        tma_load(s.q + c * T.rows() + i * 64 * 64, &p.q, &s.q_full[i], c, 0,
                 tile.q_begin + (tile.m * T.rows() + i * 64 >> together), tile.head, tile.batch);
    }
    ++begun;
    if (!careful) fresh = (p.counter ? atomicAdd(p.counter, 1) : fresh) + gridDim.x;
    for (int step = steps.end - 1; step >= steps.begin; --step) {
      if (step > steps.begin) load_keys(step - 1);
      load_values(step);
    }
  }
  s.unit[begun % kTiles] = -1;
  for (u64& full : s.q_full) mbarrier_arrive(&full);
}

// A thread has two rows of a fragment, and in each every register r at this column from its first.
TANDEM_DEVICE constexpr int column_of(int r) { return 8 * (r >> 2) + (r & 1); }

// Scores in log2 units from products.
template <ForwardTile T, int n>
TANDEM_DEVICE void change(float (&s)[n], const ForwardParams& p, const Tile& t, const Row (&rows)[2], int column0) {
  const Change<T> changes[2] = {{p, t, rows[0]}, {p, t, rows[1]}};
#pragma unroll
  for (int r = 0; r < n; ++r) s[r] = changes[row_of(r)](s[r], p, column0 + column_of(r));
}

// Hides what lies beyond the keys or outside the window.
template <ForwardTile T, int n>
TANDEM_DEVICE void hide(float (&s)[n], const ForwardParams& p, const Tile& t, const Row (&rows)[2], int column0) {
  const Seen seen[2] = {seen_by<T>(p, t, rows[0]), seen_by<T>(p, t, rows[1])};
  const u32 count[2] = {static_cast<u32>(max(0, seen[0].end - seen[0].begin)),
                        static_cast<u32>(max(0, seen[1].end - seen[1].begin))};
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int i = row_of(r), column = column0 + column_of(r);
    if (T.left ? static_cast<u32>(column - seen[i].begin) >= count[i] : column >= seen[i].end) s[r] = -kInfinity;
  }
}

template <ForwardTile T>
TANDEM_DEVICE u32 pack(float low, float high) {
  u32 both;
  if constexpr (T.f16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

// Rows [begin, T.keys) of the values become zeros. thread: among all that compute.
template <ForwardTile T>
TANDEM_DEVICE void clear_rows(u16* values, int begin, int thread) {
  struct alignas(16) Chunk {
    u32 x[4];
  };
  constexpr int kChunks = 8;  // of 16 bytes, in a row of 64 columns
  auto* chunks = reinterpret_cast<Chunk*>(values);
  const int count = (T.keys - begin) * kChunks;
#pragma unroll 1
  for (int block = 0; block < T.columns_v() / 64; ++block)
#pragma unroll 1
    for (int i = thread; i < count; i += 128 * T.warpgroups)
      chunks[(block * T.keys + begin) * kChunks + i] = {0, 0, 0, 0};
}

// Ordinary stores, where the 64 rows of a warpgroup go beyond the sequence: count of them belong to it.
template <ForwardTile T>
TANDEM_DEVICE void store_rows(const ForwardParams& p, const Tile& t, const u16* from, int first_row, int count) {
  struct alignas(16) Chunk {
    u32 x[4];
  };
  const int together = log2_of(p.together), chunks = p.head_dim_v / 8;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < count * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks, at = first_row + row;
    const int swizzled = chunk / 8 * T.result_rows() * 8 + row * 8 + ((chunk & 7) ^ (row & 7));
    u16* to = static_cast<u16*>(p.out_data) + t.batch * p.out_batch + (t.q_begin + (at >> together)) * p.out_row +
              ((t.head << together) + (at & (p.together - 1))) * p.out_head + chunk * 8;
    *reinterpret_cast<Chunk*>(to) = reinterpret_cast<const Chunk*>(from)[swizzled];
  }
}

// A computing warpgroup: where it is in the rings, its turns on the tensor core, its products.
template <ForwardTile T>
struct Warpgroup {
  using Values = Wgmma<T.f16, T.head_dim_v>;
  using Queries = u32[T.queries_in_registers() ? T.head_dim / 16 : 1][4];
  // Named barriers: one per warpgroup; kEverybody: one.
  static constexpr int kTurn = 1, kTogether = 8, kPlace = 12, kEverybody = 15;
  static constexpr u32 kQueryBlock = T.rows() * 128, kResultBlock = T.result_rows() * 128,
                       kKeyBlock = T.keys * 128;  // bytes of 64 columns

  const ForwardParams& p;
  ForwardShared<T>& s;
  const int index;
  const int warp, lane;
  const u32 q_address;
  Ring<T.stages> k_ring, v_ring;
  u32 taken = 0;  // tiles

  TANDEM_DEVICE Warpgroup(const ForwardParams& params, ForwardShared<T>& shared, int warpgroup)
      : p(params),
        s(shared),
        index(warpgroup),
        warp(threadIdx.x % 128 / 32),
        lane(threadIdx.x % 32),
        q_address(shared_address(s.q) + warpgroup * 64 * 128) {}

  TANDEM_DEVICE void take_turn() const {
    if (T.turns) named_sync(kTurn + index, 256);
  }
  TANDEM_DEVICE void pass_turn() const {
    if (T.turns) named_arrive(kTurn + (index + 1) % T.warpgroups, 256);
  }
  // The place of the result, where all have but one.
  TANDEM_DEVICE void take_place() const {
    if (T.result_in_turns()) named_sync(kPlace + index, 256);
  }
  TANDEM_DEVICE void pass_place() const {
    if (T.result_in_turns()) named_arrive(kPlace + (index + 1) % T.warpgroups, 256);
  }
  TANDEM_DEVICE void wait_for_keys() const { mbarrier_wait(&s.k_full[k_ring.slot], k_ring.parity); }
  TANDEM_DEVICE void wait_for_values() const { mbarrier_wait(&s.v_full[v_ring.slot], v_ring.parity); }
  TANDEM_DEVICE void free_keys() {
    if (lane == 0) mbarrier_arrive(&s.k_empty[k_ring.slot]);
    k_ring.advance();
  }
  TANDEM_DEVICE void free_values() {
    if (lane == 0) mbarrier_arrive(&s.v_empty[v_ring.slot]);
    v_ring.advance();
  }
  TANDEM_DEVICE void free_queries() const {
    if (lane == 0) mbarrier_arrive(&s.q_empty[index]);
  }
  // The next tile, whose queries are here then.
  TANDEM_DEVICE int take() {
    mbarrier_wait(&s.q_full[index], taken++ & 1);
    return uniform(s.unit[slot()]);
  }
  TANDEM_DEVICE u32 slot() const { return (taken - 1) % ForwardShared<T>::kTiles; }
  TANDEM_DEVICE void give_up() const {  // the tile is done again
    if (lane == 0) store_relaxed(&s.lost[slot()], 1);
  }

  // Values beyond the sequence are a neighbour's or nobody's, and 0 * NaN is NaN. They are in the tile's last step,
  // which all warpgroups clear together, whether they need it or not.
  TANDEM_DEVICE void clear_values(const Tile& tile, const Steps& steps, int step, bool needed) const {
    if constexpr (T.ragged) {
      const int left = tile.k_len - step * T.keys;
      if (agreed(step == steps.end - 1 && left < T.keys)) {
        wait_for_values();
        clear_rows<T>(s.v[v_ring.slot], max(0, left), index * 128 + threadIdx.x % 128);
        fence_proxy_async();
        if (needed) {
          named_sync(kEverybody, 128 * T.warpgroups);
        } else {
          named_arrive(kEverybody, 128 * T.warpgroups);
        }
      }
    }
  }
  // A step that none of this warpgroup's rows needs.
  TANDEM_DEVICE void pass_step(const Tile& tile, const Steps& steps, int step) {
    wait_for_keys();
    take_turn();
    pass_turn();
    free_keys();
    clear_values(tile, steps, step, false);
    wait_for_values();
    free_values();
  }

  // Where this lane's 16 bytes of a 16 x 16 fragment lie, in a block of 64 columns.
  TANDEM_DEVICE u32 fragment(u32 base, u32 block, int n) const {
    const int row = warp * 16 + (lane & 15), chunk = n % 4 * 2 + (lane >> 4);
    return base + n / 4 * block + row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  TANDEM_DEVICE void load_queries(Queries& queries) const {
#pragma unroll
    for (int c = 0; c < T.head_dim / 16; ++c) ldmatrix(queries[c], fragment(q_address, kQueryBlock, c));
  }
  // Of so many products those that are issued by fours. At head_dim 64 single ones are 2 % faster: measured.
  static constexpr int by_fours(int products) { return T.head_dim > 64 ? products / 4 * 4 : 0; }
  // The first keys of a step, as many as there are scores.
  template <int n>
  TANDEM_DEVICE void multiply_keys(float (&scores)[n], const Queries& queries) const {
    using Scores = Wgmma<T.f16, 2 * n>;
    const u64 k = wgmma_matrix(shared_address(s.k[k_ring.slot]), 16, 1024);
    const u64 q = wgmma_matrix(q_address, 16, 1024);
    discard(scores);
    wgmma_fence();
    constexpr int kProducts = T.head_dim / 16;
    auto keys = [&](int c) { return k + c / 4 * (kKeyBlock >> 4) + c % 4 * 2; };
    auto left = [&](int c) {
      if constexpr (T.queries_in_registers()) {
        return &queries[c][0];
      } else {
        return q + c / 4 * (kQueryBlock >> 4) + c % 4 * 2;
      }
    };
#pragma unroll
    for (int c = 0; c < by_fours(kProducts); c += 4) Scores::scores_of_4(scores, left(c), keys(c), c > 0);
#pragma unroll
    for (int c = by_fours(kProducts); c < kProducts; ++c) Scores::scores(scores, left(c), keys(c), c > 0);
    wgmma_commit();
  }
  TANDEM_DEVICE void multiply_values(float (&out)[T.head_dim_v / 2], const u32 (&probabilities)[T.keys / 4]) const {
    const u64 v = wgmma_matrix(shared_address(s.v[v_ring.slot]), kKeyBlock, 1024);
    hold(out);
    wgmma_fence();
    constexpr int kProducts = T.keys / 16, kBytes = 2048;
    auto values = [&](int c) { return v + c * (kBytes >> 4); };
#pragma unroll
    for (int c = 0; c < by_fours(kProducts); c += 4) Values::values_of_4(out, probabilities + 4 * c, values(c), true);
#pragma unroll
    for (int c = by_fours(kProducts); c < kProducts; ++c) Values::values(out, probabilities + 4 * c, values(c), true);
    wgmma_commit();
  }

  // The warpgroup's rows of the result, once their place is free. left: as many of them as there are of the sequence
  // from first_row on.
  TANDEM_DEVICE void store(const float (&out)[T.head_dim_v / 2], const float (&inverse)[2], const Tile& tile,
                           int first_row, int left, bool again) const {
    if (T.result_in_turns()) {
      take_place();
    } else {
      tma_store_wait_read();
      named_sync(kTogether + index, 128);
    }
    u16* const own_out = s.out + (T.result_in_turns() ? 0 : index * 64 * 64);
#pragma unroll
    for (int c = 0; c < T.head_dim_v / 16; ++c) {
      u32 w[4];
#pragma unroll
      for (int x = 0; x < 4; ++x)
        w[x] = inverse[x & 1] == 0  // a row that sees nothing, whatever it met
                   ? 0
                   : pack<T>(out[8 * c + 2 * x] * inverse[x & 1], out[8 * c + 2 * x + 1] * inverse[x & 1]);
      stmatrix(fragment(shared_address(own_out), kResultBlock, c), w);
    }
    fence_proxy_async();
    named_sync(kTogether + index, 128);
    if (T.ragged && left < 64) {
      store_rows<T>(p, tile, own_out, first_row, left);
      named_sync(kTogether + index, 128);
    } else if (warp == 0 && elect_one()) {
      if (T.unchecked() && again) tma_store_wait();  // for the result that was no good
#pragma unroll 1
      for (int c = 0; c < T.head_dim_v; c += 64)
        tma_store(&p.out, own_out + c * T.result_rows(), c, 0, tile.q_begin + (first_row >> log2_of(p.together)),
                  tile.head, tile.batch);
      tma_store_commit();
      if (T.result_in_turns()) tma_store_wait_read();
    }
    pass_place();
  }
};

template <ForwardTile T>
TANDEM_DEVICE void compute(const ForwardParams& p, ForwardShared<T>& s, int index) {
  const float scale_log2 = T.changed() ? 1.0f : p.scale_log2, threshold = 8.0f / scale_log2;
  Warpgroup<T> w(p, s, index);
  if (index == T.warpgroups - 1) {
    w.pass_turn();
    w.pass_place();
  }

  for (int n = w.take(); n >= 0; n = w.take()) {
    const Tile dense = T.ragged ? Tile() : dense_tile<T>(p, n);
    const Tile& tile = T.ragged ? s.tile[w.slot()] : dense;  // stays there until the next tile is done
    const bool& careful = s.careful[w.slot()];
    const Steps steps = steps_of<T>(p, tile);
    // Of the warpgroup: its first row, and how many of the sequence there are from it on. Worked out where they are
    // needed, as the rows of this thread are: they are not worth registers through the main loop.
    auto first_row = [&] { return tile.m * T.rows() + index * 64; };
    auto rows_left = [&] { return (tile.q_rows << log2_of(p.together)) - first_row(); };
    auto own_row = [&](int i) {
      int row = first_row() + w.warp * 16 + w.lane / 4 + 8 * i;
      asm volatile("" : "+r"(row));
      return Row(p, tile, row);
    };

    Steps own = steps;
    if constexpr (T.left || T.right) {
      own = steps_of<T>(p, tile, first_row(), 64);
      own.begin = max(own.begin, steps.begin);
      own.end = max(own.end, own.begin + 1);
    }
    const bool nothing = agreed(rows_left() <= 0);  // the sequence ended in the warpgroups before
    const int seen_end = nothing ? steps.begin : own.end;
    int step = steps.end - 1;
#pragma unroll 1
    for (; agreed(step >= seen_end); --step) w.pass_step(tile, steps, step);
    if (nothing) {
      __syncwarp();
      w.free_queries();
      w.take_place();
      w.pass_place();
      continue;
    }

    float scores[T.keys / 2], out[T.head_dim_v / 2];
    u32 probabilities[T.keys / 4];
    typename Warpgroup<T>::Queries queries;
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] = 0;
    if constexpr (T.queries_in_registers()) {
      w.load_queries(queries);
      __syncwarp();
      w.free_queries();
    }

    // To scores. hides: some rows may not see some of the keys.
    auto finish_scores = [&](auto& scores, int step, bool hides) {
      const int column0 = step * T.keys + 2 * (w.lane & 3);
      if constexpr (T.changed()) change<T>(scores, p, tile, {own_row(0), own_row(1)}, column0);
      if (hides && (step >= own.whole_end || (T.left && step < own.whole_begin)))
        hide<T>(scores, p, tile, {own_row(0), own_row(1)}, column0);
    };
    auto to_probabilities = [&] {
#pragma unroll
      for (int r = 0; r < T.keys / 4; ++r) probabilities[r] = pack<T>(scores[2 * r], scores[2 * r + 1]);
    };

    w.wait_for_keys();
    w.take_turn();
    auto first_step = [&](auto& scores) {
      w.multiply_keys(scores, queries);
      w.pass_turn();
      wgmma_wait<0>();
      hold(scores);
      w.free_keys();
      finish_scores(scores, step, true);
      softmax.look_at_scores(scores, scale_log2, threshold);
      float more[2] = {0, 0};
      softmax.exponentials<0, sizeof scores / sizeof scores[0]>(scores, scale_log2, more);
      softmax.add(more);
    };
    // Of the step at the diagonal the upper warpgroup may need the first half only. (In other kernels ptxas then finds
    // no registers for products under way.)
    constexpr bool kHalf =
        T.right && T.keys == 128 && T.head_dim == 128 && T.head_dim_v == 128 && !T.left && !T.ragged && !T.changed();
    if (kHalf && agreed(own.end_key <= step * T.keys + T.keys / 2)) {
      if constexpr (kHalf) first_step(reinterpret_cast<float(&)[32]>(scores));
#pragma unroll
      for (int r = T.keys / 4; r < T.keys / 2; ++r) scores[r] = 0;
    } else {
      first_step(scores);
    }
    to_probabilities();
    w.clear_values(tile, steps, step, true);

    auto steady = [&](bool hides, bool checked) __attribute__((always_inline)) {
      w.wait_for_keys();
      w.take_turn();
      w.multiply_keys(scores, queries);
      w.wait_for_values();
      w.multiply_values(out, probabilities);
      w.pass_turn();
      if (!checked) softmax.look_at_sums(scale_log2, threshold, [&] { w.give_up(); });
      wgmma_wait<1>();
      hold(scores);
      w.free_keys();
      finish_scores(scores, step, hides);
      if (checked) softmax.look_at_scores(scores, scale_log2, threshold);
      // Some exponentials run under p v, the others beside the packing. ptxas would wait for p v before them all: a
      // branch (that is never taken) keeps it from that.
      constexpr int kAll = T.keys / 2, kUnder = T.exponentials_under_values();
      float more[2] = {0, 0};
      softmax.exponentials<0, kUnder>(scores, scale_log2, more);
      hold(scores);
      if (kUnder > 0 && threshold < 0) asm volatile("nanosleep.u32 0;" ::: "memory");
      wgmma_wait<0>();
      hold(out);
      w.free_values();
      if (softmax.rescale) {
#pragma unroll
        for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] *= softmax.factor[row_of(i)];
      }
      softmax.exponentials<kUnder, kAll>(scores, scale_log2, more);
      softmax.add(more);
      to_probabilities();
    };
    --step;
    // The first step that hides nothing may be the first in which a row sees a key.
    int checked_end = own.begin;
    if (!T.unchecked() || !agreed(careful))
      checked_end = max(checked_end, T.right ? own.whole_end - T.unchecked() : step + 1);
    // A step is long, and so is its compilation: one copy asks what it has to do. Only where results are narrow does
    // asking cost 2 %.
    constexpr bool kMasked = T.left || T.right, kTwoLoops = T.unchecked() && T.right && !T.left && T.head_dim_v <= 64;
    auto is_checked = [&] {
      if (!T.unchecked()) return true;
      return kMasked ? !kTwoLoops && agreed(step >= checked_end) : agreed(careful);
    };
    if constexpr (kTwoLoops) {
#pragma unroll 1
      for (; agreed(step >= checked_end); --step) steady(true, true);
    }
#pragma unroll 1
    for (; agreed(step >= own.begin); --step) steady(kMasked && !kTwoLoops, is_checked());

    if (T.unchecked() && softmax.lost()) w.give_up();
    if (!T.queries_in_registers()) w.free_queries();
    w.wait_for_values();
    w.multiply_values(out, probabilities);
    wgmma_wait<0>();
    hold(out);
    w.free_values();

    if constexpr (T.left) {
#pragma unroll 1
      for (; agreed(step >= steps.begin); --step) w.pass_step(tile, steps, step);
    }

    softmax.total();
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row = own_row(i);
      const RowEnd end = end_of_row<T>(p, row, !T.ragged || row.query < tile.q_len, softmax.sum[i], softmax.shift[i]);
      inverse[i] = end.inverse;
      if (p.lse && (w.lane & 3) == 0 && row.query < tile.q_rows)
        p.lse[tile.batch * p.lse_batch + row.head * p.lse_head + (tile.q_begin + row.query) * p.lse_row] = end.lse;
    }
    w.store(out, inverse, tile, first_row(), rows_left(), careful);
  }
  tma_store_wait();
}

template <ForwardTile T>
TANDEM_DEVICE void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<ForwardShared<T>*>(memory);
  static_assert(sizeof(ForwardShared<T>) <= T.shared_bytes());
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.q, &p.v, &p.out}) prefetch(map);
    for (int& lost : s.lost) lost = 0;
    for (int i = 0; i < T.warpgroups; ++i) {
      mbarrier_init(&s.q_full[i], 1);
      mbarrier_init(&s.q_empty[i], 4);  // one of each warp
    }
    for (int i = 0; i < T.stages; ++i) {
      mbarrier_init(&s.k_full[i], 1);
      mbarrier_init(&s.v_full[i], 1);
      mbarrier_init(&s.k_empty[i], 4 * T.warpgroups);
      mbarrier_init(&s.v_empty[i], 4 * T.warpgroups);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  launch_dependents();
  __syncthreads();
  grid_dependency_wait();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    registers_down<T.kLoaderRegisters>();
    if (threadIdx.x < 32 && elect_one()) load<T>(p, s);
  } else {
    registers_up<T.registers()>();
    compute<T>(p, s, warpgroup - 1);
  }
}
