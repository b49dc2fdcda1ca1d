// The gradient of a bias: P (dP - delta), summed over what the bias is broadcast along. A kernel of its own, which
// makes the scores of its tiles anew: the main kernel has no registers left for sums, and tiles of other heads and
// sequences meet nowhere. Each number has one CTA that writes it and one order in which it is summed, so it needs no
// workspace.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/shared_plan.cuh"
#include "tile/dropout.cuh"
#include "tile/fragment_softmax.cuh"
#include "tile/gradient.cuh"
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

// [begin, end) of what a CTA sums over: all there is where the bias is broadcast, else its own part.
struct Span {
  int begin, end;
};
TANDEM_DEVICE Span span_of(bool summed, int all, int parts, int* block) {
  if (summed) return {0, all};
  const int own = *block % parts;
  *block /= parts;
  return {own, own + 1};
}

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
    u32 kept[(kQueries + 63) / 64];
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
      const float minus_lse = stats[in_tile], delta = stats[T.tile_m + in_tile];
      float probability_gradient = dp[r];
      float derivative = 1;
      const float score = of_head(scaled_score<T>(scores[r], p), p, query, key, &derivative);
      if constexpr (T.dropout) probability_gradient = is_kept(kept[r / 32], r % 32) ? dp[r] * p.dropout.scale : 0.0f;
      // Whatever lies beyond a sequence or is not seen: a product with 0 would not do, for it may be NaN.
      const bool hidden = key >= sequence.k_len || query < seen.begin || query >= seen.end || score == -kInfinity ||
                          minus_lse == -kInfinity;
      sums[r] += hidden
                     ? 0.0f
                     : through_scores<T>(exp2_approx(score + minus_lse), derivative) * (probability_gradient - delta);
    }
  }

  // Whether some query of the m_block sees some key of the n_block.
  TANDEM_DEVICE bool sees(const SequenceCoords& sequence, int m_block, int n_block) const {
    const int first = n_block * T.tile_n(), last = min(first + T.tile_n(), sequence.k_len) - 1;
    const QueryRange visible = band_of<T>(p, sequence).visible_queries(first, last);
    const int query = m_block * T.tile_m;
    return first <= last && query < min(visible.end, sequence.q_len) && visible.begin < query + T.tile_m;
  }

  TANDEM_DEVICE void share() const {
#pragma unroll
    for (int r = 0; r < kQueries / 2; ++r)
      s.sums[first_query + 2 * (lane & 3) + 8 * (r >> 2) + (r & 1)][key0 + 8 * row_of(r)] = sums[r];
    __syncthreads();
  }
};

// One CTA for each part of dbias that is no sum of the others' tiles: as many as BackwardTiling::dbias_blocks.
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
  const bool over_rows = p.dbias_rows == 1, over_columns = p.dbias_columns == 1;
  int block = blockIdx.x;
  const Span n_blocks = span_of(over_columns, p.n_blocks, p.n_blocks, &block);
  const Span m_blocks = span_of(over_rows, p.sequence_m_blocks, p.sequence_m_blocks, &block);
  const Span heads = span_of(p.dbias_heads == 1, p.heads_q, p.dbias_heads, &block);
  const Span batches = span_of(p.dbias_batches == 1, p.batch, p.dbias_batches, &block);

  DbiasTile<T> tile(p, s);
#pragma unroll 1
  for (int batch = batches.begin; batch < batches.end; ++batch) {
    const SequenceCoords sequence = sequence_coords<T>(p, batch);
#pragma unroll 1
    for (int head = heads.begin; head < heads.end; ++head) {
#pragma unroll 1
      for (int n_block = n_blocks.begin; n_block < n_blocks.end; ++n_block) {
#pragma unroll 1
        for (int m_block = m_blocks.begin; m_block < m_blocks.end; ++m_block)
          if (warp_any(tile.sees(sequence, m_block, n_block))) tile.add(sequence, head, m_block, n_block);
      }
    }
  }
  tile.share();
  // Then over the queries, and over the keys, of the tile.
  if (over_rows) {
    for (int key = threadIdx.x; key < T.tile_n(); key += blockDim.x)
      for (int query = 1; query < T.tile_m; ++query) s.sums[0][key] += s.sums[query][key];
    __syncthreads();
  }
  const int rows = over_rows ? 1 : T.tile_m, columns = over_columns ? 1 : T.tile_n();
  if (over_columns) {
    for (int query = threadIdx.x; query < rows; query += blockDim.x)
      for (int key = 1; key < T.tile_n(); ++key) s.sums[query][0] += s.sums[query][key];
    __syncthreads();
  }
  const i64 base = batches.begin * p.dbias_batch + heads.begin * p.dbias_head;
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const int query = m_blocks.begin * T.tile_m + i / columns, key = n_blocks.begin * T.tile_n() + i % columns;
    if (query >= p.dbias_rows || key >= p.dbias_columns) continue;
    store_element<T>(p.dbias, base + query * p.dbias_row + key * p.dbias_column, s.sums[i / columns][i % columns],
                     p.dbias_is_f32, p.accumulate);
  }
}
