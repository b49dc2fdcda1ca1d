// Attention forward for Hopper: out = softmax(scale q k^T) v and its log-sum-exp.
//
// One CTA per SM takes tiles of 64 queries per computing warpgroup, the longest first, from a counter. One warp loads
// with TMA; the warpgroups may take turns on the tensor core ("->": passes the turn), so that the softmax of one runs
// under the products of the others, and each issues the next q k^T before it waits for p v:
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
#include "tile/softmax.cuh"

struct ForwardParams {
  TensorMap q, k, v, out;  // (head_dim, seqlen, heads, batch); boxes of 64 columns
  float* lse;              // (batch, heads_q, seqlen_q)
  u32* counter;            // 0 before the first launch, and after each
  int batch, heads_q, heads_k, seqlen_q, seqlen_k;
  int tiles_m, tiles;  // of a head, of all
  int group;           // heads whose tiles are taken together: their keys and values share the L2 cache
  float scale, scale_log2;
};

template <ForwardTile T>
struct ForwardShared {
  alignas(1024) u16 q[T.queries() * T.head_dim];
  alignas(1024) u16 k[T.stages][T.keys * T.head_dim];
  alignas(1024) u16 v[T.stages][T.keys * T.head_dim_v];
  alignas(1024) u16 out[T.result_apart() ? T.queries() * T.head_dim_v : 64];
  alignas(8) u64 q_full, q_empty, k_full[T.stages], k_empty[T.stages], v_full[T.stages], v_empty[T.stages];
  int tile[2];  // of q: the one in use and the next

  TANDEM_DEVICE u16* result() { return T.result_apart() ? out : q; }
};

struct Tile {
  int m, head, batch;
};

// Tiles in the order they are taken: heads in groups, in a group by length, the longest first.
template <ForwardTile T>
TANDEM_DEVICE Tile tile_at(const ForwardParams& p, int n) {
  const int per_group = p.group * p.tiles_m, group = n / per_group, rest = n - group * per_group;
  const int width = min(p.batch * p.heads_q - group * p.group, p.group);
  const int m = rest / width, head = group * p.group + rest % width;
  return {T.causal ? p.tiles_m - 1 - m : m, head % p.heads_q, head / p.heads_q};
}

// At least one step: rows that see nothing come out of a hidden one.
template <ForwardTile T>
TANDEM_DEVICE int steps_of(const ForwardParams& p, const Tile& tile) {
  const int end = T.causal ? min(p.seqlen_k, (tile.m + 1) * T.queries() + p.seqlen_k - p.seqlen_q) : p.seqlen_k;
  return max(1, (end + T.keys - 1) / T.keys);
}

// One thread: for every tile its queries, and its keys and values from the last to the first.
template <ForwardTile T>
TANDEM_DEVICE void load(const ForwardParams& p, ForwardShared<T>& s) {
  Ring<T.stages> k_ring, v_ring;
  u32 q_parity = 0, place = 0;
  for (int n = blockIdx.x; n < p.tiles;) {
    const Tile tile = tile_at<T>(p, n);
    const int head_k = tile.head / (p.heads_q / p.heads_k);
    auto load_keys = [&](int step) {
      mbarrier_wait(&s.k_empty[k_ring.slot], k_ring.parity ^ 1);
      mbarrier_expect_tx(&s.k_full[k_ring.slot], T.keys * T.head_dim * 2);
      for (int c = 0; c < T.head_dim; c += 64)
        tma_load(s.k[k_ring.slot] + c * T.keys, &p.k, &s.k_full[k_ring.slot], c, step * T.keys, head_k, tile.batch);
      k_ring.advance();
    };
    auto load_values = [&](int step) {
      mbarrier_wait(&s.v_empty[v_ring.slot], v_ring.parity ^ 1);
      mbarrier_expect_tx(&s.v_full[v_ring.slot], T.keys * T.head_dim_v * 2);
      for (int c = 0; c < T.head_dim_v; c += 64)
        tma_load(s.v[v_ring.slot] + c * T.keys, &p.v, &s.v_full[v_ring.slot], c, step * T.keys, head_k, tile.batch);
      v_ring.advance();
    };
    const int steps = steps_of<T>(p, tile);
    load_keys(steps - 1);
    mbarrier_wait(&s.q_empty, q_parity ^ 1);
    q_parity ^= 1;
    s.tile[place] = n;
    place ^= 1;
    mbarrier_expect_tx(&s.q_full, T.queries() * T.head_dim * 2);
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.q + c * T.queries(), &p.q, &s.q_full, c, tile.m * T.queries(), tile.head, tile.batch);
    // Wraps to 0 with the last take of the launch.
    const int next = static_cast<int>(atomicInc(p.counter, p.tiles - 1)) + gridDim.x;
    for (int step = steps - 1; step >= 0; --step) {
      if (step > 0) load_keys(step - 1);
      load_values(step);
    }
    n = next;
  }
  mbarrier_wait(&s.q_empty, q_parity ^ 1);
  s.tile[place] = p.tiles;
  mbarrier_arrive(&s.q_full);
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

