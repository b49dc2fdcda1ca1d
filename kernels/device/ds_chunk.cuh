// A dS chunk of a backward: the tiles whose dS is in global memory at once. The main kernel stores dS, then the dq
// kernel computes dq from it. Both kernels are launched once per chunk.
#pragma once
#include "device/m_block_lists.cuh"
#include "device/sequence.cuh"

template <auto T>
TANDEM_DEVICE constexpr bool ds_gmem() {
  if constexpr (requires { T.ds_gmem(); }) return T.ds_gmem();
  return false;
}

// head: an index over the batch. n_blocks: the number of n_blocks of a head.
struct DsChunk {
  int first_head, heads, first_n_block, n_blocks;

  TANDEM_DEVICE explicit DsChunk(const BackwardParams& p) {
    const int number = p.counter[1], of_head = (p.n_blocks + p.chunk_n_blocks - 1) / p.chunk_n_blocks;
    first_head = number / of_head * p.chunk_heads;
    heads = min(p.chunk_heads, p.batch * p.heads_q - first_head);
    first_n_block = number % of_head * p.chunk_n_blocks;
    n_blocks = min(p.chunk_n_blocks, p.n_blocks - first_n_block);
  }
  TANDEM_DEVICE int tiles() const { return heads * n_blocks; }
};

// The first n_block that an m_block sees.
template <auto T>
TANDEM_DEVICE int first_n_block(const BackwardParams& p, const SequenceCoords& s, int m_block) {
  if constexpr (!T.options.bounded_left) return 0;
  const int first = m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
  return max(0, band_of<T>(p, s).visible_keys(first, last).begin) / T.tile_n();
}

// The address of the dS of an m_block and n_block. The n_blocks of an m_block are contiguous, from the first visible
// n_block or the chunk's first. Under a causal mask m_blocks see different numbers of n_blocks, so that two m_blocks
// share a row (pack_triangle): the first and the last.
template <auto T>
TANDEM_DEVICE u16* ds_at(const BackwardParams& p, const SequenceCoords& s, const DsChunk& chunk, int head, int m_block,
                         int n_block) {
  int row = m_block, column = n_block - chunk.first_n_block, rows = p.sequence_m_blocks;
  if constexpr (T.options.bounded_left) column = n_block - max(chunk.first_n_block, first_n_block<T>(p, s, m_block));
  if (p.pack_triangle) {
    row = rows - 1 - m_block;
    if (row < m_block) {
      row = m_block;
    } else if (row > m_block) {
      column = p.ds_row_stride - 1 - column;
    }
    row -= rows / 2, rows -= rows / 2;
  }
  const int of_chunk = s.sequence * p.heads_q + head - chunk.first_head;
  const i64 block = (static_cast<i64>(of_chunk) * rows + row) * p.ds_row_stride + column;
  return static_cast<u16*>(p.ds) + block * (T.cta_keys() * T.tile_m);
}
