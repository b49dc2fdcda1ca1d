// The gradient of a bias: P (dP - delta), summed over what the bias is broadcast along, by a kernel of its own
// (tile/score_tile.cuh). Each number has one CTA that writes it and one order in which it is summed, so it needs no
// workspace. Here is what does not depend on the GPU: which tiles a CTA sums over, what a score adds, where sums go.
#pragma once
#include "tile/gradient.cuh"
#include "tile/score_tile.cuh"

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

// A CTA's part of dbias, as many as BackwardTiling::dbias_blocks, in tiles of T.tile_m queries and kKeys keys.
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

  // add(ScoreTileAt) of each tile that is not hidden whole, by all threads alike.
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

  // Sums of a tile's entries go to memory, summed over its queries and over its keys where that is wanted.
  TANDEM_DEVICE void store(float (&sums)[T.tile_m][kKeys]) const {
    __syncthreads();  // all are there
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
    const i64 base = batches.begin * p.dbias_batch + heads.begin * p.dbias_head;
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
      const int query = m_blocks.begin * T.tile_m + i / columns, key = key_blocks.begin * kKeys + i % columns;
      if (query >= p.dbias_rows || key >= p.dbias_columns) continue;
      store_element<T>(p.dbias, base + query * p.dbias_row + key * p.dbias_column, sums[i / columns][i % columns],
                       p.dbias_is_f32, p.accumulate);
    }
  }
};

// What a score adds: nothing of a gradient of 0 that comes to a score_mod, whatever its derivative is.
template <auto T>
TANDEM_DEVICE float dbias_of(const ScoreGradient& score) {
  if constexpr (T.score_mod) return score.ds == 0 ? 0.0f : score.ds * score.derivative;
  return score.ds;
}
