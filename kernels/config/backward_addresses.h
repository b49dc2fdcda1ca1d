// The places that the backward's kernels store to, as indices into a buffer. Host and device use these functions. A
// test evaluates them on the host for every launch, and compares them with the plan's workspace and the tensors.
#pragma once
#include "config/backward_tiles.h"
#include "config/block_mask.h"

// ---- Workspace ----

constexpr int kBackwardCounters = 4;  // BackwardParams::counter

// The index of an m_block in workspace. Sums, semaphores and lse_delta have one part for each.
TANDEM_HOST_DEVICE long long m_block_at(const BackwardParams& p, const SequenceCoords& s, int head, int m_block) {
  return static_cast<long long>(head) * p.m_blocks + s.first_m_block + m_block;
}
// The index of an m_block's sums and semaphores of dq: the sums of dq_splits follow each other.
template <class Config>
TANDEM_HOST_DEVICE long long dq_block_at(Config t, const BackwardParams& p, long long m_block, int dq_split) {
  return splits_dq(t) ? m_block + static_cast<long long>(dq_split) * p.heads_q * p.m_blocks : m_block;
}
// The semaphore of a part of dq.
template <class Config, class Index, class Part>
TANDEM_HOST_DEVICE auto dq_semaphore_at(Config t, Index m_block, Part part) {
  return t->dq_semaphores() * m_block + part;
}
template <class Config>
TANDEM_HOST_DEVICE long long lse_delta_at(Config t, long long m_block) {
  return m_block * (2 * t->tile_m);
}
// The sums of dq of an m_block.
template <class Config>
TANDEM_HOST_DEVICE long long dq_sums_at(Config t, long long m_block) {
  return m_block * t->dq_floats();
}
// Offsets in these sums. Hopper uses dq_part_at, and its parts count over the cluster. Blackwell uses the CTA's column.
template <class Config>
TANDEM_HOST_DEVICE int dq_part_at(Config t, int part) {
  return part * t->dq_part_floats();
}
template <class Config>
TANDEM_HOST_DEVICE float* dq_of_cta(Config t, const BackwardParams& p, long long m_block, int cta) {
  return p.dq_accum + m_block * t->dq_floats() + cta * (t->dq_floats() / t->ctas());
}
template <class Config>
TANDEM_HOST_DEVICE int dq_column_at(Config t, int column) {
  return column * t->tile_m;
}
// A thread's first float4 in the sums of a part that has `floats` per thread. The next float4 is `threads` later.
TANDEM_HOST_DEVICE unsigned fragment_at(int floats, int threads, int part, unsigned thread) {
  return part * (floats / 4 * threads) + thread % threads;
}

// The n_block of one CTA, among the split n_blocks or, if all are split, among all n_blocks of all key heads.
template <class Config>
TANDEM_HOST_DEVICE long long dkv_block_at(Config t, const BackwardParams& p, const NBlockWork& tile, unsigned cta) {
  if (t->has_unsplit_tiles()) return static_cast<long long>(tile.split_block) * t->ctas() + cta;
  return (static_cast<long long>(tile.sequence) * p.heads_k + tile.head_k) * (p.n_blocks * t->ctas()) +
         tile.n_block * t->ctas() + cta;
}
// The sums of dk and dv of a tile's split. With split_q_heads all splits add to one sum.
template <class Config>
TANDEM_HOST_DEVICE long long dkv_sums_at(Config t, const BackwardParams& p, long long block, int m_split_idx) {
  const long long place = t->split_q_heads ? block : block * p.m_splits + m_split_idx;
  return place * t->dkv_floats();
}
// The offset of dk or dv in these sums: dk is first, then dv.
template <class Config>
TANDEM_HOST_DEVICE int dkv_part_at(Config t, bool of_k) {
  return of_k ? 0 : t->cta_keys() * t->head_dim;
}
template <class Config>
TANDEM_HOST_DEVICE long long dkv_semaphores_at(Config t, long long block) {
  return block * t->dkv_semaphores();
}
TANDEM_HOST_DEVICE int dkv_semaphore_at(int part, bool of_k) { return 2 * part + of_k; }