// A computing warpgroup.
template <ForwardTile T>
TANDEM_DEVICE void compute(const ForwardParams& p, ForwardShared<T>& s, int warpgroup) {
  using Scores = Wgmma<T.f16, T.keys>;
  using Values = Wgmma<T.f16, T.head_dim_v>;
  constexpr int kTurn = 1, kTogether = 8;                             // named barriers: one of each per warpgroup
  constexpr u32 q_block = T.queries() * 128, k_block = T.keys * 128;  // bytes of 64 columns
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const u32 q_address = shared_address(s.q) + warpgroup * 64 * 128;
  const u32 out_address = shared_address(s.result()) + warpgroup * 64 * 128;
  const float threshold = 8.0f / p.scale_log2;
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
    const int n = uniform(s.tile[place]);
    place ^= 1;
    return n;
  };
  for (int n = take(); n < p.tiles; n = take()) {
    const Tile tile = tile_at<T>(p, n);
    const int steps = steps_of<T>(p, tile), diagonal = p.seqlen_k - p.seqlen_q;
    const int row0 = tile.m * T.queries() + warpgroup * 64 + warp * 16 + lane / 4;

    float scores[T.keys / 2], out[T.head_dim_v / 2];
    u32 probabilities[T.keys / 4], queries[T.queries_in_registers() ? T.head_dim / 16 : 1][4];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] = 0;
    if constexpr (T.queries_in_registers()) {
#pragma unroll
      for (int c = 0; c < T.head_dim / 16; ++c) ldmatrix(queries[c], fragment(q_address, q_block, c));
    }

    auto multiply_keys = [&] {
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
    auto free_keys = [&] {
      if (lane == 0) mbarrier_arrive(&s.k_empty[k_ring.slot]);
      k_ring.advance();
    };
    auto free_values = [&] {
      if (lane == 0) mbarrier_arrive(&s.v_empty[v_ring.slot]);
      v_ring.advance();
    };
    // Hides what lies beyond the keys, or beyond the diagonal.
    auto mask = [&](int step) {
      const int end = (step + 1) * T.keys;
      if (end <= p.seqlen_k && (!T.causal || end <= tile.m * T.queries() + warpgroup * 64 + diagonal + 1)) return;
      int limit[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) limit[i] = T.causal ? min(p.seqlen_k, row0 + 8 * i + diagonal + 1) : p.seqlen_k;
      const int column0 = step * T.keys + 2 * (lane & 3);
#pragma unroll
      for (int r = 0; r < T.keys / 2; ++r)
        if (column0 + 8 * (r >> 2) + (r & 1) >= limit[row_of(r)]) scores[r] = -kInfinity;
    };
    auto to_probabilities = [&] {
#pragma unroll
      for (int r = 0; r < T.keys / 4; ++r) probabilities[r] = pack<T>(scores[2 * r], scores[2 * r + 1]);
    };

    int step = steps - 1;
    mbarrier_wait(&s.k_full[k_ring.slot], k_ring.parity);
    take_turn();
    multiply_keys();
    pass_turn();
    wgmma_wait<0>();
    hold(scores);
    free_keys();
    mask(step);
    softmax.step(scores, p.scale_log2, threshold);
    to_probabilities();

    auto steady = [&](bool masked) __attribute__((always_inline)) {
      mbarrier_wait(&s.k_full[k_ring.slot], k_ring.parity);
      take_turn();
      multiply_keys();
      mbarrier_wait(&s.v_full[v_ring.slot], v_ring.parity);
      multiply_values();
      pass_turn();
      wgmma_wait<1>();
      hold(scores);
      free_keys();
      if (masked) mask(step);
      softmax.step(scores, p.scale_log2, threshold);
      // ptxas would wait for p v before the exponentials, which are to run under it: a branch that depends on them
      // (and is never taken) keeps it from that.
      hold(scores);
      if (softmax.sum[0] + softmax.sum[1] < 0.0f) asm volatile("nanosleep.u32 0;" ::: "memory");
      wgmma_wait<0>();
      hold(out);
      free_values();
      if (softmax.rescale) {
#pragma unroll
        for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] *= softmax.factor[row_of(i)];
      }
      to_probabilities();
    };
    --step;
    if constexpr (T.causal) {
      const int whole = max(0, (tile.m * T.queries() + diagonal + 1) / T.keys);  // steps below it hide nothing
#pragma unroll 1
      for (; step >= whole; --step) steady(true);
    }
