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
TANDEM_DEVICE Band<T.bounded_left, T.bounded_right> band_of(const ForwardParams& p, const TileCoords& t) {
  return band_of<T.bounded_left, T.bounded_right>(constant<T>, p, t);
}

// The n_blocks that some row of a tile sees, visited from the last to the first. Inside them is the range of n_blocks
// that every row sees completely, which needs no mask.
struct NBlockRange {
  int begin, end, unmasked_begin, unmasked_end;
};

// For rows [row, row + rows) of a sequence. The range is never empty: rows without visible keys get their zeros from a
// masked n_block.
template <auto T>
TANDEM_DEVICE NBlockRange n_block_range(const ForwardParams& p, const TileCoords& t, int row, int rows) {
  const int pack_shift = log2_of(p.pack_gqa);
  const int first = row >> pack_shift, last = min((row + rows) >> pack_shift, t.q_len) - 1;
  const auto band = band_of<T>(p, t);
  const KeyRange visible = band.visible_keys(first, last), unmasked = band.unmasked_keys(first, last);
  NBlockRange range;
  range.end = max(1, (visible.end + T.tile_n - 1) / T.tile_n);
  range.begin = T.bounded_left ? min(max(0, visible.begin) / T.tile_n, range.end - 1) : 0;
  range.unmasked_end = (T.bounded_right ? max(0, unmasked.end) : unmasked.end) / T.tile_n;
  range.unmasked_begin = T.bounded_left ? (max(0, unmasked.begin) + T.tile_n - 1) / T.tile_n : 0;
  return range;
}
template <auto T>
TANDEM_DEVICE NBlockRange n_block_range(const ForwardParams& p, const TileCoords& t) {
  return n_block_range<T>(p, t, t.m_block * T.tile_m(), T.tile_m());
}

// The n-th work tile. listed: tiles of one head in the list of a varlen problem.
template <auto T>
TANDEM_DEVICE TileCoords coords_at(const ForwardParams& p, int n, int listed) {
  if constexpr (T.varlen) {
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
