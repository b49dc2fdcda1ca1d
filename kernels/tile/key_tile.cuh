// A tile of a backward: keys of an n_block, and the m_blocks of queries that see them.
#pragma once
#include "tile/key_steps.cuh"
#include "tile/sequence.cuh"

// Keys [n_block * T.tile_n(), ...) of a key head, and the m_blocks that see some of them.
struct KeyTile {
  int n_block, head_k = 0, sequence = 0;
  int m_begin = 0, m_end = 0;
  int split = 0;     // which part of the steps
  int diagonal = 0;  // they begin there
};

// Under a causal mask the n_blocks of a head may be taken from the last to the first, and their steps from the first
// m_block on, which is at the diagonal. Then n_blocks come to an m_block one step after the other, in the order in
// which they add to its dq, and none waits for its turn. But the longest come last: some heads, which are worked on
// when all else is done, are taken from their first n_block, and all of them together.
template <auto T>
TANDEM_DEVICE constexpr bool from_diagonal() {
  if constexpr (requires { T.from_diagonal; }) return T.from_diagonal;
  return false;
}
template <auto T>
TANDEM_DEVICE TileIndex key_tile_index_at(const BackwardParams& p, int n, int heads) {
  if constexpr (!from_diagonal<T>()) {
    TileIndex index = tile_index_at(p, n, p.n_blocks, heads);
    if constexpr (T.block_mask) index.m_block = p.n_blocks - 1 - index.m_block;
    return index;
  }
  const int head = n / p.n_blocks, rest = n - p.diagonal_heads * p.n_blocks;
  if (rest < 0) return {(head + 1) * p.n_blocks - 1 - n, head};
  const int others = heads - p.diagonal_heads, n_block = rest / others;
  return {n_block, p.diagonal_heads + rest - n_block * others};
}

// The steps of a tile: the m_blocks that see it, from the last to the first (or from_diagonal), each with all query
// heads that share its keys. So a CTA whose n_block is seen by few m_blocks is done with them without waiting, for its
// turn to add to dq, for those of a head that the n_block before comes to late. With a bound on the left as many see
// one as another; then all m_blocks of a head come before the next head, and fewer dq are in the L2 cache at once.
template <auto T>
struct RangeOfSteps {
  int head, m_block, left;

  TANDEM_DEVICE RangeOfSteps(const BackwardParams& p, const KeyTile& tile)
      : m_block(tile.m_end - 1), m_begin_(tile.m_begin), m_end_(tile.m_end) {
    if (from_diagonal<T>() && tile.diagonal) m_block = m_begin_, next_ = 1;
    int heads = p.heads_q / p.heads_k;
    head = tile.head_k * heads;
    // Split over CTAs by heads, where they can be.
    const bool by_heads = split() && heads % p.splits == 0;
    if (by_heads) heads /= p.splits, head += tile.split * heads;
    first_head_ = head;
    end_head_ = head + heads;
    left = heads * (m_end_ - m_begin_);
    if (split() && !by_heads && left > 0) take_part(tile.split, p.splits);
  }
  TANDEM_DEVICE void advance() {
    --left;
    if constexpr (T.left) {
      if (--m_block < m_begin_) m_block = m_end_ - 1, ++head;
    } else {
      if (++head == end_head_) head = first_head_, m_block += next_;
    }
  }
  TANDEM_DEVICE int first_head() const { return first_head_; }
  TANDEM_DEVICE int heads() const { return end_head_ - first_head_; }

 private:
  int m_begin_, m_end_, first_head_, end_head_, next_ = -1;

  TANDEM_DEVICE static constexpr bool split() {
    if constexpr (requires { T.split; }) return T.split;
    return false;
  }
  TANDEM_DEVICE void take_part(int part, int parts) {
    const i64 all = left;
    const int first = static_cast<int>(all * part / parts), m_blocks = m_end_ - m_begin_;
    left = static_cast<int>(all * (part + 1) / parts) - first;
    head += T.left ? first / m_blocks : first % heads();
    m_block -= T.left ? first % m_blocks : first / heads();
  }
};

// With a block mask: those that list_key_steps() has listed.
template <auto T>
struct ListedSteps {
  int head, m_block, left;

