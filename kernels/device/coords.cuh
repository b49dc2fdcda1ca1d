// The coordinates of a forward tile: its rows, its sequence, and the n_blocks that its rows see.
#pragma once
#include "config/coords.h"
#include "ptx/base.cuh"

TANDEM_DEVICE int log2_of(int power_of_two) { return 31 - __clz(power_of_two); }

template <auto T>
TANDEM_DEVICE TileCoords dense_coords(const ForwardParams& p, int n) {
  return dense_coords(constant<T>, p, p.heads_q >> log2_of(p.pack_gqa), n);
}

template <auto T>
TANDEM_DEVICE int diagonal_of(const ForwardParams& p, const TileCoords& t) {
  return diagonal_of(constant<T>, p, t);
}

template <auto T>
TANDEM_DEVICE Band<T.options.bounded_left, T.options.bounded_right> band_of(const ForwardParams& p,
                                                                            const TileCoords& t) {
  return band_of<T.options.bounded_left, T.options.bounded_right>(constant<T>, p, t);
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
  const int first = row >> pack_shift, last = min((row + rows - 1) >> pack_shift, t.q_len - 1);
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

template <auto T>
TANDEM_DEVICE int tile_of_work(const ForwardParams& p, int work) {
  return tile_of_work(constant<T>, p, work);
}
template <auto T>
TANDEM_DEVICE int split_of_work(const ForwardParams& p, int work) {
  return split_of_work(constant<T>, p, work);
}

// The splits of a sequence with T.device_splits: [begin, end) of all splits of its keys. The range depends on the
// sequence's lengths only. A sequence that is not split has one. Invalid lengths may give more splits than the
// workspace has results for; such a sequence is not split.
struct SplitRange {
  int begin = 0, end = 1;
  int n_blocks = 0, first_n_block = 0, end_n_block = 0;  // a split's number; the range of all splits

  TANDEM_DEVICE int count() const { return end - begin; }
  // The first n_block and the number of n_blocks of the n-th split in the range.
  TANDEM_DEVICE int n_block(int n) const { return (begin + n) * n_blocks; }
  TANDEM_DEVICE int iterations(int n) const {
    return min(end_n_block, n_block(n + 1)) - max(first_n_block, n_block(n));
  }
};
template <auto T>
TANDEM_DEVICE SplitRange split_range(const ForwardParams& p, TileCoords sequence) {
  if (p.split.count <= 1 || sequence.q_len == 0 || sequence.q_len > p.split.max_queries) return {};
  sequence.m_block = 0;
  const NBlockRange range = n_block_range<T>(p, sequence);
  const int n_blocks = split_n_blocks(constant<T>, p.split, sequence.k_len);
  const SplitRange splits{range.begin / n_blocks, (range.end - 1) / n_blocks + 1, n_blocks, range.begin, range.end};
  return splits.count() > p.split.count ? SplitRange() : splits;
}

// Sets the n-th split of a sequence, if the sequence is split.
template <auto T>
TANDEM_DEVICE void set_split(const ForwardParams& p, const SplitRange& splits, int n, TileCoords& tile) {
  tile.split_row = -1;
  if (splits.count() == 1) return;
  tile.split_row = first_split_row(p.split, tile.sequence) + n * tile.q_len;
  tile.split_n_block = splits.n_block(n);
}

// Returns true if a work tile has the first keys of its rows.
template <auto T>
TANDEM_DEVICE bool is_first_split(const ForwardParams& p, const TileCoords& tile, int work) {
  if constexpr (T.device_splits) return tile.split_row < 0 || tile.split_row == first_split_row(p.split, tile.sequence);
  return split_of_work<T>(p, work) == 0;
}

// The n_blocks of a range that belong to a split. If no n_block belongs to the split, the split's first n_block
// remains. The mask hides the keys of this n_block, because this n_block is outside the unmasked range.
template <auto T>
TANDEM_DEVICE NBlockRange in_split(const ForwardParams& p, NBlockRange range, const TileCoords& tile, int work) {
  if constexpr (T.device_splits) {
    if (tile.split_row < 0) return range;
  }
  if constexpr (T.split_keys || T.device_splits) {
    const int n_blocks = T.device_splits ? split_n_blocks(constant<T>, p.split, tile.k_len) : p.split.n_blocks;
    const int begin = T.device_splits ? tile.split_n_block : split_of_work<T>(p, work) * n_blocks;
    range.end = min(range.end, begin + n_blocks);
    range.begin = max(range.begin, begin);
    if (range.begin >= range.end) range.begin = begin, range.end = begin + 1;
  }
  return range;
}

// The n_blocks of a work tile, within its split.
template <auto T>
TANDEM_DEVICE NBlockRange work_n_blocks(const ForwardParams& p, const TileCoords& tile, int work) {
  return in_split<T>(p, n_block_range<T>(p, tile), tile, work);
}

// The coordinates by which a work tile's results are stored.
template <auto T>
TANDEM_DEVICE TileCoords result_coords(const ForwardParams& p, const TileCoords& tile, int work) {
  return split_coords(constant<T>, p, tile, split_of_work<T>(p, work));
}

// The tiles of one head in the list of a varlen problem. Without a list every sequence has one tile for each split.
template <auto T>
TANDEM_DEVICE int listed_tiles(const ForwardParams& p) {
  if (!T.options.varlen) return 0;
  return p.tile_list ? p.counter[1] : p.m_blocks;
}

// The n-th tile of one head without a list. A tile without a split has no rows.
template <auto T>
TANDEM_DEVICE TileCoords unlisted_tile(const ForwardParams& p, int n) {
  if constexpr (T.device_splits) {
    const int of_sequence = max(p.split.count, 1), split = n % of_sequence;
    TileCoords tile = varlen_coords(p, n / of_sequence);
    const SplitRange splits = split_range<T>(p, tile);
    set_split<T>(p, splits, split, tile);
    if (split >= splits.count()) tile.q_rows = 0;
    return tile;
  } else {
    return varlen_coords(p, n);
  }
}

// The n-th work tile. listed: listed_tiles().
template <auto T>
TANDEM_DEVICE TileCoords coords_at(const ForwardParams& p, int n, int listed) {
  if constexpr (T.options.varlen) {
    const TileIndex index = tile_index_at(p, n, listed, p.heads_q >> log2_of(p.pack_gqa));
    TileCoords tile;
    if (p.tile_list) {
      const ListedTile listed_tile = p.tile_list[index.m_block];
      tile = varlen_coords(p, listed_tile.sequence);
      tile.m_block = listed_tile.m_block;
      if constexpr (T.device_splits)
        tile.split_row = listed_tile.split_row, tile.split_n_block = listed_tile.split_n_block;
    } else {
      tile = unlisted_tile<T>(p, index.m_block);
    }
    tile.head = index.head;
    return tile;
  } else {
    return dense_coords<T>(p, n);
  }
}
