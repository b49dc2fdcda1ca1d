// Positions of the operands of tcgen05.mma in tensor memory: the data path layouts A to G. Each lane of the data path
// computes a lane of D from the same lanes of A and of the scale factors. The layouts differ in the row and columns of
// the product that a lane holds.
#pragma once

#include <cstdint>

#include "vgpu/src/units/tcgen05.h"

namespace tandem::vgpu::units {

inline constexpr int kAColumns = 8;  // A's 32 bytes of each row

// A part of the product with neighbouring rows in neighbouring lanes.
struct DatapathPart {
  int cta = 0;  // index in the group
  int lane = 0, lanes = 0;
  int row = 0;                  // row of A in this block
  int column = 0, columns = 0;  // columns of the product, from D's first column
};

// Returns true for M = 64 without .ws (layout F), which uses every second group of 16 lanes.
inline bool is_half_datapath(const Tmma& mma) { return mma.form.group == 1 && mma.m == 64 && !mma.form.ws; }

// Returns the number of column blocks, which are in different lanes (layouts B, E and G).
inline int column_blocks(const Tmma& mma) {
  if (mma.form.group == 2) return mma.m == 128 ? 2 : 1;
  if (!mma.form.ws) return 1;
  return 128 / mma.m;
}
inline int d_columns(const Tmma& mma) { return mma.n / column_blocks(mma); }

// Calls f(part) for all parts. With quadrants each part is within 32 lanes, because scale factors differ between
// quadrants.
template <class F>
void for_each_part(const Tmma& mma, bool quadrants, F&& f) {
  const int blocks = column_blocks(mma), rows = mma.m / mma.form.group;
  const int base = static_cast<int>(mma.operands.d >> 16);
  for (int cta = 0; cta < mma.form.group; ++cta) {
    if (is_half_datapath(mma)) {
      for (int i = 0; i < 4; ++i) f(DatapathPart{cta, base + 32 * i, 16, 16 * i, 0, mma.n});
      continue;
    }
    const int lanes = quadrants ? 32 : rows;
    for (int block = 0; block < blocks; ++block)
      for (int row = 0; row < rows; row += lanes)
        f(DatapathPart{cta, block * rows + row, lanes, row, block * mma.n / blocks, mma.n / blocks});
  }
}

// A word holds four factors of a row. The lanes of a quadrant hold 32 rows (or columns of B), and the next column holds
// the next 32. With two blocks of columns the factors of B are in the columns of their block.
inline int scale_columns(const Tmma& mma, bool is_a) {
  const int lines = is_a ? mma.m / mma.form.group : mma.n / column_blocks(mma);
  return (lines + 31) / 32;
}

}  // namespace tandem::vgpu::units
