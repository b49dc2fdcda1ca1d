// The coordinates of a forward tile: its rows, its sequence, and the n_blocks that its rows see.
#pragma once
#include "config/forward.h"
#include "config/score_options.h"
#include "config/visible_range.h"
#include "ptx/base.cuh"

// Rows [m_block * T.tile_m(), ...) of a sequence and of pack_gqa heads. Row r is query r / pack_gqa of head head *
// pack_gqa + r % pack_gqa.
struct TileCoords {
  int m_block, head;
  int sequence, batch;   // batch: index in the tensors, 0 if packed
  int q_begin, k_begin;  // first rows of the sequence in packed tensors
  int q_rows;            // rows in memory; rows from q_len on are unused
  int q_len, k_len;      // the used lengths
};

TANDEM_DEVICE int log2_of(int power_of_two) { return 31 - __clz(power_of_two); }

// The n-th work tile: groups of heads, in each group ordered by tile. m_blocks: the number per head.
struct TileIndex {
  int m_block, head;  // head: index over the batch
};
TANDEM_DEVICE TileIndex tile_index_at(const ForwardParams& p, int n, int m_blocks, int heads) {
  const int per_group = p.l2_heads * m_blocks, group = n / per_group, rest = n - group * per_group;
  const int width = min(heads - group * p.l2_heads, p.l2_heads);
  return {rest / width, group * p.l2_heads + rest % width};
}

// Dense: the longest tiles come first. Sequences that share a bias follow each other, so that the bias stays in the L2
// cache.
template <auto T>
TANDEM_DEVICE TileCoords dense_coords(const ForwardParams& p, int n) {
  const int heads = p.heads_q >> log2_of(p.pack_gqa);
  const TileIndex index = tile_index_at(p, n, p.m_blocks, p.batch * heads);
  int batch = index.head / heads, head = index.head % heads;
  if constexpr (T.options.bias != Bias::none) {
    if (p.bias_batch == 0) batch = index.head % p.batch, head = index.head / p.batch;
  }
  int m_block = T.options.bounded_right ? p.m_blocks - 1 - index.m_block : index.m_block;
  if constexpr (T.options.block_mask)
    m_block = p.tile_order[static_cast<i64>(batch) * p.order_batch + head * p.order_head + index.m_block];
  return {m_block, head, batch, batch, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k};
}

// Reads a length on the device and clamps it, so that any value stays within the tensors.
TANDEM_DEVICE int index_at(const int* values, int stride, int i) { return values[static_cast<i64>(i) * stride]; }
TANDEM_DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

// The offset of a sequence plus the common offset, clamped to +-2^29.
TANDEM_DEVICE int explicit_diagonal(const ForwardParams& p, int sequence) {
  constexpr i64 kFar = i64{1} << 29;
  i64 offset = p.diagonal_offset;
  if (p.diagonal_offsets) offset += index_at(p.diagonal_offsets, p.diagonal_offsets_stride, sequence);
  return static_cast<int>(min(max(offset, -kFar), kFar));
}

TANDEM_DEVICE TileCoords varlen_coords(const ForwardParams& p, int sequence) {
  TileCoords t{0, 0, sequence, sequence, 0, 0, p.seqlen_q, 0, p.seqlen_k};
  if (p.cu_seqlens_q) {
    t.batch = 0;
    t.q_begin = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, sequence), 0, p.total_q);
    t.q_rows = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, sequence + 1), t.q_begin, p.total_q) - t.q_begin;
  }
  if (p.cu_seqlens_k) {
    t.k_begin = clamp(index_at(p.cu_seqlens_k, p.cu_seqlens_k_stride, sequence), 0, p.total_k);
    t.k_len = clamp(index_at(p.cu_seqlens_k, p.cu_seqlens_k_stride, sequence + 1), t.k_begin, p.total_k) - t.k_begin;
  }
  t.q_len = t.q_rows;
  if (p.seqused_q) t.q_len = clamp(index_at(p.seqused_q, p.seqused_q_stride, sequence), 0, t.q_len);
  if (p.seqused_k) t.k_len = clamp(index_at(p.seqused_k, p.seqused_k_stride, sequence), 0, t.k_len);
  return t;
}

// Key j is at distance i + diagonal - j from query i. The diagonal is loaded where it is used, so that kernels without
// a diagonal do not keep it in a register.
template <auto T>
TANDEM_DEVICE int diagonal_of(const ForwardParams& p, const TileCoords& t) {
  if (p.bottom_right) return t.k_len - t.q_len;
  return T.options.varlen ? explicit_diagonal(p, t.sequence) : static_cast<int>(p.diagonal_offset);
}

