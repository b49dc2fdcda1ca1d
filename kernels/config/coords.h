// The sequences and tiles of a problem: their coordinates, and the lengths that a varlen problem reads. Host and device
// use these functions, so that a test on the host evaluates the addresses of every store.
#pragma once
#include "config/forward.h"
#include "config/host_device.h"
#include "config/score_options.h"
#include "config/visible_range.h"

// The configuration of a kernel as an argument, so that the compiler still folds its members. The host passes a pointer
// to its configuration instead.
template <auto T>
struct Constant {
  TANDEM_HOST_DEVICE const auto* operator->() const { return &T; }
};
template <auto T>
constexpr Constant<T> constant{};

// Rows [m_block * T.tile_m(), ...) of a sequence and of pack_gqa heads. Row r is query r / pack_gqa of head head *
// pack_gqa + r % pack_gqa.
struct TileCoords {
  int m_block, head;
  int sequence, batch;                    // batch: of the tensors, 0 when packed
  int q_begin, k_begin;                   // first rows of the sequence in packed tensors
  int q_rows;                             // in memory; rows from q_len on are unused
  int q_len, k_len;                       // the used lengths
  int split_row = -1, split_n_block = 0;  // T.device_splits: see ListedTile
};

// The n-th work tile: groups of heads, in a group ordered by tile. m_blocks: of one head.
struct TileIndex {
  int m_block, head;  // head: over the batch
};
TANDEM_HOST_DEVICE TileIndex tile_index_at(const ForwardParams& p, int n, int m_blocks, int heads) {
  const int per_group = p.l2_heads * m_blocks, group = n / per_group, rest = n - group * per_group;
  const int width = smaller(heads - group * p.l2_heads, p.l2_heads);
  return {rest / width, group * p.l2_heads + rest % width};
}

// Dense: the longest tiles come first. Sequences that share a bias follow each other, so that the bias stays in the L2
// cache. heads: of a sequence, packed.
template <class Config>
TANDEM_HOST_DEVICE TileCoords dense_coords(Config t, const ForwardParams& p, int heads, int n) {
  const TileIndex index = tile_index_at(p, n, p.m_blocks, p.batch * heads);
  int batch = index.head / heads, head = index.head % heads;
  if (t->options.bias != Bias::none) {
    if (p.bias_batch == 0) batch = index.head % p.batch, head = index.head / p.batch;
  }
  int m_block = t->options.bounded_right ? p.m_blocks - 1 - index.m_block : index.m_block;
  if (t->options.block_mask)
    m_block = p.tile_order[static_cast<long long>(batch) * p.order_batch + head * p.order_head + index.m_block];
  return {m_block, head, batch, batch, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k};
}

// Reads a length and clamps it, so that any value stays within the tensors.
TANDEM_HOST_DEVICE int index_at(const int* values, int stride, int i) {
  return values[static_cast<long long>(i) * stride];
}

// The offset of a sequence plus the common offset, clamped to +-2^29.
TANDEM_HOST_DEVICE int explicit_diagonal(const ForwardParams& p, int sequence) {
  constexpr long long kFar = 1ll << 29;
  long long offset = p.diagonal_offset;
  if (p.diagonal_offsets) offset += index_at(p.diagonal_offsets, p.diagonal_offsets_stride, sequence);
  return static_cast<int>(smaller(larger(offset, -kFar), kFar));
}

// Splits of the keys: the work tiles of a tile follow each other, one for each split. Splits begin at fixed keys, so
// that the same keys are added in the same order for every batch.
template <class Config>
TANDEM_HOST_DEVICE int tile_of_work(Config t, const ForwardParams& p, int work) {
  return t->split_keys ? work / p.split.count : work;
}
template <class Config>
TANDEM_HOST_DEVICE int split_of_work(Config t, const ForwardParams& p, int work) {
  return t->split_keys ? work % p.split.count : 0;
}
// T.device_splits: the n_blocks of a sequence's splits. The number is doubled until max_count splits suffice. Sequences
// of up to eight short splits have fewer, because many of them run together.
template <class Config>
TANDEM_HOST_DEVICE int split_n_blocks(Config t, const SplitParams& split, int k_len) {
  int n_blocks = split.n_blocks;
  if (k_len <= 8 * n_blocks * t->tile_n) n_blocks *= 2;
  while (static_cast<long long>(n_blocks) * split.max_count * t->tile_n < k_len) n_blocks *= 2;
  return n_blocks;
}
// T.device_splits: the row of a sequence's first result.
TANDEM_HOST_DEVICE int first_split_row(const SplitParams& split, int sequence) {
  return sequence * split.count * split.max_queries;
}
// The coordinates by which a split's results are stored.
template <class Config>
TANDEM_HOST_DEVICE TileCoords split_coords(Config t, const ForwardParams& p, TileCoords tile, int split) {
  if (t->split_keys) tile.batch += split * p.split.batches;
  return tile;
}

TANDEM_HOST_DEVICE TileCoords varlen_coords(const ForwardParams& p, int sequence) {
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
template <class Config>
TANDEM_HOST_DEVICE int diagonal_of(Config t, const ForwardParams& p, const TileCoords& s) {
  if (p.bottom_right) return s.k_len - s.q_len;
  return t->options.varlen ? explicit_diagonal(p, s.sequence) : static_cast<int>(p.diagonal_offset);
}

template <bool bounded_left, bool bounded_right, class Config>
TANDEM_HOST_DEVICE Band<bounded_left, bounded_right> band_of(const Config& t, const ForwardParams& p,
                                                             const TileCoords& s) {
  return {diagonal_of(t, p, s), p.window_left, p.window_right, s.q_len, s.k_len};
}
// The keys that some query of [first, last] sees, and the queries that see some key.
template <class Config>
TANDEM_HOST_DEVICE KeyRange visible_keys(Config t, const ForwardParams& p, const TileCoords& s, int first, int last) {
  if (t->options.bounded_left && t->options.bounded_right)
    return band_of<true, true>(t, p, s).visible_keys(first, last);
  if (t->options.bounded_left) return band_of<true, false>(t, p, s).visible_keys(first, last);
  if (t->options.bounded_right) return band_of<false, true>(t, p, s).visible_keys(first, last);
  return band_of<false, false>(t, p, s).visible_keys(first, last);
}
template <class Config>
TANDEM_HOST_DEVICE QueryRange visible_queries(Config t, const ForwardParams& p, const TileCoords& s, int first,
                                              int last) {
  if (t->options.bounded_left && t->options.bounded_right)
    return band_of<true, true>(t, p, s).visible_queries(first, last);
  if (t->options.bounded_left) return band_of<true, false>(t, p, s).visible_queries(first, last);
  if (t->options.bounded_right) return band_of<false, true>(t, p, s).visible_queries(first, last);
  return band_of<false, false>(t, p, s).visible_queries(first, last);
}
