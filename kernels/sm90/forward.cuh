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

// A tile that has been taken, for all who work on it.
struct Job {
  Tile tile;
  int unit;      // of work; -1: there are no more
  int head_k;    // of keys
  bool careful;  // whether all steps are checked, because it is done again
  int lost;      // whether it has to be done again

  // No more is read than what is not known anyway.
  template <ForwardTile T>
  TANDEM_DEVICE Tile tile_of(const ForwardParams& p) const {
    if constexpr (T.ragged) return tile;
    return {tile.m, tile.head, tile.batch, tile.batch, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k};
  }
};

template <ForwardTile T>
struct ForwardShared {
  static constexpr int kJobs = 4;  // the next is taken when a warpgroup may be at the end of the last but one: three do
  alignas(1024) u16 q[T.rows() * T.columns_k()];
  alignas(1024) u16 k[T.stages][T.keys * T.columns_k()];
  alignas(1024) u16 v[T.stages][T.keys * T.columns_v()];
  alignas(1024) u16 out[T.result_rows() * T.columns_v()];
  alignas(8) u64 q_full[T.warpgroups], q_empty[T.warpgroups];
  u64 k_full[T.stages], k_empty[T.stages], v_full[T.stages], v_empty[T.stages];
  Job jobs[kJobs];
};

