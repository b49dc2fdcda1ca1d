// The gradient of a bias: P (dP - delta), summed over the broadcast dimensions by a separate kernel
// (score_grads/score_tile.cuh). One CTA computes each number in a fixed order, so that no workspace is needed. This
// file has the parts that do not depend on the GPU: the tiles of a CTA, the term of a score, and the stores.
#pragma once
#include "device/gradient.cuh"
#include "score_grads/score_tile.cuh"

// The range [begin, end) that a CTA sums over: everything if the bias is broadcast, else the CTA's part.
struct Span {
  int begin, end;
};
TANDEM_DEVICE Span span_of(bool summed, int all, int parts, int* block) {
  if (summed) return {0, all};
  const int own = *block % parts;
  *block /= parts;
  return {own, own + 1};
}

// A CTA's part of dbias, one of BackwardSchedule::dbias_blocks, in tiles of T.tile_m queries and kKeys keys.
template <auto T, int kKeys>
struct DbiasPart {
  const BackwardParams& p;
  const bool over_rows, over_columns;
  Span key_blocks, m_blocks, heads, batches;

  TANDEM_DEVICE explicit DbiasPart(const BackwardParams& params)
      : p(params), over_rows(params.dbias_rows == 1), over_columns(params.dbias_columns == 1) {
    const int all_key_blocks = p.n_blocks * (T.tile_n() / kKeys);
    int block = blockIdx.x;
    key_blocks = span_of(over_columns, all_key_blocks, all_key_blocks, &block);
    m_blocks = span_of(over_rows, p.sequence_m_blocks, p.sequence_m_blocks, &block);
    heads = span_of(p.dbias_heads == 1, p.heads_q, p.dbias_heads, &block);
    batches = span_of(p.dbias_batches == 1, p.batch, p.dbias_batches, &block);
  }

  // Calls add(ScoreTileAt) for each tile that is not hidden completely. All threads must call this function.
  template <class Add>
  TANDEM_DEVICE void for_each_tile(const Add& add) const {
#pragma unroll 1
    for (int batch = batches.begin; batch < batches.end; ++batch) {
      const SequenceCoords sequence = sequence_coords<T>(p, batch);
#pragma unroll 1
      for (int head = heads.begin; head < heads.end; ++head) {
#pragma unroll 1
        for (int key_block = key_blocks.begin; key_block < key_blocks.end; ++key_block) {
#pragma unroll 1
          for (int m_block = m_blocks.begin; m_block < m_blocks.end; ++m_block) {
            const ScoreTileAt at{sequence, head, m_block, key_block};
            if (warp_any(sees_some<T, kKeys>(p, at))) add(at);
          }
        }
      }
    }
  }

  // Stores the sums of a tile, reduced over its queries and its keys if the bias is broadcast there.
  TANDEM_DEVICE void store(float (&sums)[T.tile_m][kKeys]) const {
    __syncthreads();  // all sums are stored
    if (over_rows) {
      for (int key = threadIdx.x; key < kKeys; key += blockDim.x)
        for (int query = 1; query < T.tile_m; ++query) sums[0][key] += sums[query][key];
      __syncthreads();
    }
    const int rows = over_rows ? 1 : T.tile_m, columns = over_columns ? 1 : kKeys;
    if (over_columns) {
      for (int query = threadIdx.x; query < rows; query += blockDim.x)
        for (int key = 1; key < kKeys; ++key) sums[query][0] += sums[query][key];
      __syncthreads();
    }
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
      const int query = m_blocks.begin * T.tile_m + i / columns, key = key_blocks.begin * kKeys + i % columns;
      if (query >= p.dbias_rows || key >= p.dbias_columns) continue;
      const i64 at = dbias_at(p, batches.begin, heads.begin, query, key);
      store_element<T>(p.dbias, at, sums[i / columns][i % columns], p.dbias_is_f32, p.accumulate);
    }
  }
};

// The gradient term of a score. An incoming gradient of 0 adds nothing, even if the score_mod's derivative is inf or
// NaN.
template <auto T>
TANDEM_DEVICE float dbias_of(const ScoreGradient& score) {
  if constexpr (T.options.score_mod) return score.ds == 0 ? 0.0f : score.ds * score.derivative;
  return score.ds;
}
