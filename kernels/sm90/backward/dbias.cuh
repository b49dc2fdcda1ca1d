// The gradient of a bias (tile/dbias.cuh), on Hopper: tiles of scores one after the other, their sums in registers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/shared_plan.cuh"
#include "tile/dbias.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/key_scores.cuh"

template <Sm90BackwardConfig T>
struct DbiasShared {
  alignas(1024) u16 k[T.tile_n() * T.head_dim];
  alignas(1024) u16 v[T.tile_n() * T.head_dim_v];
  alignas(1024) u16 q[T.tile_m * T.head_dim];
  alignas(1024) u16 dout[T.tile_m * T.head_dim_v];
  float sums[T.tile_m][T.tile_n()];
  alignas(8) u64 full;
};

// A CTA's sums over tiles of queries and keys. Its threads hold fragments as those of the main kernel do.
template <Sm90BackwardConfig T>
struct DbiasTile {
  static constexpr int kQueries = T.score_queries();
  using ScoreMma = Wgmma<T.f16, kQueries>;

  const BackwardParams& p;
  DbiasShared<T>& s;
  Dropout dropout;
  const int index, lane, key0, first_query;  // key0: this thread's first, within a tile
  u32 parity = 0;
  float sums[kQueries / 2];

  TANDEM_DEVICE DbiasTile(const BackwardParams& params, DbiasShared<T>& shared)
      : p(params),
        s(shared),
        index(uniform(threadIdx.x / 128)),
        lane(threadIdx.x % 32),
        key0((T.wide() ? 0 : index * 64) + threadIdx.x % 128 / 32 * 16 + lane / 4),
        first_query(T.wide() ? index * kQueries : 0) {
    if constexpr (T.dropout) dropout = Dropout(p.dropout);
#pragma unroll
    for (float& x : sums) x = 0;
  }

  TANDEM_DEVICE void load(const SequenceCoords& sequence, int head, int m_block, int n_block) const {
    mbarrier_expect_tx(&s.full, sizeof s.k + sizeof s.v + sizeof s.q + sizeof s.dout);
    const int head_k = head / (p.heads_q / p.heads_k), key = n_block * T.tile_n(), query = m_block * T.tile_m;
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64) {
      tma_load(s.k + c * T.tile_n(), &p.k, &s.full, c, key, head_k, sequence.batch);
      tma_load(s.q + c * T.tile_m, &p.q, &s.full, c, query, head, sequence.batch);
    }
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64) {
      tma_load(s.v + c * T.tile_n(), &p.v, &s.full, c, key, head_k, sequence.batch);
      tma_load(s.dout + c * T.tile_m, &p.dout, &s.full, c, query, head, sequence.batch);
    }
  }

  // Keys times queries, or values times dout.
  TANDEM_DEVICE void multiply(float (&to)[kQueries / 2], const u16* keys, const u16* queries, int columns) const {
    const u64 a = wgmma_smem_desc(shared_address(keys) + (T.wide() ? 0 : index * 64 * 128), 16, 1024);
    const u64 b = wgmma_smem_desc(shared_address(queries) + first_query * 128, 16, 1024);
    constexpr int kKeyBlock = T.tile_n() * 128 >> 4, kQueryBlock = T.tile_m * 128 >> 4;
    discard(to);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < columns / 16; ++c)
      ScoreMma::ss_nt(to, a + c / 4 * kKeyBlock + c % 4 * 2, b + c / 4 * kQueryBlock + c % 4 * 2, c > 0);
    wgmma_commit();
  }

  TANDEM_DEVICE void add(const SequenceCoords& sequence, int head, int m_block, int n_block) {
    __syncthreads();  // all have used the tile before
    if (threadIdx.x == 0) load(sequence, head, m_block, n_block);
    const HeadScores<T> of_head(p, sequence, head);
    const auto band = band_of<T>(p, sequence);
    const float* const stats = p.stats + m_block_at(p, sequence, head, m_block) * (2 * T.tile_m);
    u32 kept[(kQueries + 63) / 64] = {};
    if constexpr (T.dropout) {
#pragma unroll
      for (int n = 0; n < kQueries; n += 64)
        kept[n / 64] = dropout.by_columns(m_block * T.tile_m + first_query + n, sequence.sequence * p.heads_q + head,
                                          n_block * T.tile_n() + key0 - lane / 4, min(64, kQueries - n) / 8, lane);
    }
    float scores[kQueries / 2], dp[kQueries / 2];
    mbarrier_wait(&s.full, parity);
    parity ^= 1;
    multiply(scores, s.k, s.q, T.head_dim);
    multiply(dp, s.v, s.dout, T.head_dim_v);
    wgmma_wait<0>();
    fence_operand(scores);
    fence_operand(dp);
    if constexpr (T.softcap) apply_softcap<false>(scores, p);
#pragma unroll
    for (int r = 0; r < kQueries / 2; ++r) {
      const int in_tile = first_query + 2 * (lane & 3) + 8 * (r >> 2) + (r & 1), query = m_block * T.tile_m + in_tile;
      const int key = n_block * T.tile_n() + key0 + 8 * row_of(r);
      const QueryRange seen = band.visible_queries(key, key);
      const bool is_seen = key < sequence.k_len && query >= seen.begin && query < seen.end;
      float derivative = 1;
      const float score = of_head(scaled_score<T>(scores[r], p), p, query, key, &derivative);
      sums[r] += dbias_of<T>(p, is_seen ? score : -kInfinity, derivative, stats[in_tile], dp[r],
                             stats[T.tile_m + in_tile], kept[r / 32], r % 32);
    }
  }

  TANDEM_DEVICE void share() const {
#pragma unroll
    for (int r = 0; r < kQueries / 2; ++r)
      s.sums[first_query + 2 * (lane & 3) + 8 * (r >> 2) + (r & 1)][key0 + 8 * row_of(r)] = sums[r];
  }
};

template <Sm90BackwardConfig T>
TANDEM_DEVICE void dbias(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<DbiasShared<T>*>(memory);
  static_assert(sizeof(DbiasShared<T>) <= T.dbias_smem_bytes());
  if (threadIdx.x == 0) {
    mbarrier_init(&s.full, 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  grid_dependency_wait();
  const DbiasPart<T, T.tile_n()> part(p);
  DbiasTile<T> tile(p, s);
  part.for_each_tile([&](const SequenceCoords& sequence, int head, int m_block, int n_block) {
    tile.add(sequence, head, m_block, n_block);
  });
  tile.share();
  part.store(s.sums);
}