  TANDEM_DEVICE ListedSteps(const BackwardParams& params, const KeyTile& tile) : p_(params) {
    const auto& p = static_cast<const BlockMaskedBackwardParams&>(params);
    next_ = p.blocks.steps + ((static_cast<i64>(tile.sequence) * p.heads_k + tile.head_k) * p.n_blocks + tile.n_block) *
                                 p.blocks.list_words;
    left = *next_++;
    if constexpr (requires { T.split; }) {
      if (T.split) {
        const i64 all = left;
        const int first = static_cast<int>(all * tile.split / p.splits);
        left = static_cast<int>(all * (tile.split + 1) / p.splits) - first;
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
  int ahead_;  // the next step: on its way while this one is made

  // Behind the last step there is one more number, which is none.
  TANDEM_DEVICE void read() {
    const int step = ahead_;
    if (left > 0) ahead_ = *next_++;
    m_block = step / p_.heads_q;
    head = step - m_block * p_.heads_q;
  }
};

struct NoSteps {
  TANDEM_DEVICE NoSteps(const BackwardParams&, const KeyTile&) {}
};

template <auto T>
using KeySteps = typename OneOf<T.block_mask, ListedSteps<T>, RangeOfSteps<T>>::Type;
// For who counts the others by itself.
template <auto T>
using ListedOrNone = typename OneOf<T.block_mask, ListedSteps<T>, NoSteps>::Type;

template <auto T>
TANDEM_DEVICE constexpr bool by_head() {
  if constexpr (requires { T.by_head; }) return T.by_head;
  return false;
}

// Whether the main kernel stores dq.
template <auto T>
TANDEM_DEVICE constexpr bool single() {
  if constexpr (requires { T.single; }) return T.single;
  return false;
}

// The n-th, the longest first (but from_diagonal, and of block masks: tile/key_steps.cuh): under a causal mask the
// first keys are seen by the most queries. Heads that are taken together share the L2 cache; the splits of an n_block
// follow each other, and so do sequences that share a bias.
template <auto T>
TANDEM_DEVICE KeyTile key_tile_at(const BackwardParams& p, int n) {
  int split = 0, parts = 1;
  if constexpr (by_head<T>()) {
    parts = p.splits;
  } else if constexpr (T.split) {
    split = n % p.splits, n /= p.splits;
  }
  TileIndex index = key_tile_index_at<T>(p, n, p.batch * p.heads_k * parts);
  const int diagonal = from_diagonal<T>() && index.head < p.diagonal_heads;
  if constexpr (by_head<T>()) split = index.head % parts, index.head /= parts;
  int sequence = index.head / p.heads_k, head_k = index.head - sequence * p.heads_k;
  if constexpr (T.bias != Bias::none) {
    if (p.bias_batch == 0) head_k = index.head / p.batch, sequence = index.head - head_k * p.batch;
  }
  KeyTile tile{index.m_block, head_k, sequence, 0, 0, split, diagonal};
  const SequenceCoords s = sequence_coords<T>(p, tile.sequence);
  const int first = tile.n_block * T.tile_n(), last = min(first + T.tile_n(), s.k_len) - 1;
  if (first > last) return tile;
  const QueryRange visible = band_of<T>(p, s).visible_queries(first, last);
  const int begin = max(0, visible.begin), end = min(visible.end, s.q_len);
  tile.m_begin = begin / T.tile_m;
  // None where the first query that would see them is beyond the last, though in its m_block: it would not be counted.
  tile.m_end = begin < end ? (end + T.tile_m - 1) / T.tile_m : tile.m_begin;
  return tile;
}

// Where an m_block's numbers are in workspace.
TANDEM_DEVICE i64 m_block_at(const BackwardParams& p, const SequenceCoords& s, int head, int m_block) {
  return static_cast<i64>(head) * p.m_blocks + s.first_m_block + m_block;
}

// The first n_block that an m_block sees. Others add to its dq after it, one after the other.
template <auto T>
TANDEM_DEVICE int first_n_block(const BackwardParams& p, const SequenceCoords& s, int m_block) {
  if constexpr (!T.left) return 0;
  const int first = m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
  return max(0, band_of<T>(p, s).visible_keys(first, last).begin) / T.tile_n();
}
// How many n_blocks add to the dq of a step before this one.
template <auto T>
TANDEM_DEVICE int n_blocks_before(const BackwardParams& p, const SequenceCoords& s, const KeySteps<T>& step,
                                  const KeyTile& tile) {
  const int n_block = tile.n_block;
  if constexpr (T.block_mask) return table_word<T>(p, s, step.head, step.m_block, n_block) >> kStepBits;
  if (from_diagonal<T>() && tile.diagonal) {
    const int first = step.m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
    return (min(band_of<T>(p, s).visible_keys(first, last).end, s.k_len) - 1) / T.tile_n() - n_block;
  }
  return n_block - first_n_block<T>(p, s, step.m_block);
}
