// 16 bytes of a row, the amount that one thread moves at once.
#pragma once
#include "config/forward_addresses.h"
#include "device/coords.cuh"

struct alignas(16) Chunk {
  u32 x[4];
};

// Sets rows [begin, rows) of blocks of 64 columns to zero. kChunks: 16 bytes each, per row.
template <int kChunks = 8>
TANDEM_DEVICE void zero_rows(u16* blocks, int rows, int columns, int begin, int thread, int threads) {
  auto* const chunks = reinterpret_cast<Chunk*>(blocks);
#pragma unroll 1
  for (int block = 0; block < columns / (8 * kChunks); ++block)
#pragma unroll 1
    for (int i = begin * kChunks + thread; i < rows * kChunks; i += threads)
      chunks[block * rows * kChunks + i] = {0, 0, 0, 0};
}

// Rows [first_row, first_row + count) of a tile, columns [column0, column0 + columns).
struct TileBox {
  int first_row, count, column0, columns;
};
// Stores a partial tile at the end of a sequence with ordinary stores of 128 threads. from: blocks of 128 bytes and
// kRows rows, swizzled.
template <int kRows, int kElementBytes>
TANDEM_DEVICE void store_rows(const ForwardParams& p, const TileCoords& t, const u16* from, const TileBox& box) {
  constexpr int kElements = 16 / kElementBytes;
  const int pack_shift = log2_of(p.pack_gqa), chunks = box.columns / kElements;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < box.count * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks, at = box.first_row + row;
    const int swizzled = chunk / 8 * kRows * 8 + row * 8 + ((chunk & 7) ^ (row & 7));
    const i64 element = out_row_at(p, t, at >> pack_shift, (t.head << pack_shift) + (at & (p.pack_gqa - 1))) +
                        box.column0 + chunk * kElements;
    char* const to = static_cast<char*>(p.out_data) + element * kElementBytes;
    *reinterpret_cast<Chunk*>(to) = reinterpret_cast<const Chunk*>(from)[swizzled];
  }
}
