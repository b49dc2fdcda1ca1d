// What a row may not see, by key and as bits of 32 columns.
#pragma once
#include "tile/row.cuh"

// The keys that a row sees: neither beyond the sequence nor outside the window.
template <auto T>
TANDEM_DEVICE KeyRange visible_keys(const ForwardParams& p, const TileCoords& t, const Row& row) {
  return band_of<T>(p, t).visible_keys(row.query, row.query);
}

// Of 32 columns, a bit for each of these. PTX ISA "bmsk".
TANDEM_DEVICE u32 bit_range(int begin, int count) {
  u32 bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(begin), "r"(count));
  return bits;
}
// x, or -infinity where bit n is not set.
TANDEM_DEVICE float masked_score(u32 bits, int n, float x) { return where_bit(bits, n, x, -kInfinity); }
