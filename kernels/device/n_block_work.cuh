// A backward tile: the keys of an n_block, and the m_blocks of queries that see them.
#pragma once
#include "device/ds_chunk.cuh"
#include "device/m_block_lists.cuh"
#include "device/sequence.cuh"

// Keys [n_block * T.tile_n(), ...) of a key head, and the m_blocks that see some of them.
struct NBlockWork {
  int n_block, head_k = 0, sequence = 0;
  int m_begin = 0, m_end = 0;
  int m_split_idx = 0;  // index of the part of the iterations
  int diagonal = 0;     // the iterations begin here
};

// spt: under a causal mask the n_blocks of a head go from last to first, and their iterations from the
// diagonal on. n_blocks then reach an m_block in consecutive iterations, in the order in which they add dq, so that
// none stalls. The longest tiles come last; therefore some heads run together at the end, from the first n_block on.
template <auto T>
TANDEM_DEVICE constexpr bool spt() {
  if constexpr (requires { T.spt; }) return T.spt;
  return false;
}
template <auto T>
TANDEM_DEVICE constexpr bool split_q_heads() {
  if constexpr (requires { T.split_q_heads; }) return T.split_q_heads;
  return false;
}
// The number of query heads that a tile of a dS chunk iterates over, out of the heads that share its keys.
template <auto T>
TANDEM_DEVICE int tile_query_heads(const BackwardParams& p) {
  return split_q_heads<T>() ? p.heads_q / (p.heads_k * p.m_splits) : 1;
}

// Heads whose tiles are interleaved: numbers from `first` on, one n_block of each head after the other.
struct NBlockGroup {
  int first, first_head, heads;
  bool falls;  // from the last n_block to the first
  int first_n_block = 0;
};
template <auto T>
TANDEM_DEVICE NBlockGroup n_block_group_at(const BackwardParams& p, int n, int heads) {
  if constexpr (ds_gmem<T>()) {
    const DsChunk chunk(p);
    const int of_tile = tile_query_heads<T>(p);
    return {0, chunk.first_head / of_tile, chunk.heads / of_tile, false, chunk.first_n_block};
  }
  if constexpr (spt<T>()) {
    const int head = n / p.n_blocks;
    if (head < p.spt_heads) return {head * p.n_blocks, head, 1, true};
    return {p.spt_heads * p.n_blocks, p.spt_heads, heads - p.spt_heads, false};
  }
  const int per_group = p.l2_heads * p.n_blocks, group = n / per_group, first_head = group * p.l2_heads;
  return {group * per_group, first_head, min(heads - first_head, p.l2_heads), T.block_mask};
}

// The iterations of a tile: the m_blocks that see it, from last to first (or spt), each with all query heads
// that share its keys. A CTA with few m_blocks then rarely waits for its turn to add dq. With a bound on the left all
// m_blocks of a head come before the next head, which keeps fewer dq in the L2 cache.
template <auto T>
struct DenseMBlocks {
  int head, m_block, left;

  TANDEM_DEVICE DenseMBlocks(const BackwardParams& p, const NBlockWork& tile)
      : m_block(tile.m_end - 1), m_begin_(tile.m_begin), m_end_(tile.m_end) {
    if (spt<T>() && tile.diagonal) m_block = m_begin_, next_ = 1;
    int heads = p.heads_q / p.heads_k;
    head = tile.head_k * heads;
    // Split over CTAs by heads if possible.
    const bool by_heads = is_split() && heads % p.m_splits == 0;
    if (by_heads) heads /= p.m_splits, head += tile.m_split_idx * heads;
    first_head_ = head;
    end_head_ = head + heads;
    left = heads * (m_end_ - m_begin_);
    if (is_split() && !by_heads && left > 0) take_part(tile.m_split_idx, p.m_splits);
  }
  TANDEM_DEVICE void advance() {
    --left;
    if constexpr (T.bounded_left) {
      if (--m_block < m_begin_) m_block = m_end_ - 1, ++head;
    } else {
      if (++head == end_head_) head = first_head_, m_block += next_;
    }
  }
  TANDEM_DEVICE int first_head() const { return first_head_; }
  TANDEM_DEVICE int heads() const { return end_head_ - first_head_; }

