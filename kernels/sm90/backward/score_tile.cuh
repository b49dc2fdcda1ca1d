// One tile of scores after the other, on Hopper, for kernels beside the main one (tile/score_tile.cuh).
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/shared_plan.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/score_tile.cuh"

template <Sm90BackwardConfig T>
struct ScoreTileShared {
  alignas(1024) u16 k[T.cta_keys() * T.head_dim];
  alignas(1024) u16 v[T.cta_keys() * T.head_dim_v];
  alignas(1024) u16 q[T.tile_m * T.head_dim];
  alignas(1024) u16 dout[T.tile_m * T.head_dim_v];
  alignas(8) u64 full;
};

// Threads hold fragments as those of the main kernel do.
template <Sm90BackwardConfig T>
struct ScoreTile {
  static constexpr int kQueries = T.score_queries(), kScores = kQueries / 2;  // of a thread
  using ScoreMma = Wgmma<T.f16, kQueries>;

  const BackwardParams& p;
  ScoreTileShared<T>& s;
  Dropout dropout;
  const int index, lane, key0, first_query;  // key0: this thread's first, within a tile
  u32 parity = 0;

  TANDEM_DEVICE ScoreTile(const BackwardParams& params, ScoreTileShared<T>& shared)
      : p(params),
        s(shared),
        index(uniform(threadIdx.x / 128)),
        lane(threadIdx.x % 32),
        key0((T.wide() ? 0 : index * 64) + threadIdx.x % 128 / 32 * 16 + lane / 4),
        first_query(T.wide() ? index * kQueries : 0) {
    if constexpr (T.dropout) dropout = Dropout(p.dropout);
    if (threadIdx.x == 0) {
      mbarrier_init(&s.full, 1);
      fence_mbarrier_init();
      fence_proxy_async();
    }
    __syncthreads();
    grid_dependency_wait();
  }

  // Within a tile, of score r.
  TANDEM_DEVICE int query_of(int r) const { return first_query + 2 * (lane & 3) + 8 * (r >> 2) + (r & 1); }
  TANDEM_DEVICE int key_of(int r) const { return key0 + 8 * row_of(r); }

  TANDEM_DEVICE void load(const ScoreTileAt& at) const {
    mbarrier_expect_tx(&s.full, sizeof s.k + sizeof s.v + sizeof s.q + sizeof s.dout);
    const int head_k = at.head / (p.heads_q / p.heads_k), batch = at.sequence.batch;
    const int key = at.sequence.k_begin + at.key_block * T.cta_keys();
    const int query = at.sequence.q_begin + at.m_block * T.tile_m;
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64) {
      tma_load(s.k + c * T.cta_keys(), &p.k, &s.full, c, key, head_k, batch);
      tma_load(s.q + c * T.tile_m, &p.q, &s.full, c, query, at.head, batch);
    }
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64) {
      tma_load(s.v + c * T.cta_keys(), &p.v, &s.full, c, key, head_k, batch);
      tma_load(s.dout + c * T.tile_m, &p.dout, &s.full, c, query, at.head, batch);
    }
  }

  // Keys times queries, or values times dout.
  TANDEM_DEVICE void multiply(float (&to)[kScores], const u16* keys, const u16* queries, int columns) const {
    const u64 a = wgmma_smem_desc(shared_address(keys) + (T.wide() ? 0 : index * 64 * 128), 16, 1024);
    const u64 b = wgmma_smem_desc(shared_address(queries) + first_query * 128, 16, 1024);
    constexpr int kKeyBlock = T.cta_keys() * 128 >> 4, kQueryBlock = T.tile_m * 128 >> 4;
    discard(to);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < columns / 16; ++c)
      ScoreMma::ss_nt(to, a + c / 4 * kKeyBlock + c % 4 * 2, b + c / 4 * kQueryBlock + c % 4 * 2, c > 0);
    wgmma_commit();
  }

  // use(r, ScoreGradient) for each of a thread's scores.
  template <class Use>
  TANDEM_DEVICE void each(const ScoreTileAt& at, const Use& use) {
    const SequenceCoords& sequence = at.sequence;
    __syncthreads();  // all have used the tile before
    if (threadIdx.x == 0) load(at);
    HeadScores<T> of_head(p, sequence, at.head);
    of_head.state = state_at<T>(p, at);
    const auto band = band_of<T>(p, sequence);
    const float* const stats = p.stats + m_block_at(p, sequence, at.head, at.m_block) * (2 * T.tile_m);
    u32 kept[(kQueries + 63) / 64] = {};
    if constexpr (T.dropout) {
#pragma unroll
      for (int n = 0; n < kQueries; n += 64)
        kept[n / 64] =
            dropout.by_columns(at.m_block * T.tile_m + first_query + n, sequence.sequence * p.heads_q + at.head,
                               at.key_block * T.cta_keys() + key0 - lane / 4, min(64, kQueries - n) / 8, lane);
    }
    float scores[kScores], dp[kScores];
    mbarrier_wait(&s.full, parity);
    parity ^= 1;
    multiply(scores, s.k, s.q, T.head_dim);
    multiply(dp, s.v, s.dout, T.head_dim_v);
    wgmma_wait<0>();
    fence_operand(scores);
    fence_operand(dp);
    if constexpr (T.softcap) apply_softcap<false>(scores, p);
#pragma unroll
    for (int r = 0; r < kScores; ++r) {
      const int query = at.m_block * T.tile_m + query_of(r), key = at.key_block * T.cta_keys() + key_of(r);
      const QueryRange seen = band.visible_queries(key, key);
      const bool is_seen = key < sequence.k_len && query >= seen.begin && query < seen.end;
      ScoreGradient gradient{0, 0, 1};
      const float score = of_head(scaled_score<T>(scores[r], p), p, at.m_block * T.tile_m + query_of(0), column_of(r),
                                  key, &gradient.derivative, &gradient.given);
      gradient.ds = ds_of<T>(p, is_seen ? score : -kInfinity, stats[query_of(r)], dp[r], stats[T.tile_m + query_of(r)],
                             kept[r / 32], r % 32);
      use(r, gradient);
    }
  }
};