// The dS of an m_block and n_block: cta_keys() * tile_m elements. The n_blocks of an m_block are contiguous, from the
// first that it sees or the chunk's first. Under a causal mask m_blocks see different numbers and share rows
// (pack_triangle): the first with the last. With chunks_span_batch() each m_block in workspace has a row.
struct DsBlock {
  int head, m_block, n_block;
};
template <class Config>
TANDEM_HOST_DEVICE long long ds_at(Config t, const BackwardParams& p, const SequenceCoords& s, const DsChunk& chunk,
                                   const DsBlock& at) {
  const int m_block = at.m_block, n_block = at.n_block;
  int row = m_block, column = n_block - chunk.first_n_block, rows = p.sequence_m_blocks;
  if (t->options.bounded_left) column = n_block - larger(chunk.first_n_block, first_n_block(t, p, s, m_block));
  if (chunks_span_batch(t)) {
    const long long rows_before = m_block_at(p, s, at.head - chunk.first_head, m_block);
    return (rows_before * p.ds_row_stride + column) * (t->cta_keys() * t->tile_m);
  }
  if (p.pack_triangle) {
    row = rows - 1 - m_block;
    if (row < m_block) {
      row = m_block;
    } else if (row > m_block) {
      column = p.ds_row_stride - 1 - column;
    }
    row -= rows / 2, rows -= rows / 2;
  }
  const int of_chunk = s.sequence * p.heads_q + at.head - chunk.first_head;
  const long long block = (static_cast<long long>(of_chunk) * rows + row) * p.ds_row_stride + column;
  return block * (t->cta_keys() * t->tile_m);
}

// The semaphore of the dS of a query head and n_block.
TANDEM_HOST_DEVICE long long ds_semaphore_at(const BackwardParams& p, const SequenceCoords& s, int head, int n_block) {
  return (static_cast<long long>(s.sequence) * p.heads_q + head) * p.n_blocks + n_block;
}

// The 16 bytes of a rounded dout: row counts over the sequences.
TANDEM_HOST_DEVICE long long rounded_dout_at(const BackwardParams& p, const SequenceCoords& s, long long row, int head,
                                             int chunk) {
  const long long row_at = (s.batch * static_cast<long long>(p.seqlen_q) + row) * p.heads_q + head;
  return row_at * (p.head_dim_v / 8) + chunk;
}

// A row of the table of a block mask, and the list of an n_block.
TANDEM_HOST_DEVICE long long table_row_at(const BackwardParams& p, long long row) { return row * p.n_blocks; }
TANDEM_HOST_DEVICE long long m_block_list_at(const BlockMaskParams& blocks, long long n_block) {
  return n_block * blocks.list_words;
}

// A word of a cell's exact sum.
TANDEM_HOST_DEVICE long long captured_word_at(const CapturedParams& p, int word, long long cell) {
  return word * p.cells + cell;
}

// ---- Gradients ----

// A row of a gradient; rows count over a packed tensor.
TANDEM_HOST_DEVICE long long dq_row_at(const BackwardParams& p, int batch, long long row, int head) {
  return batch * p.dq_batch + row * p.dq_row + head * p.dq_head;
}
TANDEM_HOST_DEVICE long long dkv_head_at(const BackwardParams& p, bool of_k, int batch, int head) {
  return batch * (of_k ? p.dk_batch : p.dv_batch) + head * (of_k ? p.dk_head : p.dv_head);
}
TANDEM_HOST_DEVICE long long dkv_row_at(const BackwardParams& p, bool of_k, int batch, int row, int head) {
  return dkv_head_at(p, of_k, batch, head) + row * (of_k ? p.dk_row : p.dv_row);
}
TANDEM_HOST_DEVICE long long dbias_at(const BackwardParams& p, int batch, int head, int query, int key) {
  return batch * p.dbias_batch + head * p.dbias_head + query * p.dbias_row + key * p.dbias_column;
}

// An element of a captured tensor's gradient. rest: its number in the tensor.
TANDEM_HOST_DEVICE long long captured_element_at(const ModTensor& tensor, const CapturedTensor& to, long long rest) {
  long long at = 0;
  for (int i = kModRank - 1; i >= 0; --i) {
    const int size = tensor.size[i];
    at += rest % size * to.stride[i];
    rest /= size;
  }
  return at;
}