// One thread: for every tile its queries, and its keys and values from the last to the first. While the first of them
// are on their way it takes the next tile, and loads that one's queries where this one's are in registers by then. A
// tile that comes out lost is taken again when its place is wanted, or when there are no others.
//
// The warps that compute beside it feel every instruction of a step; no other role stands in its branch, or the
// compiler keeps nothing of it in uniform registers.
template <ForwardTile T>
TANDEM_DEVICE void load(const ForwardParams& p, ForwardShared<T>& s) {
  constexpr int kJobs = ForwardShared<T>::kJobs;
  Ring<T.stages> k_ring, v_ring;
  u32 taken = 0;  // tiles
  const int together = log2_of(p.together), heads = p.heads_q >> together;
  const int listed = T.ragged ? p.counter[1] : 0, units = T.ragged ? listed * heads : p.tiles;
  // The next unit of work, less gridDim.x: that is added where it is used, as until then nobody waits for the counter.
  int counted = blockIdx.x - gridDim.x;

  // The next tile, if there is one. idle: all that were taken are done.
  auto take = [&](bool idle) {
    u32 lost = taken % kJobs;
    if (idle) {
      lost = 0;
#pragma unroll 1
      while (lost < kJobs - 1 && !s.jobs[lost].lost) ++lost;
    }
    int n = counted + gridDim.x;
    const bool careful = T.unchecked() && s.jobs[lost].lost;
    if (careful) {
      n = s.jobs[lost].unit;
      s.jobs[lost].lost = 0;
    }
    if (n >= units) return false;
    const Tile tile = tile_at<T>(p, n, listed);
    s.jobs[taken++ % kJobs] = {tile, n, (tile.head << together) / (p.heads_q / p.heads_k), careful, 0};
    return true;
  };
  auto load_queries = [&] {
    const u32 parity = taken & 1;
    const Job& job = s.jobs[(taken - 1) % kJobs];
#pragma unroll 1
    for (int i = 0; i < T.warpgroups; ++i) {
      mbarrier_wait(&s.q_empty[i], parity);
      mbarrier_expect_tx(&s.q_full[i], 64 * T.columns_k() * 2);
#pragma unroll 1
      for (int c = 0; c < T.head_dim; c += 64)
        tma_load(s.q + c * T.rows() + i * 64 * 64, &p.q, &s.q_full[i], c, 0,
                 job.tile.q_begin + (job.tile.m * T.rows() + i * 64 >> together), job.tile.head, job.tile.batch);
    }
  };
  // Of the tile at hand: steps that are still to load, and where its keys are.
  int step = 0, begin = 1, k_begin = 0, head_k = 0, batch = 0;
  auto load_step = [&](auto& slots, auto& full, auto& empty, Ring<T.stages>& ring, const TensorMap& map, int columns,
                       int step) {
    mbarrier_wait(&empty[ring.slot], ring.parity ^ 1);
    mbarrier_expect_tx(&full[ring.slot], sizeof slots[0]);
#pragma unroll 1
    for (int c = 0; c < columns; c += 64)
      tma_load(slots[ring.slot] + c * T.keys, &map, &full[ring.slot], c, k_begin + step * T.keys, head_k, batch);
    ring.advance();
  };
  auto load_keys = [&](int step) { load_step(s.k, s.k_full, s.k_empty, k_ring, p.k, T.head_dim, step); };
  auto load_values = [&](int step) { load_step(s.v, s.v_full, s.v_empty, v_ring, p.v, T.head_dim_v, step); };

  for (bool idle = false;;) {
    const bool more = take(idle);
    if (idle && !more) break;
    if (more && T.queries_in_registers()) load_queries();
#pragma unroll 1
    for (; step >= begin; --step) {
      if (step > begin) load_keys(step - 1);
      load_values(step);
    }
    idle = !more;
    if (idle) {
      Ring<T.stages> ring = v_ring;  // when all values have been given up, all tiles are done
#pragma unroll 1
      for (int i = 0; i < T.stages; ++i, ring.advance()) mbarrier_wait(&s.v_empty[ring.slot], ring.parity ^ 1);
      continue;
    }
    const Job& job = s.jobs[(taken - 1) % kJobs];
    const Tile tile = job.tile_of<T>(p);
    const Steps steps = steps_of<T>(p, tile);
    k_begin = tile.k_begin, head_k = job.head_k, batch = tile.batch;
    step = steps.end - 1, begin = steps.begin;
    load_keys(step);
    if (!job.careful) counted = p.counter ? atomicAdd(p.counter, 1) : counted + gridDim.x;
    if (!T.queries_in_registers()) load_queries();
    if (step > begin) load_keys(step - 1);
    load_values(step--);
  }
  s.jobs[taken % kJobs].unit = -1;
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
  using Scores = Wgmma<T.f16, T.keys>;
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
  u32 tile = ~0u;  // at hand: so many were before

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
  // The next tile's unit of work, when its queries are here.
  TANDEM_DEVICE int take() {
    ++tile;
    mbarrier_wait(&s.q_full[index], tile & 1);
    return uniform(job().unit);
  }
  TANDEM_DEVICE Job& job() const { return s.jobs[tile % ForwardShared<T>::kJobs]; }
  TANDEM_DEVICE void give_up() const {  // the tile is done again
    if (lane == 0) store_relaxed(&job().lost, 1);
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

  // Where this lane's 16 bytes of a 16 x 16 fragment lie, in a block of 64 columns; of which row. The row is worked out
  // anew at both ends of a tile: between them it is not worth registers.
  TANDEM_DEVICE int fragment_row() const {
    int row = warp * 16 + (lane & 15);
    asm volatile("" : "+r"(row));
    return row;
  }
  TANDEM_DEVICE u32 fragment(u32 base, u32 block, int row, int n) const {
    const int chunk = n % 4 * 2 + (lane >> 4);
    return base + n / 4 * block + row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  TANDEM_DEVICE void load_queries(Queries& queries) const {
    const int row = fragment_row();
#pragma unroll
    for (int c = 0; c < T.head_dim / 16; ++c) ldmatrix(queries[c], fragment(q_address, kQueryBlock, row, c));
  }
  // Of so many products those that are issued by fours. At head_dim 64 single ones are 2 % faster: measured.
  static constexpr int by_fours(int products) { return T.head_dim > 64 ? products / 4 * 4 : 0; }
  TANDEM_DEVICE void multiply_keys(float (&scores)[T.keys / 2], const Queries& queries) const {
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
    } else if (!T.turns) {  // else compute() has waited
      tma_store_wait_read();
      named_sync(kTogether + index, 128);
    }
    const int row = fragment_row();
    u16* const own_out = s.out + (T.result_in_turns() ? 0 : index * 64 * 64);
#pragma unroll
    for (int c = 0; c < T.head_dim_v / 16; ++c) {
      u32 w[4];
#pragma unroll
      for (int x = 0; x < 4; ++x)
        w[x] = inverse[x & 1] == 0  // a row that sees nothing, whatever it met
                   ? 0
                   : pack<T>(out[8 * c + 2 * x] * inverse[x & 1], out[8 * c + 2 * x + 1] * inverse[x & 1]);
      stmatrix(fragment(shared_address(own_out), kResultBlock, row, c), w);
    }
    int first_query = tile.q_begin + (first_row >> log2_of(p.together));
    asm volatile("" : "+r"(first_query));  // behind the barrier all would wait for it
    fence_proxy_async();
    named_sync(kTogether + index, 128);
    if (T.ragged && left < 64) {
      store_rows<T>(p, tile, own_out, first_row, left);
    } else if (warp == 0 && elect_one()) {
      if (T.unchecked() && again) tma_store_wait();  // for the result that was no good
#pragma unroll
      for (int c = 0; c < T.head_dim_v; c += 64)
        tma_store(&p.out, own_out + c * T.result_rows(), c, 0, first_query, tile.head, tile.batch);
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

  // (With another form of loop ring slots leave the uniform registers.)
  for (int n = w.take(); n >= 0; n = w.take()) {
    const Job& job = w.job();
    // Read when it is needed, but where registers abound: then at once, which is 2 % where tiles are short.
    constexpr bool kAtOnce = !T.ragged && T.registers() > 160;
    const Tile known = kAtOnce ? job.tile_of<T>(p) : Tile();
    auto tile = [&] { return kAtOnce ? known : job.tile_of<T>(p); };
    typename Warpgroup<T>::Queries queries;
    if constexpr (T.queries_in_registers()) {
      w.load_queries(queries);
      __syncwarp();
      w.free_queries();
    }
    const Steps steps = steps_of<T>(p, tile());
    // Of the warpgroup: its first row, and how many of the sequence there are from it on. Worked out where they are
    // needed, as the rows of this thread are: they are not worth registers through the main loop.
    auto first_row = [&] { return tile().m * T.rows() + index * 64; };
    auto rows_left = [&] { return (tile().q_rows << log2_of(p.together)) - first_row(); };
    auto own_row = [&](int i) {
      int row = first_row() + w.warp * 16 + w.lane / 4 + 8 * i;
      asm volatile("" : "+r"(row));
      return Row(p, tile(), row);
    };

    Steps own = steps;
    if constexpr (T.left || T.right) {
      own = steps_of<T>(p, tile(), first_row(), 64);
      own.begin = max(own.begin, steps.begin);
      own.end = max(own.end, own.begin + 1);
    }
    const bool nothing = agreed(rows_left() <= 0);  // the sequence ended in the warpgroups before
    const int seen_end = nothing ? steps.begin : own.end;
    int step = steps.end - 1;
#pragma unroll 1
    for (; agreed(step >= seen_end); --step) w.pass_step(tile(), steps, step);
    if (nothing) {
      if constexpr (!T.queries_in_registers()) {
        __syncwarp();
        w.free_queries();
      }
      w.take_place();
      w.pass_place();
      continue;
    }

    float scores[T.keys / 2], out[T.head_dim_v / 2];
    u32 probabilities[T.keys / 4];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] = 0;

    // To scores. hides: some rows may not see some of the keys.
    auto finish_scores = [&](bool hides) {
      const int column0 = step * T.keys + 2 * (w.lane & 3);
      if constexpr (T.changed()) change<T>(scores, p, tile(), {own_row(0), own_row(1)}, column0);
      if (hides && agreed(step >= own.whole_end || (T.left && step < own.whole_begin)))
        hide<T>(scores, p, tile(), {own_row(0), own_row(1)}, column0);
    };
    auto to_probabilities = [&] {
#pragma unroll
      for (int r = 0; r < T.keys / 4; ++r) probabilities[r] = pack<T>(scores[2 * r], scores[2 * r + 1]);
    };

    w.wait_for_keys();
    if (T.turns) tma_store_wait_read();  // of the last result; all know of it by the turn
    w.take_turn();
    w.multiply_keys(scores, queries);
    w.pass_turn();
    wgmma_wait<0>();
    hold(scores);
    w.free_keys();
    finish_scores(true);
    softmax.look_at_scores(scores, scale_log2, threshold);
    float first[2] = {0, 0};
    softmax.exponentials<0, T.keys / 2>(scores, scale_log2, first);
    softmax.add(first);
    to_probabilities();
    w.clear_values(tile(), steps, step, true);

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
      finish_scores(hides);
      if (checked) softmax.look_at_scores(scores, scale_log2, threshold);
      // Some exponentials run under p v, the others beside the packing. ptxas would wait for p v before them all: a
      // branch that asks for their sums (and is never taken) keeps it from that.
      constexpr int kAll = T.keys / 2, kUnder = T.exponentials_under_values();
      float more[2] = {0, 0};
      softmax.exponentials<0, kUnder>(scores, scale_log2, more);
      hold(scores);
      if (kUnder > 0 && more[0] + more[1] < 0) asm volatile("nanosleep.u32 0;" ::: "memory");
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
    if (!T.unchecked() || !agreed(job.careful))
      checked_end = max(checked_end, T.right ? own.whole_end - T.unchecked() : step + 1);
    // A step is long, and so is its compilation: one copy asks what it has to do. Only where results are narrow
    // and steps short does asking cost 2 %.
    constexpr bool kMasked = T.left || T.right,
                   kTwoLoops = T.unchecked() && T.right && !T.left && T.head_dim_v <= 64 && T.keys <= 64;
    auto is_checked = [&] {
      if (!T.unchecked()) return true;
      return kMasked ? !kTwoLoops && agreed(step >= checked_end) : agreed(job.careful);
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
    // What the sums come to is worked out under that product.
    softmax.total();
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row = own_row(i);
      const RowEnd end = end_of_row<T>(p, row, !T.ragged || row.query < tile().q_len, softmax.sum[i], softmax.shift[i]);
      inverse[i] = end.inverse;
      if (p.lse && (w.lane & 3) == 0 && row.query < tile().q_rows)
        p.lse[tile().batch * p.lse_batch + row.head * p.lse_head + (tile().q_begin + row.query) * p.lse_row] = end.lse;
    }
    wgmma_wait<0>();
    hold(out);
    w.free_values();

    if constexpr (T.left) {
#pragma unroll 1
      for (; agreed(step >= steps.begin); --step) w.pass_step(tile(), steps, step);
    }

    w.store(out, inverse, tile(), first_row(), rows_left(), job.careful);
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
    for (Job& job : s.jobs) job.lost = 0;
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
