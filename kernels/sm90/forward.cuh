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
// Shared memory: Q [queries][head_dim] in blocks of 64 columns, K and V rings alike, O in a place of its own or in Q's,
// all swizzled by 128 bytes. Registers of a computing thread at head_dim 128: S 64, O 64, P 32, Q 32.
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
  alignas(1024) u16 q[T.rows() * (T.result_apart() ? T.columns_k() : T.wider_columns())];
  alignas(1024) u16 k[T.stages][T.keys * T.columns_k()];
  alignas(1024) u16 v[T.stages][T.keys * T.columns_v()];
  alignas(1024) u16 out[T.result_apart() ? T.rows() * T.columns_v() : 64];
  alignas(8) u64 q_full, q_empty, k_full[T.stages], k_empty[T.stages], v_full[T.stages], v_empty[T.stages];
  int unit[2];      // of q: the one in use and the next; beyond the last: -1
  bool careful[2];  // of them: whether all steps are checked, because it is done again
  int lost;         // whether the one in use has to be done again
  Tile tile[2];     // ragged: what load() found out about them

  TANDEM_DEVICE u16* result() { return T.result_apart() ? out : q; }
};

// One thread: for every tile its queries, and its keys and values from the last to the first. A tile that comes out
// lost is taken again after the one that has been begun by then.
template <ForwardTile T>
TANDEM_DEVICE void load(const ForwardParams& p, ForwardShared<T>& s) {
  Ring<T.stages> k_ring, v_ring;
  u32 q_parity = 0, place = 0;
  const int together = log2_of(p.together), heads = p.heads_q >> together;
  const int listed = T.ragged ? p.counter[1] : 0, units = T.ragged ? listed * heads : p.tiles;
  int last = -1, lost = -1;  // units
  bool waited = false;
  auto wait_for_queries = [&] {  // of the tile before: nobody reads them any more, and it is known how it came out
    mbarrier_wait(&s.q_empty, q_parity ^ 1);
    q_parity ^= 1;
    if constexpr (T.unchecked()) {
      if (s.lost) lost = last;
      s.lost = 0;
    }
  };
  for (int fresh = blockIdx.x;;) {
    if (fresh >= units && lost < 0) {
      if (!waited) wait_for_queries();
      waited = true;
      if (lost < 0) break;
    }
    const bool careful = lost >= 0;
    const int n = careful ? lost : fresh;
    lost = -1;
    const Tile tile = tile_at<T>(p, n, listed);
    const int head_k = (tile.head << together) / (p.heads_q / p.heads_k);
    auto load_keys = [&](int step) {
      mbarrier_wait(&s.k_empty[k_ring.slot], k_ring.parity ^ 1);
      mbarrier_expect_tx(&s.k_full[k_ring.slot], T.keys * T.columns_k() * 2);
      for (int c = 0; c < T.head_dim; c += 64)
        tma_load(s.k[k_ring.slot] + c * T.keys, &p.k, &s.k_full[k_ring.slot], c, tile.k_begin + step * T.keys, head_k,
                 tile.batch);
      k_ring.advance();
    };
    auto load_values = [&](int step) {
      mbarrier_wait(&s.v_empty[v_ring.slot], v_ring.parity ^ 1);
      mbarrier_expect_tx(&s.v_full[v_ring.slot], T.keys * T.columns_v() * 2);
      for (int c = 0; c < T.head_dim_v; c += 64)
        tma_load(s.v[v_ring.slot] + c * T.keys, &p.v, &s.v_full[v_ring.slot], c, tile.k_begin + step * T.keys, head_k,
                 tile.batch);
      v_ring.advance();
    };
    const Steps steps = steps_of<T>(p, tile);
    load_keys(steps.end - 1);
    if (!waited) wait_for_queries();
    waited = false;
    last = n;
    s.unit[place] = n;
    s.careful[place] = careful;
    if constexpr (T.ragged) s.tile[place] = tile;
    place ^= 1;
    mbarrier_expect_tx(&s.q_full, T.rows() * T.columns_k() * 2);
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.q + c * T.rows(), &p.q, &s.q_full, c, 0, tile.q_begin + (tile.m * T.rows() >> together), tile.head,
               tile.batch);
    if (!careful) fresh = (p.counter ? atomicAdd(p.counter, 1) : fresh) + gridDim.x;
    for (int step = steps.end - 1; step >= steps.begin; --step) {
      if (step > steps.begin) load_keys(step - 1);
      load_values(step);
    }
  }
  s.unit[place] = -1;
  mbarrier_arrive(&s.q_full);
}