template <auto T>
TANDEM_DEVICE Band<T.options.bounded_left, T.options.bounded_right> band_of(const ForwardParams& p,
                                                                            const TileCoords& t) {
  return {diagonal_of<T>(p, t), p.window_left, p.window_right, t.q_len, t.k_len};
}

// The n_blocks that some row of a tile sees, visited from the last to the first. The n_blocks that every row sees
// completely are a range inside; they need no mask.
struct NBlockRange {
  int begin, end, unmasked_begin, unmasked_end;
};

// The range of rows [row, row + rows) of a sequence. The range is never empty: rows without visible keys get zeros from
// a masked n_block.
template <auto T>
TANDEM_DEVICE NBlockRange n_block_range(const ForwardParams& p, const TileCoords& t, int row, int rows) {
  const int pack_shift = log2_of(p.pack_gqa);
  const int first = row >> pack_shift, last = min((row + rows) >> pack_shift, t.q_len) - 1;
  const auto band = band_of<T>(p, t);
  const KeyRange visible = band.visible_keys(first, last), unmasked = band.unmasked_keys(first, last);
  NBlockRange range;
  range.end = max(1, (visible.end + T.tile_n - 1) / T.tile_n);
  range.begin = T.options.bounded_left ? min(max(0, visible.begin) / T.tile_n, range.end - 1) : 0;
  range.unmasked_end = (T.options.bounded_right ? max(0, unmasked.end) : unmasked.end) / T.tile_n;
  range.unmasked_begin = T.options.bounded_left ? (max(0, unmasked.begin) + T.tile_n - 1) / T.tile_n : 0;
  return range;
}
template <auto T>
TANDEM_DEVICE NBlockRange n_block_range(const ForwardParams& p, const TileCoords& t) {
  return n_block_range<T>(p, t, t.m_block * T.tile_m(), T.tile_m());
}

// Splits of the keys: the work tiles of a tile follow each other, one for each split. Splits begin at fixed keys, so
// that the same keys are added in the same order for every batch.
template <auto T>
TANDEM_DEVICE int tile_of_work(const ForwardParams& p, int work) {
  if constexpr (T.split_keys) return work / p.split.count;
  return work;
}
template <auto T>
TANDEM_DEVICE int split_of_work(const ForwardParams& p, int work) {
  if constexpr (T.split_keys) return work % p.split.count;
  return 0;
}

// The n_blocks of a range that belong to a split. If no n_block belongs to the split, the split's first n_block
// remains. The mask hides the keys of this n_block, because this n_block is outside the unmasked range.
template <auto T>
TANDEM_DEVICE NBlockRange in_split(const ForwardParams& p, NBlockRange range, int work) {
  if constexpr (T.split_keys) {
    const int begin = split_of_work<T>(p, work) * p.split.n_blocks;
    range.end = min(range.end, begin + p.split.n_blocks);
    range.begin = max(range.begin, begin);
    if (range.begin >= range.end) range.begin = begin, range.end = begin + 1;
  }
  return range;
}

// The n_blocks of a work tile, within its split.
template <auto T>
TANDEM_DEVICE NBlockRange work_n_blocks(const ForwardParams& p, const TileCoords& tile, int work) {
  return in_split<T>(p, n_block_range<T>(p, tile), work);
}

// The coordinates by which a split's results are stored.
template <auto T>
TANDEM_DEVICE TileCoords result_coords(const ForwardParams& p, TileCoords tile, int work) {
  if constexpr (T.split_keys) tile.batch += split_of_work<T>(p, work) * p.split.batches;
  return tile;
}

// The n-th work tile. listed: tiles of one head in the list of a varlen problem.
template <auto T>
TANDEM_DEVICE TileCoords coords_at(const ForwardParams& p, int n, int listed) {
  if constexpr (T.options.varlen) {
    const TileIndex index = tile_index_at(p, n, listed, p.heads_q >> log2_of(p.pack_gqa));
    const ListedTile listed_tile = p.tile_list[index.m_block];
    TileCoords tile = varlen_coords(p, listed_tile.sequence);
    tile.m_block = listed_tile.m_block;
    tile.head = index.head;
    return tile;
  } else {
    return dense_coords<T>(p, n);
  }
}
