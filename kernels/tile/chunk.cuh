// 16 bytes of a row: what one thread moves at once.
#pragma once
#include "tile/coords.cuh"

struct alignas(16) Chunk {
  u32 x[4];
};

// Rows [begin, rows) of blocks of 64 columns become zeros.
TANDEM_DEVICE void zero_rows(u16* blocks, int rows, int columns, int begin, int thread, int threads) {
  constexpr int kChunks = 8;  // of 16 bytes, in a row
  auto* const chunks = reinterpret_cast<Chunk*>(blocks);
#pragma unroll 1
  for (int block = 0; block < columns / 64; ++block)
#pragma unroll 1
    for (int i = begin * kChunks + thread; i < rows * kChunks; i += threads)
      chunks[block * rows * kChunks + i] = {0, 0, 0, 0};
}

// Ordinary stores, by the 128 threads of a warpgroup, of the rows of a tile that a sequence ends in: the first `count`
// of those from first_row on, columns [column0, column0 + columns). from: blocks of 128 bytes and kRows rows, swizzled.
template <int kRows, int kElementBytes>
TANDEM_DEVICE void store_rows(const ForwardParams& p, const TileCoords& t, const u16* from, int first_row, int count,
                              int column0, int columns) {
  constexpr int kElements = 16 / kElementBytes;
  const int pack_shift = log2_of(p.pack_gqa), chunks = columns / kElements;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < count * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks, at = first_row + row;
    const int swizzled = chunk / 8 * kRows * 8 + row * 8 + ((chunk & 7) ^ (row & 7));
    const i64 element = t.batch * p.out_batch + (t.q_begin + (at >> pack_shift)) * p.out_row +
                        ((t.head << pack_shift) + (at & (p.pack_gqa - 1))) * p.out_head + column0 + chunk * kElements;
    char* const to = static_cast<char*>(p.out_data) + element * kElementBytes;
    *reinterpret_cast<Chunk*>(to) = reinterpret_cast<const Chunk*>(from)[swizzled];
  }
}