#pragma unroll 1
    for (; step >= 0; --step) steady(false);

    if (T.result_apart() && lane == 0) mbarrier_arrive(&s.q_empty);
    mbarrier_wait(&s.v_full[v_ring.slot], v_ring.parity);
    multiply_values();
    wgmma_wait<0>();
    hold(out);
    free_values();

    softmax.total();
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = softmax.sum[i];
      const int row = row0 + 8 * i;
      inverse[i] = sum > 0 ? 1.0f / sum : 0.0f;
      if ((lane & 3) == 0 && row < p.seqlen_q) {
        p.lse[(static_cast<i64>(tile.batch) * p.heads_q + tile.head) * p.seqlen_q + row] =
            sum > 0 ? softmax.max[i] * p.scale + __logf(sum) : -kInfinity;
      }
    }
    // The group's rows of the result, once its last store has read them (or, in Q's place, all its warps have).
    if (T.result_apart()) tma_store_wait_read();
    named_sync(kTogether + warpgroup, 128);
#pragma unroll
    for (int c = 0; c < T.head_dim_v / 16; ++c) {
      u32 w[4];
#pragma unroll
      for (int x = 0; x < 4; ++x)
        w[x] = pack<T>(out[8 * c + 2 * x] * inverse[x & 1], out[8 * c + 2 * x + 1] * inverse[x & 1]);
      stmatrix(fragment(out_address, q_block, c), w);
    }
    fence_proxy_async();
    named_sync(kTogether + warpgroup, 128);
    if (warp == 0 && elect_one()) {
      for (int c = 0; c < T.head_dim_v; c += 64)
        tma_store(&p.out, s.result() + c * T.queries() + warpgroup * 64 * 64, c, tile.m * T.queries() + warpgroup * 64,
                  tile.head, tile.batch);
      tma_store_commit();
      if (!T.result_apart()) {
        tma_store_wait_read();
        for (int i = 0; i < 4; ++i) mbarrier_arrive(&s.q_empty);
      }
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
    registers_down<T.warpgroups == 3 ? 32 : 24>();
    if (threadIdx.x < 32 && elect_one()) load<T>(p, s);
  } else {
    registers_up<T.warpgroups == 3 ? 160 : 240>();
    compute<T>(p, s, warpgroup - 1);
  }
}