// A thread has two rows of a fragment, and in each every register r at this column from its first.
TANDEM_DEVICE constexpr int column_of(int r) { return 8 * (r >> 2) + (r & 1); }

// Scores in log2 units from products.
template <ForwardTile T, int n>
TANDEM_DEVICE void change(float (&s)[n], const ForwardParams& p, const Tile& t, const Row (&rows)[2], int column0) {
  const Change<T> changes[2] = {{p, t, rows[0]}, {p, t, rows[1]}};
#pragma unroll
  for (int r = 0; r < n; ++r) s[r] = changes[row_of(r)](s[r], p, t, column0 + column_of(r));
}

// Hides what lies beyond the keys or outside the window.
template <ForwardTile T, int n>
TANDEM_DEVICE void hide(float (&s)[n], const ForwardParams& p, const Tile& t, const Row (&rows)[2], int column0) {
  const Seen seen[2] = {seen_by<T>(p, t, rows[0]), seen_by<T>(p, t, rows[1])};
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int i = row_of(r), column = column0 + column_of(r);
    if (column >= seen[i].end || (T.left && column < seen[i].begin)) s[r] = -kInfinity;
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
  for (int block = 0; block < T.columns_v() / 64; ++block)
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
  for (int i = threadIdx.x % 128; i < count * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks, at = first_row + row;
    const int swizzled = chunk / 8 * T.rows() * 8 + row * 8 + ((chunk & 7) ^ (row & 7));
    u16* to = static_cast<u16*>(p.out_data) + t.batch * p.out_batch + (t.q_begin + (at >> together)) * p.out_row +
              ((t.head << together) + (at & (p.together - 1))) * p.out_head + chunk * 8;
    *reinterpret_cast<Chunk*>(to) = reinterpret_cast<const Chunk*>(from)[swizzled];
  }
}

