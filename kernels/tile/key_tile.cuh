// A backward tile: the keys of an n_block, and the m_blocks of queries that see them.
#pragma once
#include "tile/key_steps.cuh"
#include "tile/sequence.cuh"
#include "tile/strip.cuh"

// Keys [n_block * T.tile_n(), ...) of a key head, and the m_blocks that see some of them.
struct KeyTile {
  int n_block, head_k = 0, sequence = 0;
  int m_begin = 0, m_end = 0;
  int split = 0;     // index of the part of the iterations
  int diagonal = 0;  // the iterations begin here
};

// from_diagonal: under a causal mask the n_blocks of a head go from last to first, and their iterations from the
// diagonal on. n_blocks then reach an m_block in consecutive iterations, in the order in which they add dq, so that
// none stalls. The longest tiles come last; therefore some heads run together at the end, from the first n_block on.
template <auto T>
TANDEM_DEVICE constexpr bool from_diagonal() {
  if constexpr (requires { T.from_diagonal; }) return T.from_diagonal;
  return false;
}
template <auto T>
TANDEM_DEVICE constexpr bool by_head() {
  if constexpr (requires { T.by_head; }) return T.by_head;
  return false;
}
// The number of query heads that a tile of strips iterates over, out of the heads that share its keys.
template <auto T>
TANDEM_DEVICE int heads_of_tile(const BackwardParams& p) {
  return by_head<T>() ? p.heads_q / (p.heads_k * p.splits) : 1;
}

// Heads whose tiles are interleaved: numbers from `first` on, one n_block of each head after the other.
struct KeyTileGroup {
  int first, first_head, heads;
  bool falls;  // from the last n_block to the first
  int first_n_block = 0;
};
template <auto T>
TANDEM_DEVICE KeyTileGroup key_tile_group_at(const BackwardParams& p, int n, int heads) {
  if constexpr (strips<T>()) {
    const Strip strip(p);
    const int of_tile = heads_of_tile<T>(p);
    return {0, strip.first_head / of_tile, strip.heads / of_tile, false, strip.first_n_block};
  }
  if constexpr (from_diagonal<T>()) {
    const int head = n / p.n_blocks;
    if (head < p.diagonal_heads) return {head * p.n_blocks, head, 1, true};
    return {p.diagonal_heads * p.n_blocks, p.diagonal_heads, heads - p.diagonal_heads, false};
  }
  const int per_group = p.l2_heads * p.n_blocks, group = n / per_group, first_head = group * p.l2_heads;
  return {group * per_group, first_head, min(heads - first_head, p.l2_heads), T.block_mask};
}

// The iterations of a tile: the m_blocks that see it, from last to first (or from_diagonal), each with all query heads
// that share its keys. A CTA with few m_blocks then rarely waits for its turn to add dq. With a bound on the left all
// m_blocks of a head come before the next head, which keeps fewer dq in the L2 cache.
template <auto T>
struct RangeOfSteps {
  int head, m_block, left;

  TANDEM_DEVICE RangeOfSteps(const BackwardParams& p, const KeyTile& tile)
      : m_block(tile.m_end - 1), m_begin_(tile.m_begin), m_end_(tile.m_end) {
    if (from_diagonal<T>() && tile.diagonal) m_block = m_begin_, next_ = 1;
    int heads = p.heads_q / p.heads_k;
    head = tile.head_k * heads;
    // Split over CTAs by heads if possible.
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

// With a block mask: the iterations that list_key_steps() has listed.
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
  int ahead_;  // prefetched next iteration

  // The list has one extra entry after the last iteration.
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
// For a caller that counts the other indices itself.
template <auto T>
using ListedOrNone = typename OneOf<T.block_mask, ListedSteps<T>, NoSteps>::Type;

// True if the main kernel stores dq.
template <auto T>
TANDEM_DEVICE constexpr bool single() {
  if constexpr (requires { T.single; }) return T.single;
  return false;
}

// The number of heads of a sequence that tiles are counted for.
template <auto T>
TANDEM_DEVICE int tile_heads(const BackwardParams& p) {
  return p.heads_k * (by_head<T>() ? p.splits : 1);
}
// True if a head of all sequences comes before the next head, because they share a bias.
template <auto T>
TANDEM_DEVICE bool sequences_follow(const BackwardParams& p) {
  return T.bias != Bias::none && p.bias_batch == 0;
}
// The number of consecutive tiles that share an n_block and a head.
template <auto T>
TANDEM_DEVICE int tile_parts(const BackwardParams& p) {
  return T.split && !by_head<T>() ? p.splits : 1;
}

// The n-th tile, longest first (except with from_diagonal and block masks: tile/key_steps.cuh); under a causal mask the
// most queries see the first keys. Interleaved heads share the L2 cache. The splits of an n_block and the sequences
// that share a bias follow each other.
template <auto T>
TANDEM_DEVICE KeyTile key_tile_at(const BackwardParams& p, int n) {
  const int parts = tile_parts<T>(p);
  int split = n % parts;
  n /= parts;
  const KeyTileGroup group = key_tile_group_at<T>(p, n, p.batch * tile_heads<T>(p));
  const int rest = n - group.first, from_begin = rest / group.heads;
  const int n_block = group.falls ? p.n_blocks - 1 - from_begin : group.first_n_block + from_begin;
  int of_all = group.first_head + rest % group.heads;  // head index over the batch
  if constexpr (by_head<T>()) split = of_all % p.splits, of_all /= p.splits;
  int sequence = of_all / p.heads_k, head_k = of_all - sequence * p.heads_k;
  if (sequences_follow<T>(p)) head_k = of_all / p.batch, sequence = of_all - head_k * p.batch;
  KeyTile tile{n_block, head_k, sequence, 0, 0, split, from_diagonal<T>() && group.falls};
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
TANDEM_DEVICE int tiles_of_launch(const BackwardParams& p) {
  if constexpr (strips<T>()) return Strip(p).tiles() / heads_of_tile<T>(p) * tile_parts<T>(p);
  return p.tiles;
}

// Tiles are counted as if all sequences had the maximum length; true if this n_block is beyond its sequence. The
// counter then skips the equally distant n_blocks of the group's other heads, if the group has one sequence.
template <auto T>
TANDEM_DEVICE bool pass_empty_tiles(const BackwardParams& p, int* counter, int n, const KeyTile& tile,
                                    const SequenceCoords& s) {
  if (!T.varlen || tile.n_block * T.tile_n() < s.k_rows) return false;
  const int parts = tile_parts<T>(p), of_sequence = tile_heads<T>(p);
  const KeyTileGroup group = key_tile_group_at<T>(p, n / parts, p.batch * of_sequence);
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
TANDEM_DEVICE int n_blocks_of(const BackwardParams& p, const SequenceCoords& s, int m_block) {
  const int first = m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
  const auto keys = band_of<T>(p, s).visible_keys(first, last);
  const int end = min(keys.end, s.k_len);
  if (last < first || max(0, keys.begin) >= end) return 0;
  return (end - 1) / T.tile_n() - first_n_block<T>(p, s, m_block) + 1;
}
// The number of n_blocks that add to an iteration's dq before this one.
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
