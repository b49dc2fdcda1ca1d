// A pipeline over score tiles on Hopper, for the additional kernels (score_grads/score_tile.cuh). The next tile's
// operands can load meanwhile; keys and values stay in shared memory while they are the same.
#pragma once
#include "device/fragment_softmax.cuh"
#include "device/pipeline_state.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "score_grads/score_tile.cuh"
#include "sm90/backward/smem.cuh"

template <Sm90BackwardConfig T>
struct ScoreTileShared {
  alignas(1024) u16 k[T.cta_keys() * T.head_dim];
  alignas(1024) u16 v[T.cta_keys() * T.head_dim_v];
  alignas(1024) u16 q[T.kScoreStages][T.tile_m * T.head_dim];
  alignas(1024) u16 dout[T.kScoreStages][T.tile_m * T.head_dim_v];
  alignas(8) u64 full[T.kScoreStages], empty[T.kScoreStages];
};

// Threads hold fragments in the layout of the main kernel.
template <Sm90BackwardConfig T>
struct ScoreTile {
  static_assert(T.kScoreStages == 2);                                         // see load_keys()
  static constexpr int kQueries = T.score_queries(), kScores = kQueries / 2;  // per thread
  using ScoreMma = Wgmma<T.options.f16, kQueries>;

  const BackwardParams& p;
  ScoreTileShared<T>& s;
  Dropout dropout;
  const int index, lane, key0, first_query;  // key0: first key of this thread, within a tile
  PipelineState<T.kScoreStages> loaded, made;
  int loaded_keys = -1;  // the loaded block of keys

  TANDEM_DEVICE ScoreTile(const BackwardParams& params, ScoreTileShared<T>& shared)
      : p(params),
        s(shared),
        index(warp_uniform(threadIdx.x / 128)),
        lane(threadIdx.x % 32),
        key0((T.shared_p() ? 0 : index * 64) + threadIdx.x % 128 / 32 * 16 + lane / 4),
        first_query(T.shared_p() ? index * kQueries : 0) {
    if constexpr (T.options.dropout) dropout = Dropout(p.dropout);
    if (threadIdx.x == 0) {
      for (u64& full : s.full) mbarrier_init(&full, 1);
      for (u64& empty : s.empty) mbarrier_init(&empty, T.score_threads() / 32);
      fence_mbarrier_init();
      fence_proxy_async();
    }
    __syncthreads();
    grid_dependency_wait();
  }

  // The query of score r within a tile.
  TANDEM_DEVICE int query_of(int r) const { return first_query + 2 * (lane & 3) + 8 * (r >> 2) + (r & 1); }
  TANDEM_DEVICE int key_of(int r) const { return key0 + 8 * row_of(r); }

