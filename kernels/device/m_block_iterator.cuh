// The n_block of a backward tile, and the iterator over the m_blocks of queries that see it.
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

// spt: under a causal mask the n_blocks of a head go from last to first, and their iterations from the diagonal on.
// n_blocks then reach an m_block in consecutive iterations, in the order in which they add dq, so that no n_block
// stalls. Because the longest tiles would come last, some heads run together at the end, longest tile first.
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

// Heads whose tiles are interleaved. The tiles of one n_block over all these heads have consecutive numbers.
struct NBlockGroup {
  int first, first_head, heads;
  bool falls;  // order from the last n_block to the first
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
  return {group * per_group, first_head, min(heads - first_head, p.l2_heads), T.options.block_mask};
}

// The iterations of a tile: the m_blocks that see it, from last to first (or spt), each with all query heads that share
// its keys. A CTA with few m_blocks then rarely waits for its turn to add dq. With a left bound all m_blocks of a head
// come before the next head, so that fewer dq occupy the L2 cache.
template <auto T>
struct DenseMBlocks {
  int head, m_block, left;

  TANDEM_DEVICE DenseMBlocks(const BackwardParams& p, const NBlockWork& tile)
      : m_block(tile.m_end - 1), m_begin_(tile.m_begin), m_end_(tile.m_end) {
    if (spt<T>() && tile.diagonal) m_block = m_begin_, next_ = 1;
    int heads = p.heads_q / p.heads_k;
    head = tile.head_k * heads;
    // CTAs split the iterations by heads if possible.
    const bool by_heads = is_split() && heads % p.m_splits == 0;
    if (by_heads) heads /= p.m_splits, head += tile.m_split_idx * heads;
    first_head_ = head;
    end_head_ = head + heads;
    left = heads * (m_end_ - m_begin_);
    if (is_split() && !by_heads && left > 0) take_part(tile.m_split_idx, p.m_splits);
  }
  TANDEM_DEVICE void advance() {
    --left;
    if constexpr (T.options.bounded_left) {
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
    head += T.options.bounded_left ? first / m_blocks : first % heads();
    m_block -= T.options.bounded_left ? first % m_blocks : first / heads();
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
using MBlockIterator = typename OneOf<T.options.block_mask, SparseMBlocks<T>, DenseMBlocks<T>>::Type;
// For a caller that counts the other indices itself.
template <auto T>
using SparseOrNone = typename OneOf<T.options.block_mask, SparseMBlocks<T>, NoMBlocks>::Type;
