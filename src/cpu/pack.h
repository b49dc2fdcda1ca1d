// Packs tiles: copies in the order that the product reads.
//
//   rows     [n][words]          A operand of q k^T and dout v^T: broadcast along head_dim
//   panel    [words][kPanel]     B operand: queries in lanes, head_dim along the product (a transpose)
//   columns  [k/pair][padded]    a tile whose rows are the product's k: A operand of p v (word = one column),
//            in panels of kPanel columns it is the B operand of the backward's products
//
// For MmaBF16 a word holds two neighbours along the product's k: of head_dim in rows and panel, of two keys or two
// queries in columns.
#pragma once

#include "cpu/gemm.h"

namespace tandem::cpu::TANDEM_TARGET {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

// The number of words along the product for n values.
template <class Mma>
constexpr int64_t words(int64_t n) {
  return (n + Mma::kPair - 1) / Mma::kPair;
}

// Packs one row as words; padded (in words) is a multiple of kLanes.
template <class T>
inline void row_words(const T* src, int64_t n, int64_t padded, float* dst) {
  load_row(src, n, padded, dst);
}
inline void row_words(const BF16* src, int64_t n, int64_t padded, uint32_t* dst) {
  std::memset(dst + n / 2, 0, static_cast<size_t>(padded - n / 2) * 4);
  std::memcpy(dst, src, static_cast<size_t>(n) * 2);
}

// Interleaves two rows: word c is (a[c], b[c]). b may be null (zeros).
inline void interleave_rows(const BF16* a, const BF16* b, int64_t n, int64_t padded, uint32_t* dst) {
  const hn::Rebind<uint16_t, FTag> half;
  int64_t c = 0;
  for (; b != nullptr && c + kLanes <= n; c += kLanes) {
    const auto lo = hn::PromoteTo(UTag(), hn::LoadU(half, reinterpret_cast<const uint16_t*>(a + c)));
    const auto hi = hn::PromoteTo(UTag(), hn::LoadU(half, reinterpret_cast<const uint16_t*>(b + c)));
    store(hn::Or(lo, hn::ShiftLeft<16>(hi)), dst + c);
  }
  for (; c < n; ++c) dst[c] = a[c].bits | (b != nullptr ? static_cast<uint32_t>(b[c].bits) << 16 : 0u);
  for (; c < padded; ++c) dst[c] = 0;
}

// Returns row r of a tile, or null beyond the last row. Packing reads rows this way.
template <class T>
struct RowSource {
  const T* const* pointer;  // one per row
  int64_t count;
};

// Packs columns: rows [0, count) of n values -> dst[words][column_stride]. With `panels`, column c lies in panel c /
// kPanel of panel_stride words.
template <class Mma, class T>
inline void pack_columns(RowSource<T> rows, int64_t n, typename Mma::Word* dst) {
  const int64_t padded = round_up(n, kLanes);
  for (int64_t r = 0; r < rows.count; r += Mma::kPair) {
    if constexpr (Mma::kPair == 1) {
      row_words(rows.pointer[r], n, padded, dst + r * padded);
    } else {
      interleave_rows(rows.pointer[r], r + 1 < rows.count ? rows.pointer[r + 1] : nullptr, n, padded,
                      dst + r / 2 * padded);
    }
  }
}

// The same in panels: dst[panel][word][kPanel], `capacity` words per panel. Words beyond the rows are not written.
template <class Mma, class T>
inline void pack_column_panels(RowSource<T> rows, int64_t n, int64_t capacity, typename Mma::Word* row_scratch,
                               typename Mma::Word* dst) {
  const int64_t padded = round_up(n, kPanel);
  for (int64_t r = 0; r < rows.count; r += Mma::kPair) {
    if constexpr (Mma::kPair == 1) {
      row_words(rows.pointer[r], n, padded, row_scratch);
    } else {
      interleave_rows(rows.pointer[r], r + 1 < rows.count ? rows.pointer[r + 1] : nullptr, n, padded, row_scratch);
    }
    for (int64_t c = 0; c < padded; c += kPanel) {
      auto* to = dst + (c / kPanel * capacity + r / Mma::kPair) * kPanel;
      store(load(row_scratch + c), to);
      store(load(row_scratch + c + kLanes), to + kLanes);
    }
  }
}

// Computes row *= scale, rounded once per value. The scale has twice float's precision.
inline void scale_row(float* row, int64_t padded, double scale) {
  const VF high = set(static_cast<float>(scale)), low = set(static_cast<float>(scale - static_cast<float>(scale)));
  for (int64_t c = 0; c < padded; c += kLanes) {
    const VF x = load(row + c);
    store(hn::MulAdd(x, high, hn::Mul(x, low)), row + c);
  }
}

// panel: up to kPanel rows of n values -> dst[round_up(words, 4)][kPanel]; lanes beyond the rows are zero. Words that
// are floats are scaled; other words are not. row_scratch: kPanel * round_up(words, kLanes) words.
template <class Mma, class T>
inline void pack_panel(RowSource<T> rows, int64_t n, double scale, typename Mma::Word* row_scratch,
                       typename Mma::Word* dst) {
  const int64_t w = words<Mma>(n), padded = round_up(w, kLanes < 4 ? 4 : kLanes);
  for (int64_t r = 0; r < rows.count; ++r) {
    row_words(rows.pointer[r], n, padded, row_scratch + r * padded);
    if constexpr (Mma::kPair == 1) {
      if (scale != 1.0) scale_row(row_scratch + r * padded, padded, scale);
    }
  }
  if (rows.count < kPanel)
    std::memset(row_scratch + rows.count * padded, 0, static_cast<size_t>((kPanel - rows.count) * padded) * 4);
  transpose(row_scratch, padded, kPanel, round_up(w, 4), dst, kPanel);
}

}  // namespace tandem::cpu::TANDEM_TARGET