 private:
  int m_begin_, m_end_, first_head_, end_head_, next_ = -1;

  TANDEM_DEVICE static constexpr bool is_split() {
    if constexpr (requires { T.m_split; }) return T.m_split;
    return false;
  }
  TANDEM_DEVICE void take_part(int part, int parts) {
    const i64 all = left;
    const int first = static_cast<int>(all * part / parts), m_blocks = m_end_ - m_begin_;
    left = static_cast<int>(all * (part + 1) / parts) - first;
    head += T.bounded_left ? first / m_blocks : first % heads();
    m_block -= T.bounded_left ? first % m_blocks : first / heads();
  }
};

// With a block mask: the iterations that list_m_blocks() has listed.
template <auto T>
struct SparseMBlocks {
  int head, m_block, left;

  TANDEM_DEVICE SparseMBlocks(const BackwardParams& params, const NBlockWork& tile) : p_(params) {
    const auto& p = static_cast<const BlockMaskedBackwardParams&>(params);
    next_ = p.blocks.steps + ((static_cast<i64>(tile.sequence) * p.heads_k + tile.head_k) * p.n_blocks + tile.n_block) *
                                 p.blocks.list_words;
    left = *next_++;
    if constexpr (requires { T.m_split; }) {
      if (T.m_split) {
        const i64 all = left;
        const int first = static_cast<int>(all * tile.m_split_idx / p.m_splits);
        left = static_cast<int>(all * (tile.m_split_idx + 1) / p.m_splits) - first;
        next_ += first;
      }
    }
    ahead_ = *next_++;
    read();
  }
  TANDEM_DEVICE void advance() {
    --left;
    read();
  }

 private:
  const BackwardParams& p_;
  const int* next_;
  int ahead_;  // prefetched next iteration

  // The list has one extra entry after the last iteration.
  TANDEM_DEVICE void read() {
    const int step = ahead_;
    if (left > 0) ahead_ = *next_++;
    m_block = step / p_.heads_q;
    head = step - m_block * p_.heads_q;
  }
};

struct NoMBlocks {
  TANDEM_DEVICE NoMBlocks(const BackwardParams&, const NBlockWork&) {}
};

template <auto T>
using MBlockIterator = typename OneOf<T.block_mask, SparseMBlocks<T>, DenseMBlocks<T>>::Type;
// For a caller that counts the other indices itself.
template <auto T>
using SparseOrNone = typename OneOf<T.block_mask, SparseMBlocks<T>, NoMBlocks>::Type;

// True if the main kernel stores dq.
template <auto T>
TANDEM_DEVICE constexpr bool single_n_block() {
  if constexpr (requires { T.single_n_block; }) return T.single_n_block;
  return false;
}

// The number of heads of a sequence that tiles are counted for.
template <auto T>
TANDEM_DEVICE int tile_heads(const BackwardParams& p) {
  return p.heads_k * (split_q_heads<T>() ? p.m_splits : 1);
}
// True if a head of all sequences comes before the next head, because they share a bias.
template <auto T>
TANDEM_DEVICE bool sequences_follow(const BackwardParams& p) {
  return T.bias != Bias::none && p.bias_batch == 0;
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
  // No m_block if the first query that sees them is beyond the last query: such a tile is not counted.
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
  if (!T.varlen || tile.n_block * T.tile_n() < s.k_rows) return false;
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
// The number of n_blocks that add to an iteration's dq before this one.
template <auto T>
TANDEM_DEVICE int count_n_blocks_before(const BackwardParams& p, const SequenceCoords& s, const MBlockIterator<T>& step,
                                        const NBlockWork& tile) {
  const int n_block = tile.n_block;
  if constexpr (T.block_mask) return table_word<T>(p, s, step.head, step.m_block, n_block) >> kStateBits;
  if (spt<T>() && tile.diagonal) {
    const int first = step.m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
    return (min(band_of<T>(p, s).visible_keys(first, last).end, s.k_len) - 1) / T.tile_n() - n_block;
  }
  return n_block - first_n_block<T>(p, s, step.m_block);
}
