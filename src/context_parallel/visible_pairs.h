// Ranges of tokens, and the (query, key) pairs that a mask shows in two ranges. Closed formulas count the pairs.
//
// Positions count from 0 in a document and are absolute: a range of a shard keeps the positions of its tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace tandem::context_parallel {

inline constexpr int64_t kMaxTokens = int64_t{1} << 31;  // sum of lengths: pairs fit in int64_t
inline constexpr int64_t kFar = int64_t{1} << 40;        // beyond every position and diagonal

constexpr int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

// The tokens at begin, begin + stride, ... of one document.
struct TokenRange {
  int32_t document = 0, stride = 1;
  int64_t begin = 0, count = 0;

  constexpr int64_t position(int64_t i) const { return begin + i * stride; }
  constexpr int64_t end() const { return position(count - 1) + 1; }  // count > 0
  constexpr TokenRange part(int64_t first, int64_t size) const { return {document, stride, position(first), size}; }
  bool operator==(const TokenRange&) const = default;
};

// Query i sees key j if low <= j - i <= high. Causal: low = -kFar, high = diagonal offset.
struct KeyBand {
  int64_t low = -kFar, high = kFar;

  // The same band for indices into two ranges of one stride instead of positions.
  constexpr KeyBand local(const TokenRange& q, const TokenRange& k) const {
    const int64_t shift = q.begin - k.begin;
    if (q.stride == 1) return {shift + low, shift + high};
    return {ceil_div(shift + low, q.stride), floor_div(shift + high, q.stride)};
  }
};

// For each block of queries the blocks of keys that are computed. The rows of all documents follow each other: document
// d has ceil(q_len / block_q) rows. Blocks ascend in a row. In full ones mask_mod is not evaluated. The memory must
// outlive the plan.
struct BlockMask {
  int64_t block_q = 0, block_k = 0;     // 0: no block mask
  std::span<const int64_t> row_begin;   // rows + 1 offsets into key_blocks
  std::span<const int32_t> key_blocks;  // counted wholly, even if a mask_mod hides a part
  std::span<const uint8_t> full;        // empty, or nonzero for full key_blocks

  explicit operator bool() const { return block_q > 0; }
};

// The mask of one document.
struct DocumentMask {
  KeyBand band;
  const BlockMask* blocks = nullptr;
  int64_t first_row = 0;  // the document's first row of blocks
};

// A rectangle of indices into two ranges, and its visible pairs. The bounds enclose every visible pair.
struct VisibleRect {
  int64_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
  int64_t pairs = 0;
};

// Returns the sum of clamp(first + i * step, 0, most) over i in [0, n), for n and most up to kMaxTokens and step > 0.
constexpr int64_t clamped_sum(int64_t first, int64_t step, int64_t n, int64_t most) {
  // Divisions by 1 would take most of the time of a plan.
  const int64_t a = std::clamp(step == 1 ? -first : ceil_div(-first, step), int64_t{0}, n);
  const int64_t b = std::clamp(step == 1 ? most - first : ceil_div(most - first, step), a, n);
  const int64_t middle = a < b ? (b - a) * (2 * first + step * (a + b - 1)) / 2 : 0;
  return middle + (n - b) * most;
}

// Counts the visible pairs of a query range of any stride with the keys [0, k_len).
constexpr int64_t count_pairs(const KeyBand& band, const TokenRange& q, int64_t k_len) {
  if (band.low > band.high) return 0;
  return clamped_sum(q.begin + band.high + 1, q.stride, q.count, k_len) -
         clamped_sum(q.begin + band.low, q.stride, q.count, k_len);
}

// Counts the visible pairs of two ranges of one stride, and shrinks the rectangle to the rows and keys that see or are
// seen.
VisibleRect visible_rect(const DocumentMask& mask, const TokenRange& q, const TokenRange& k);

}  // namespace tandem::context_parallel