  // Starts to load a tile's operands. each() processes tiles in the order of their loads. At most one load may precede
  // each().
  TANDEM_DEVICE void load(const ScoreTileAt& at) {
    if (threadIdx.x == 0) {
      mbarrier_wait(&s.empty[loaded.index], loaded.phase ^ 1);  // all warps have read the old contents
      const int head_k = at.head / (p.heads_q / p.heads_k);
      const int keys = (at.sequence.sequence * p.heads_k + head_k) * (p.n_blocks * T.ctas()) + at.key_block;
      const bool others = keys != loaded_keys;
      mbarrier_expect_tx(&s.full[loaded.index],
                         sizeof s.q[0] + sizeof s.dout[0] + (others ? sizeof s.k + sizeof s.v : 0));
      load_queries(at);
      if (others) load_keys(at, head_k);
      loaded_keys = keys;
    }
    __syncwarp();
    loaded.advance();
  }
  TANDEM_DEVICE void load_queries(const ScoreTileAt& at) const {
    const int query = at.sequence.q_begin + at.m_block * T.tile_m, batch = at.sequence.batch;
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.q[loaded.index] + c * T.tile_m, &p.q, &s.full[loaded.index], c, query, at.head, batch);
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64)
      tma_load(s.dout[loaded.index] + c * T.tile_m, &p.dout, &s.full[loaded.index], c, query, at.head, batch);
  }
  TANDEM_DEVICE void load_keys(const ScoreTileAt& at, int head_k) const {
    // Waits for the previous tile, in either buffer.
    mbarrier_wait(&s.empty[loaded.index ^ 1], loaded.index == 0 ? loaded.phase ^ 1 : loaded.phase);
    const int key = at.sequence.k_begin + at.key_block * T.cta_keys(), batch = at.sequence.batch;
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.k + c * T.cta_keys(), &p.k, &s.full[loaded.index], c, key, head_k, batch);
#pragma unroll 1
    for (int c = 0; c < T.head_dim_v; c += 64)
      tma_load(s.v + c * T.cta_keys(), &p.v, &s.full[loaded.index], c, key, head_k, batch);
  }

  // Issues keys times queries, or values times dout.
  TANDEM_DEVICE void multiply(float (&to)[kScores], const u16* keys, const u16* queries, int columns) const {
    const u64 a = wgmma_smem_desc(shared_address(keys) + (T.shared_p() ? 0 : index * 64 * 128), 16, 1024);
    const u64 b = wgmma_smem_desc(shared_address(queries) + first_query * 128, 16, 1024);
    constexpr int kKeyBlock = T.cta_keys() * 128 >> 4, kQueryBlock = T.tile_m * 128 >> 4;
    discard(to);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < columns / 16; ++c)
      ScoreMma::ss_nt(to, a + c / 4 * kKeyBlock + c % 4 * 2, b + c / 4 * kQueryBlock + c % 4 * 2, c > 0);
    wgmma_commit();
  }

  // Calls use(r, ScoreGradient) for each of a thread's scores of a loaded tile.
  template <class Use>
  TANDEM_DEVICE void each(const ScoreTileAt& at, const Use& use) {
    const SequenceCoords& sequence = at.sequence;
    HeadScores<T> of_head(p, sequence, at.head);
    of_head.state = state_at<T>(p, at);
    const auto band = band_of<T>(p, sequence);
    const float* const lse_delta = p.lse_delta + m_block_at(p, sequence, at.head, at.m_block) * (2 * T.tile_m);
    u32 keep_mask[(kQueries + 63) / 64] = {};
    if constexpr (T.options.dropout) {
#pragma unroll
      for (int n = 0; n < kQueries; n += 64)
        keep_mask[n / 64] =
            dropout.by_columns(at.m_block * T.tile_m + first_query + n, dropout_head<T>(p, sequence.sequence, at.head),
                               at.key_block * T.cta_keys() + key0 - lane / 4, min(64, kQueries - n) / 8, lane);
    }
    float scores[kScores], dp[kScores];
    mbarrier_wait(&s.full[made.index], made.phase);
    multiply(scores, s.k, s.q[made.index], T.head_dim);
    multiply(dp, s.v, s.dout[made.index], T.head_dim_v);
    wgmma_wait<0>();
    fence_operand(scores);
    fence_operand(dp);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.empty[made.index]);
    made.advance();
    if constexpr (T.options.softcap) apply_softcap<false>(scores, p);
#pragma unroll
    for (int r = 0; r < kScores; ++r) {
      const int query = at.m_block * T.tile_m + query_of(r), key = at.key_block * T.cta_keys() + key_of(r);
      const QueryRange seen = band.visible_queries(key, key);
      const bool is_seen = key < sequence.k_len && query >= seen.begin && query < seen.end;
      ScoreGradient gradient{0, 0, 1};
      const float score = of_head(scaled_score<T>(scores[r], p), p, at.m_block * T.tile_m + query_of(0), column_of(r),
                                  key, &gradient.derivative, &gradient.mod_input);
      gradient.ds =
          ds_of<T>(p, is_seen ? score : -kInfinity, {lse_delta[query_of(r)], lse_delta[T.tile_m + query_of(r)]}, dp[r],
                   keep_mask[r / 32], r % 32);
      use(r, gradient);
    }
  }
};