// A computing warpgroup.
template <ForwardTile T>
TANDEM_DEVICE void compute(const ForwardParams& p, ForwardShared<T>& s, int warpgroup) {
  using Values = Wgmma<T.f16, T.head_dim_v>;
  constexpr int kTurn = 1, kTogether = 8, kEverybody = 12;         // named barriers: one per warpgroup; kEverybody: one
  constexpr u32 q_block = T.rows() * 128, k_block = T.keys * 128;  // bytes of 64 columns
  constexpr bool kChanged = T.changed();
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const u32 q_address = shared_address(s.q) + warpgroup * 64 * 128;
  const u32 out_address = shared_address(s.result()) + warpgroup * 64 * 128;
  const float scale_log2 = kChanged ? 1.0f : p.scale_log2, threshold = 8.0f / scale_log2;
  const int together = log2_of(p.together);
  Ring<T.stages> k_ring, v_ring;
  u32 q_parity = 0, place = 0;

  // Where this lane's 16 bytes of a 16 x 16 fragment lie, in a block of 64 columns.
  auto fragment = [&](u32 base, u32 block, int n) {
    const int row = warp * 16 + (lane & 15), chunk = n % 4 * 2 + (lane >> 4);
    return base + n / 4 * block + row * 128 + ((chunk ^ (row & 7)) << 4);
  };
  auto take_turn = [&] {
    if (T.turns) named_sync(kTurn + warpgroup, 256);
  };
  auto pass_turn = [&] {
    if (T.turns) named_arrive(kTurn + (warpgroup + 1) % T.warpgroups, 256);
  };
  if (warpgroup == T.warpgroups - 1) pass_turn();

  auto take = [&] {  // the next tile: its queries are here
    mbarrier_wait(&s.q_full, q_parity);
    q_parity ^= 1;
    const int n = uniform(s.unit[place]);
    place ^= 1;
    return n;
  };
  for (int n = take(); n >= 0; n = take()) {
    const Tile dense = T.ragged ? Tile() : dense_tile<T>(p, n);
    const Tile& tile = T.ragged ? s.tile[place ^ 1] : dense;  // stays there until the next tile is done
    const Steps steps = steps_of<T>(p, tile);
    // Of the warpgroup: its first row, and how many of the sequence there are from it on. Worked out where they are
    // needed, as the rows of this thread are: they are not worth registers through the main loop.
    auto first_row = [&] { return tile.m * T.rows() + warpgroup * 64; };
    auto rows_left = [&] { return (tile.q_rows << together) - first_row(); };
    auto own_row = [&](int i) {
      int row = first_row() + warp * 16 + lane / 4 + 8 * i;
      asm volatile("" : "+r"(row));
      return Row(p, tile, row);
    };

    const bool& careful = s.careful[place ^ 1];

    auto free_keys = [&] {
      if (lane == 0) mbarrier_arrive(&s.k_empty[k_ring.slot]);
      k_ring.advance();
    };
    auto free_values = [&] {
      if (lane == 0) mbarrier_arrive(&s.v_empty[v_ring.slot]);
      v_ring.advance();
    };
    // Values beyond the sequence are a neighbour's or nobody's, and 0 * NaN is NaN. They are in the tile's last step,
    // which all warpgroups clear together, whether they need it or not.
    auto clear_values = [&](int step, bool needed) __attribute__((always_inline)) {
      if constexpr (T.ragged) {
        const int left = tile.k_len - step * T.keys;
        if (agreed(step == steps.end - 1 && left < T.keys)) {
          mbarrier_wait(&s.v_full[v_ring.slot], v_ring.parity);
          clear_rows<T>(s.v[v_ring.slot], max(0, left), warpgroup * 128 + threadIdx.x % 128);
          fence_proxy_async();
          if (needed) {
            named_sync(kEverybody, 128 * T.warpgroups);
          } else {
            named_arrive(kEverybody, 128 * T.warpgroups);
          }
        }
      }
    };
    // A step that none of this warpgroup's rows needs.
    auto pass_step = [&](int step) {
      mbarrier_wait(&s.k_full[k_ring.slot], k_ring.parity);
      take_turn();
      pass_turn();
      free_keys();
      clear_values(step, false);
      mbarrier_wait(&s.v_full[v_ring.slot], v_ring.parity);
      free_values();
    };
    int step = steps.end - 1;
    if (agreed(rows_left() <= 0)) {  // the sequence ended in the warpgroups before
      for (; agreed(step >= steps.begin); --step) pass_step(step);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&s.q_empty);
      continue;
    }
    Steps own = steps;
    if constexpr (T.left || T.right) {
      own = steps_of<T>(p, tile, first_row(), 64);
      own.begin = max(own.begin, steps.begin);
      own.end = max(own.end, own.begin + 1);
#pragma unroll 1
      for (; agreed(step >= own.end); --step) pass_step(step);
    }

    float scores[T.keys / 2], out[T.head_dim_v / 2];
    u32 probabilities[T.keys / 4], queries[T.queries_in_registers() ? T.head_dim / 16 : 1][4];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] = 0;
    if constexpr (T.queries_in_registers()) {
#pragma unroll
      for (int c = 0; c < T.head_dim / 16; ++c) ldmatrix(queries[c], fragment(q_address, q_block, c));
    }

    // The first keys of a step, as many as there are scores.
    auto multiply_keys = [&](auto& scores) {
      using Scores = Wgmma<T.f16, 2 * static_cast<int>(sizeof scores / sizeof scores[0])>;
      const u64 k = wgmma_matrix(shared_address(s.k[k_ring.slot]), 16, 1024);
      const u64 q = wgmma_matrix(q_address, 16, 1024);
      hold(scores);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < T.head_dim / 16; ++c) {
        const u64 k_c = k + c / 4 * (k_block >> 4) + c % 4 * 2;
        if constexpr (T.queries_in_registers()) {
          Scores::scores(scores, queries[c], k_c, c > 0);
        } else {
          Scores::scores(scores, q + c / 4 * (q_block >> 4) + c % 4 * 2, k_c, c > 0);
        }
      }
      wgmma_commit();
      hold(scores);
    };
    auto multiply_values = [&] {
      const u64 v = wgmma_matrix(shared_address(s.v[v_ring.slot]), k_block, 1024);
      hold(out);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < T.keys / 16; ++c) Values::values(out, probabilities + 4 * c, v + c * (2048 >> 4), true);
      wgmma_commit();
      hold(out);
    };
    auto give_up = [&] {  // the tile is done again
      if (lane == 0) store_relaxed(&s.lost, 1);
    };
    // To scores. hides: some rows may not see some of the keys.
    auto finish_scores = [&](auto& scores, int step, bool hides) {
      const int column0 = step * T.keys + 2 * (lane & 3);
      if constexpr (kChanged) change<T>(scores, p, tile, {own_row(0), own_row(1)}, column0);
      if (hides && (step >= own.whole_end || (T.left && step < own.whole_begin)))
        hide<T>(scores, p, tile, {own_row(0), own_row(1)}, column0);
    };
    auto to_probabilities = [&] {
#pragma unroll
      for (int r = 0; r < T.keys / 4; ++r) probabilities[r] = pack<T>(scores[2 * r], scores[2 * r + 1]);
    };

    mbarrier_wait(&s.k_full[k_ring.slot], k_ring.parity);
    take_turn();
    auto first_step = [&](auto& scores) {
      multiply_keys(scores);
      pass_turn();
      wgmma_wait<0>();
      hold(scores);
      free_keys();
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
    clear_values(step, true);

    auto steady = [&](bool hides, bool checked) __attribute__((always_inline)) {
      mbarrier_wait(&s.k_full[k_ring.slot], k_ring.parity);
      take_turn();
      multiply_keys(scores);
      mbarrier_wait(&s.v_full[v_ring.slot], v_ring.parity);
      multiply_values();
      pass_turn();
      if (!checked && softmax.look_at_sums(scale_log2, threshold)) give_up();
      wgmma_wait<1>();
      hold(scores);
      free_keys();
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
      free_values();
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
    if constexpr (T.right || T.unchecked()) {
#pragma unroll 1
      for (; agreed(step >= checked_end); --step) steady(T.left || T.right, true);
    }
#pragma unroll 1
    for (; agreed(step >= max(own.whole_begin, own.begin)); --step) steady(false, !T.unchecked());
    if constexpr (T.left) {
#pragma unroll 1
      for (; agreed(step >= own.begin); --step) steady(true, true);
    }

    if (T.unchecked() && softmax.lost()) give_up();
    if (T.result_apart() && lane == 0) mbarrier_arrive(&s.q_empty);
    mbarrier_wait(&s.v_full[v_ring.slot], v_ring.parity);
    multiply_values();
    wgmma_wait<0>();
    hold(out);
    free_values();

    if constexpr (T.left) {
#pragma unroll 1
      for (; agreed(step >= steps.begin); --step) pass_step(step);
    }

    softmax.total();
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row = own_row(i);
      const RowEnd end = end_of_row<T>(p, row, !T.ragged || row.query < tile.q_len, softmax.sum[i], softmax.shift[i]);
      inverse[i] = end.inverse;
      if (p.lse && (lane & 3) == 0 && row.query < tile.q_rows)
        p.lse[tile.batch * p.lse_batch + row.head * p.lse_head + (tile.q_begin + row.query) * p.lse_row] = end.lse;
    }
    // The group's rows of the result, once its last store has read them (or, in Q's place, all its warps have).
    if (T.result_apart()) tma_store_wait_read();
    named_sync(kTogether + warpgroup, 128);
#pragma unroll
    for (int c = 0; c < T.head_dim_v / 16; ++c) {
      u32 w[4];
#pragma unroll
      for (int x = 0; x < 4; ++x)
        w[x] = inverse[x & 1] == 0  // a row that sees nothing, whatever it met
                   ? 0
                   : pack<T>(out[8 * c + 2 * x] * inverse[x & 1], out[8 * c + 2 * x + 1] * inverse[x & 1]);
      stmatrix(fragment(out_address, q_block, c), w);
    }
    fence_proxy_async();
    named_sync(kTogether + warpgroup, 128);
    if (T.ragged && rows_left() < 64) {
      store_rows<T>(p, tile, s.result() + warpgroup * 64 * 64, first_row(), rows_left());
      named_sync(kTogether + warpgroup, 128);
    } else if (warp == 0 && elect_one()) {
      if (T.unchecked() && careful) tma_store_wait();  // for the result that was no good
      for (int c = 0; c < T.head_dim_v; c += 64)
        tma_store(&p.out, s.result() + c * T.rows() + warpgroup * 64 * 64, c, 0,
                  tile.q_begin + (first_row() >> together), tile.head, tile.batch);
      tma_store_commit();
      if (!T.result_apart()) tma_store_wait_read();
    }
    if (!T.result_apart() && warp == 0 && elect_one()) {
      for (int i = 0; i < 4; ++i) mbarrier_arrive(&s.q_empty);  // for all warps: their rows have been read
    }
  }
  tma_store_wait();
}

template <ForwardTile T>
TANDEM_DEVICE void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<ForwardShared<T>*>(memory);
  static_assert(sizeof(ForwardShared<T>) <= T.shared_bytes());
  if (threadIdx.x == 0) {
    s.lost = 0;
    mbarrier_init(&s.q_full, 1);
    mbarrier_init(&s.q_empty, 4 * T.warpgroups);  // one of each warp
    for (int i = 0; i < T.stages; ++i) {
      mbarrier_init(&s.k_full[i], 1);
      mbarrier_init(&s.v_full[i], 1);
      mbarrier_init(&s.k_empty[i], 4 * T.warpgroups);
      mbarrier_init(&s.v_empty[i], 4 * T.warpgroups);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    registers_down<T.kLoaderRegisters>();
    if (threadIdx.x < 32 && elect_one()) load<T>(p, s);
  } else {
    registers_up<T.registers()>();
    compute<T>(p, s, warpgroup - 1);
  }
}
