// The visible keys of a row, as a range and as bits of 32 columns.
#pragma once
#include "device/row.cuh"

// The keys that a row sees: inside the sequence and the window.
template <auto T>
TANDEM_DEVICE KeyRange visible_keys(const ForwardParams& p, const TileCoords& t, const Row& row) {
  return band_of<T>(p, t).visible_keys(row.query, row.query);
}

// Sets `count` bits from `begin` on, clamped to 32 columns. PTX ISA "bmsk".
TANDEM_DEVICE u32 bit_range(int begin, int count) {
  u32 bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(begin), "r"(count));
  return bits;
}
// Returns x, or -infinity if bit n is not set.
TANDEM_DEVICE float masked_score(u32 bits, int n, float x) { return where_bit(bits, n, x, -kInfinity); }
