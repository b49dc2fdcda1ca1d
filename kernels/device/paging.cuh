// Keys and values in pages. TMA loads them in boxes of T.page_rows keys, which divide page_size and the iteration's
// keys, so that a box lies in one page.
#pragma once
#include "device/coords.cuh"
#include "ptx/tma.cuh"

// The place of a box: its page, and the row of its first key in the page.
struct PagePlace {
  int page, row;
};

// The keys [first, end) of a sequence that some row of a work tile may see.
struct PagedKeys {
  int first = 0, end = 0, sequence = 0;

  template <auto T>
  static TANDEM_DEVICE PagedKeys of(const ForwardParams& p, const TileCoords& tile) {
    PagedKeys keys;
    if constexpr (T.options.bounded_left) {
      const int query = tile.m_block * T.tile_m() >> log2_of(p.pack_gqa);
      keys.first = max(0, band_of<T>(p, tile).visible_keys(query, query).begin);
    }
    keys.end = tile.k_len;
    keys.sequence = tile.sequence;
    return keys;
  }

  // The place of keys [key, key + rows), which lie in one page. The page is -1 if the entry is no page, or if no row
  // sees any of these keys; the entry is not read then. TMA replaces a box of page -1 by zeros.
  // Without `checked` the page may have any value, so that the caller need not wait for the entry yet.
  template <bool checked = true>
  TANDEM_DEVICE PagePlace place(const ForwardParams& p, int key, int rows) const {
    const PageParams& pages = p.pages;
    const int index = key / pages.page_size;
    PagePlace at{-1, key - index * pages.page_size};
    if (key + rows > first && key < end) {
      at.page = pages.table[static_cast<i64>(sequence) * pages.batch + static_cast<i64>(index) * pages.column];
      if constexpr (checked) {
        if (static_cast<u32>(at.page) >= static_cast<u32>(pages.pages)) at.page = -1;
      }
    }
    return at;
  }
};

// The columns of a load: blocks of 64 from column `first` of a key head on.
struct PagedColumns {
  const TensorMap& map;
  int first, blocks, head;
};

// Loads keys [key, key + rows) to blocks of 64 columns and `rows` rows. One thread calls this function. The loads of
// several entries of the page table overlap.
template <int page_rows, int rows>
TANDEM_DEVICE void load_pages(u16* to, u64* full, const ForwardParams& p, const PagedKeys& keys,
                              const PagedColumns& columns, int key) {
  constexpr int kBox = page_rows < rows ? page_rows : rows, kBoxes = rows / kBox;
  constexpr int kAtOnce = kBoxes % 4 == 0 ? 4 : kBoxes % 2 == 0 ? 2 : 1;
#pragma unroll 1
  for (int first = 0; first < rows; first += kAtOnce * kBox) {
    PagePlace at[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) at[i] = keys.place(p, key + first + i * kBox, kBox);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll 1
      for (int b = 0; b < columns.blocks; ++b)
        tma_load(to + (b * rows + first + i * kBox) * 64, &columns.map, full, columns.first + 64 * b, at[i].row,
                 columns.head, at[i].page);
    }
  }
}
