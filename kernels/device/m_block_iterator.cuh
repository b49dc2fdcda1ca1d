// The n_block of a backward tile, and the iterator over the m_blocks of queries that see it.
#pragma once
#include "device/ds_chunk.cuh"
#include "device/m_block_lists.cuh"
#include "device/sequence.cuh"

template <auto T>
TANDEM_DEVICE constexpr bool spt() {
  return uses_spt(constant<T>);
}
template <auto T>
TANDEM_DEVICE constexpr bool split_q_heads() {
  return splits_q_heads(constant<T>);
}
template <auto T>
TANDEM_DEVICE int tile_query_heads(const BackwardParams& p) {
  return tile_query_heads(constant<T>, p);
}
template <auto T>
TANDEM_DEVICE NBlockGroup n_block_group_at(const BackwardParams& p, int n, int heads) {
  return n_block_group_at(constant<T>, p, n, heads);
}

// The place among a tile's iterations, and the first one, where iterations wrap to.
struct Wrap {
  int index = 0, iterations = 0, head = 0, m_block = 0;

  TANDEM_DEVICE void advance(int& head_now, int& m_block_now) {
    if (++index == iterations) index = 0, head_now = head, m_block_now = m_block;
  }
};

// The iterations of a tile: the m_blocks that see it, from last to first (or spt), each with all query heads that share
// its keys. A CTA with few m_blocks then rarely waits for its turn to add dq. With a left bound all m_blocks of a head
// come before the next head, so that fewer dq occupy the L2 cache. With T.wraps an n_block begins elsewhere.
template <auto T>
struct DenseMBlocks {
  int head, m_block, left;

  TANDEM_DEVICE DenseMBlocks(const BackwardParams& p, const NBlockWork& tile)
      : m_block(tile.m_end - 1), m_begin_(tile.m_begin), m_end_(tile.m_end) {
    if (spt<T>() && tile.diagonal) m_block = m_begin_, next_ = 1;
    int first = 0, heads = 0;
    const bool by_heads = set_query_heads(constant<T>, p, tile, &first, &heads);
    head = first_head_ = first;
    end_head_ = head + heads;
    left = heads * (m_end_ - m_begin_);
    if (T.m_split && !by_heads && left > 0) take_part(tile.m_split_idx, p.m_splits);
    if constexpr (wraps(constant<T>)) {
      wrap_ = {WrappedIterations(p, left).first(tile.n_block), left, head, m_block};
      skip(wrap_.index);
    }
  }
  TANDEM_DEVICE void advance() {
    --left;
    if constexpr (T.options.bounded_left) {
      if (--m_block < m_begin_) m_block = m_end_ - 1, ++head;
    } else {
      if (++head == end_head_) head = first_head_, m_block += next_;
      if constexpr (wraps(constant<T>)) wrap_.advance(head, m_block);
    }
  }
  TANDEM_DEVICE const Wrap& wrap() const { return wrap_; }
  TANDEM_DEVICE int first_head() const { return first_head_; }
  TANDEM_DEVICE int heads() const { return end_head_ - first_head_; }

 private:
  int m_begin_, m_end_, first_head_, end_head_, next_ = -1;
  [[maybe_unused]] Wrap wrap_;

  TANDEM_DEVICE void take_part(int part, int parts) {
    const i64 all = left;
    const int first = static_cast<int>(all * part / parts);
    left = static_cast<int>(all * (part + 1) / parts) - first;
    skip(first);
  }
  TANDEM_DEVICE void skip(int iterations) {
    if constexpr (T.options.bounded_left) {  // from the first iteration
      const int m_blocks = m_end_ - m_begin_;
      head += iterations / m_blocks, m_block -= iterations % m_blocks;
    } else {
      const int beyond = head - first_head_ + iterations;
      head = first_head_ + beyond % heads(), m_block -= beyond / heads();
    }
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
        const int parts = parts_of_tile(constant<T>, p, tile), first = static_cast<int>(all * tile.m_split_idx / parts);
        left = static_cast<int>(all * (tile.m_split_idx + 1) / parts) - first;
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

// The place of an iteration with T.wraps.
template <auto T, class Steps>
TANDEM_DEVICE Wrap wrap_of(const Steps& steps) {
  if constexpr (wraps(constant<T>)) return steps.wrap();
  return {};
}

template <auto T>
using MBlockIterator = typename OneOf<T.options.block_mask, SparseMBlocks<T>, DenseMBlocks<T>>::Type;
// The iterator of a caller that counts the other indices itself.
template <auto T>
using SparseOrNone = typename OneOf<T.options.block_mask, SparseMBlocks<T>, NoMBlocks>::Type;
