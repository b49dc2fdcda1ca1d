#include "context_parallel/visible_pairs.h"

namespace tandem::context_parallel {
namespace {

// Shrinks a rectangle of indices to the band and counts its pairs.
VisibleRect shrink(const KeyBand& band, VisibleRect r) {
  if (band.low > band.high || r.q_begin >= r.q_end || r.k_begin >= r.k_end) return {};
  const VisibleRect whole = r;
  r.k_begin = std::max(whole.k_begin, whole.q_begin + band.low);
  r.k_end = std::min(whole.k_end, whole.q_end + band.high);
  r.q_begin = std::max(whole.q_begin, whole.k_begin - band.high);
  r.q_end = std::min(whole.q_end, whole.k_end - band.low);
  if (r.q_begin >= r.q_end || r.k_begin >= r.k_end) return {};
  const int64_t rows = r.q_end - r.q_begin, keys = r.k_end - r.k_begin, first = r.q_begin - r.k_begin;
  r.pairs = clamped_sum(first + band.high + 1, 1, rows, keys) - clamped_sum(first + band.low, 1, rows, keys);
  return r;
}

// The indices of a range whose positions lie in [begin, end).
std::pair<int64_t, int64_t> indices(const TokenRange& r, int64_t begin, int64_t end) {
  return {std::clamp(ceil_div(begin - r.begin, r.stride), int64_t{0}, r.count),
          std::clamp(ceil_div(end - r.begin, r.stride), int64_t{0}, r.count)};
}

void add(const VisibleRect& part, VisibleRect& sum) {
  if (part.pairs == 0) return;
  if (sum.pairs == 0) {
    sum = part;
    return;
  }
  sum = {std::min(sum.q_begin, part.q_begin), std::max(sum.q_end, part.q_end), std::min(sum.k_begin, part.k_begin),
         std::max(sum.k_end, part.k_end), sum.pairs + part.pairs};
}

}  // namespace

VisibleRect visible_rect(const DocumentMask& mask, const TokenRange& q, const TokenRange& k) {
  const KeyBand band = mask.band.local(q, k);
  const VisibleRect whole = shrink(band, {0, q.count, 0, k.count, 0});
  if (mask.blocks == nullptr || whole.pairs == 0) return whole;
  const BlockMask& m = *mask.blocks;
  VisibleRect sum;
  for (int64_t row = q.position(whole.q_begin) / m.block_q; row * m.block_q < q.end(); ++row) {
    const auto [q_begin, q_end] = indices(q, row * m.block_q, (row + 1) * m.block_q);
    const int32_t* const end = m.key_blocks.data() + m.row_begin[static_cast<size_t>(mask.first_row + row + 1)];
    const int32_t* block = m.key_blocks.data() + m.row_begin[static_cast<size_t>(mask.first_row + row)];
    block = std::lower_bound(block, end, k.begin / m.block_k);
    for (; block < end && *block * m.block_k < k.end(); ++block) {
      const auto [k_begin, k_end] = indices(k, *block * m.block_k, (*block + 1) * m.block_k);
      add(shrink(band, {q_begin, q_end, k_begin, k_end, 0}), sum);
    }
  }
  return sum;
}

}  // namespace tandem::context_parallel
