// The order in which a backward processes its tiles, and the places of tiles in the buffers of dq.
#pragma once
#include "device/m_block_iterator.cuh"

// Returns true if the main kernel stores dq.
template <auto T>
TANDEM_DEVICE constexpr bool single_n_block() {
  if constexpr (requires { T.single_n_block; }) return T.single_n_block;
  return false;
}

// The number of heads of a sequence in the numbering of tiles.
template <auto T>
TANDEM_DEVICE int tile_heads(const BackwardParams& p) {
  return p.heads_k * (split_q_heads<T>() ? p.m_splits : 1);
}
// Returns true if a head of all sequences comes before the next head, because sequences share a bias.
template <auto T>
TANDEM_DEVICE bool sequences_follow(const BackwardParams& p) {
  return T.options.bias != Bias::none && p.bias_batch == 0;
}
// The number of consecutive tiles that share an n_block and a head.
template <auto T>
TANDEM_DEVICE int tile_parts(const BackwardParams& p) {
  return T.m_split && !split_q_heads<T>() ? p.m_splits : 1;
}

// The n-th tile, longest first (except with spt and block masks: device/m_block_lists.cuh); under a causal mask the
// most queries see the first keys. Interleaved heads share the L2 cache. The splits of an n_block and the sequences
// that share a bias follow each other.
template <auto T>
TANDEM_DEVICE NBlockWork n_block_work_at(const BackwardParams& p, int n) {
  const int parts = tile_parts<T>(p);
  int m_split_idx = n % parts;
  n /= parts;
  const NBlockGroup group = n_block_group_at<T>(p, n, p.batch * tile_heads<T>(p));
  const int rest = n - group.first, from_begin = rest / group.heads;
  const int n_block = group.falls ? p.n_blocks - 1 - from_begin : group.first_n_block + from_begin;
  int of_all = group.first_head + rest % group.heads;  // head index over the batch
  if constexpr (split_q_heads<T>()) m_split_idx = of_all % p.m_splits, of_all /= p.m_splits;
  int sequence = of_all / p.heads_k, head_k = of_all - sequence * p.heads_k;
  if (sequences_follow<T>(p)) head_k = of_all / p.batch, sequence = of_all - head_k * p.batch;
  NBlockWork tile{n_block, head_k, sequence, 0, 0, m_split_idx, spt<T>() && group.falls};
  const SequenceCoords s = sequence_coords<T>(p, tile.sequence);
  const int first = tile.n_block * T.tile_n(), last = min(first + T.tile_n(), s.k_len) - 1;
  if (first > last) return tile;
  const QueryRange visible = band_of<T>(p, s).visible_queries(first, last);
  const int begin = max(0, visible.begin), end = min(visible.end, s.q_len);
  tile.m_begin = begin / T.tile_m;
  // The tile has no m_block if the first query that sees its keys is beyond the last query. Such a tile is not counted.
  tile.m_end = begin < end ? (end + T.tile_m - 1) / T.tile_m : tile.m_begin;
  return tile;
}

template <auto T>
TANDEM_DEVICE int launch_tiles(const BackwardParams& p) {
  if constexpr (ds_gmem<T>()) return DsChunk(p).tiles() / tile_query_heads<T>(p) * tile_parts<T>(p);
  return p.tiles;
}

// Tiles are counted as if all sequences had the maximum length; true if this n_block is beyond its sequence. The
// counter then skips the equally distant n_blocks of the group's other heads, if the group has one sequence.
template <auto T>
TANDEM_DEVICE bool skip_empty_tiles(const BackwardParams& p, int* counter, int n, const NBlockWork& tile,
                                    const SequenceCoords& s) {
  if (!T.options.varlen || tile.n_block * T.tile_n() < s.k_rows) return false;
  const int parts = tile_parts<T>(p), of_sequence = tile_heads<T>(p);
  const NBlockGroup group = n_block_group_at<T>(p, n / parts, p.batch * of_sequence);
  const bool of_one = group.first_head / of_sequence == (group.first_head + group.heads - 1) / of_sequence;
  if (group.heads == 1 || (of_one && !sequences_follow<T>(p))) {
    const int n_blocks = (s.k_rows + T.tile_n() - 1) / T.tile_n();
    atomicMax(counter, parts * (group.first + group.heads * (p.n_blocks - (group.falls ? n_blocks : 0))));
  }
  return true;
}

// The index of an m_block in workspace.
TANDEM_DEVICE i64 m_block_at(const BackwardParams& p, const SequenceCoords& s, int head, int m_block) {
  return static_cast<i64>(head) * p.m_blocks + s.first_m_block + m_block;
}

// The number of n_blocks that add to an m_block's dq.
template <auto T>
TANDEM_DEVICE int count_n_blocks(const BackwardParams& p, const SequenceCoords& s, int m_block) {
  const int first = m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
  const auto keys = band_of<T>(p, s).visible_keys(first, last);
  const int end = min(keys.end, s.k_len);
  if (last < first || max(0, keys.begin) >= end) return 0;
  return (end - 1) / T.tile_n() - first_n_block<T>(p, s, m_block) + 1;
}
// The number of n_blocks that add to an iteration's dq before this n_block.
template <auto T>
TANDEM_DEVICE int count_n_blocks_before(const BackwardParams& p, const SequenceCoords& s, const MBlockIterator<T>& step,
                                        const NBlockWork& tile) {
  const int n_block = tile.n_block;
  if constexpr (T.options.block_mask) return table_word<T>(p, s, step.head, step.m_block, n_block) >> kStateBits;
  if (spt<T>() && tile.diagonal) {
    const int first = step.m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
    return (min(band_of<T>(p, s).visible_keys(first, last).end, s.k_len) - 1) / T.tile_n() - n_block;
  }
  return n_block - first_n_block<T>(p, s, step.m_block);
}
