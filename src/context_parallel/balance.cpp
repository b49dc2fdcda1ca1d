#include "context_parallel/balance.h"

#include <bit>
#include <cstdlib>

namespace tandem::context_parallel {
namespace {

// Tokens that no rank owns yet, and the pairs before their begin and their end in the packed sequence.
struct OpenPiece {
  int64_t begin = 0, end = 0;
  int64_t begin_pairs = 0, end_pairs = 0;
};

// The open pieces in their order, as one sequence without gaps.
class OpenTokens {
 public:
  OpenTokens(const WorkCurve& work, const PackedTokens& packed) : work_(work), packed_(packed) {
    pieces_.push_back({0, packed.total(), 0, work.total()});
    sum_pieces();
  }

  int64_t tokens() const { return tokens_.back(); }
  int64_t pairs() const { return pairs_.back(); }

  // The pairs of the window [at, at + size).
  int64_t window(int64_t at, int64_t size) const { return before(at + size) - before(at); }

  // Moves the window [at, at + size) to `cuts`.
  void take(int64_t at, int64_t size, int32_t rank, std::vector<PackedCut>& cuts) {
    std::vector<OpenPiece> rest;
    rest.reserve(pieces_.size() + 1);
    for (size_t n = 0; n < pieces_.size(); ++n) {
      const OpenPiece& piece = pieces_[n];
      const auto cut = [&](int64_t offset) {
        const int64_t packed = piece.begin + std::clamp(offset - tokens_[n], int64_t{0}, piece.end - piece.begin);
        return std::clamp(packed_.nearest_cut(packed), piece.begin, piece.end);
      };
      const int64_t first = cut(at), last = cut(at + size);
      if (piece.begin < first) rest.push_back({piece.begin, first, piece.begin_pairs, pairs_before(piece, first)});
      if (first < last) cuts.push_back({first, last, rank});
      if (last < piece.end) rest.push_back({last, piece.end, pairs_before(piece, last), piece.end_pairs});
    }
    pieces_ = std::move(rest);
    sum_pieces();
  }

 private:
  int64_t pairs_before(const OpenPiece& piece, int64_t packed) const {
    if (packed == piece.begin) return piece.begin_pairs;
    return packed == piece.end ? piece.end_pairs : work_.before(packed);
  }

  int64_t before(int64_t at) const {
    if (at >= tokens()) return pairs();
    const auto n = static_cast<size_t>(std::upper_bound(tokens_.begin(), tokens_.end(), at) - tokens_.begin()) - 1;
    const OpenPiece& piece = pieces_[n];
    return pairs_[n] + pairs_before(piece, piece.begin + at - tokens_[n]) - piece.begin_pairs;
  }

  void sum_pieces() {
    tokens_.assign(1, 0);
    pairs_.assign(1, 0);
    for (const OpenPiece& p : pieces_) {
      tokens_.push_back(tokens_.back() + p.end - p.begin);
      pairs_.push_back(pairs_.back() + p.end_pairs - p.begin_pairs);
    }
  }

  const WorkCurve& work_;
  const PackedTokens& packed_;
  std::vector<OpenPiece> pieces_;
  std::vector<int64_t> tokens_, pairs_;  // open ones before each piece and at the end
};

// Returns a position strictly between low and high, near the zero of the line through both excesses. Integers give the
// same result on every machine.
int64_t interpolate(int64_t low, int64_t high, int64_t low_excess, int64_t high_excess) {
  auto a = static_cast<uint64_t>(std::abs(low_excess)), b = static_cast<uint64_t>(std::abs(high_excess));
  const int shift = std::max(0, static_cast<int>(std::bit_width(a + b)) - 31);
  a >>= shift;
  b >>= shift;
  if (a + b == 0) return low + (high - low) / 2;
  const int64_t distance = std::abs(high - low);
  const int64_t step =
      std::clamp(distance * static_cast<int64_t>(a) / static_cast<int64_t>(a + b), int64_t{1}, distance - 1);
  return high > low ? low + step : low - step;
}

// Returns the begin of a window of `size` tokens with about `target` pairs. The last tokens, then the first ones, are
// preferred if they have from `least` to `most` pairs, because they add only one cut.
int64_t find_window(const OpenTokens& open, int64_t size, int64_t target, int64_t least, int64_t most) {
  const int64_t enough = target / 256;
  const auto excess = [&](int64_t at) { return open.window(at, size) - target; };
  int64_t high = open.tokens() - size, high_excess = excess(high);
  if (least <= target + high_excess && target + high_excess <= most) return high;
  int64_t low = 0, low_excess = excess(low);
  if (least <= target + low_excess && target + low_excess <= most) return low;
  // Windows that tile the sequence have pairs on both sides of their mean, or equal pairs.
  for (int64_t at = size; (low_excess < 0) == (high_excess < 0) && at + size <= open.tokens(); at += size) {
    high = at;
    high_excess = excess(at);
  }
  int64_t best = std::abs(high_excess) < std::abs(low_excess) ? high : low;
  int64_t best_excess = std::min(std::abs(low_excess), std::abs(high_excess));
  for (bool halve = false; best_excess > enough && std::abs(high - low) > 1; halve = !halve) {
    const int64_t middle = halve ? low + (high - low) / 2 : interpolate(low, high, low_excess, high_excess);
    const int64_t middle_excess = excess(middle);
    if (std::abs(middle_excess) < best_excess) {
      best = middle;
      best_excess = std::abs(middle_excess);
    }
    if ((middle_excess < 0) == (low_excess < 0)) {
      low = middle;
      low_excess = middle_excess;
    } else {
      high = middle;
      high_excess = middle_excess;
    }
  }
  return best;
}

}  // namespace

WorkCurve::WorkCurve(std::span<const int64_t> starts, std::span<const int64_t> k_lens,
                     std::span<const DocumentMask> masks)
    : starts_(starts), k_lens_(k_lens), masks_(masks) {
  pairs_.reserve(starts.size());
  pairs_.push_back(0);
  for (size_t d = 0; d < k_lens.size(); ++d) {
    const int64_t q_len = starts[d + 1] - starts[d];
    if (const BlockMask* blocks = masks[d].blocks; blocks != nullptr) {
      row_begin_.push_back(row_pairs_.size());
      row_pairs_.push_back(0);
      for (int64_t q = 0; q < q_len; q += blocks->block_q) {
        const TokenRange rows{0, 1, q, std::min(blocks->block_q, q_len - q)};
        row_pairs_.push_back(row_pairs_.back() + visible_rect(masks[d], rows, {0, 1, 0, k_lens[d]}).pairs);
      }
    }
    pairs_.push_back(pairs_.back() + in_document(d, q_len));
  }
  while (starts_.back() >> bucket_bits_ > static_cast<int64_t>(starts_.size())) ++bucket_bits_;
  size_t d = 0;
  for (int64_t bucket = 0; bucket << bucket_bits_ < starts_.back(); ++bucket) {
    while (starts_[d + 1] <= bucket << bucket_bits_) ++d;
    bucket_document_.push_back(static_cast<int32_t>(d));
  }
}

int64_t WorkCurve::before(int64_t packed) const {
  if (packed >= starts_.back()) return total();
  const size_t d = document_at(packed);
  return pairs_[d] + in_document(d, packed - starts_[d]);
}

size_t WorkCurve::document_at(int64_t packed) const {
  const auto bucket = static_cast<size_t>(packed >> bucket_bits_);
  const auto first = starts_.begin() + bucket_document_[bucket] + 1;
  const auto last =
      bucket + 1 < bucket_document_.size() ? starts_.begin() + bucket_document_[bucket + 1] + 1 : starts_.end();
  return static_cast<size_t>(std::upper_bound(first, last, packed) - starts_.begin()) - 1;
}

int64_t WorkCurve::in_document(size_t document, int64_t queries) const {
  const DocumentMask& mask = masks_[document];
  if (mask.blocks == nullptr) return count_pairs(mask.band, {0, 1, 0, queries}, k_lens_[document]);
  const int64_t row = queries / mask.blocks->block_q, begin = row * mask.blocks->block_q;
  const int64_t rows = row_pairs_[row_begin_[document] + static_cast<size_t>(row)];
  if (begin == queries) return rows;
  return rows + visible_rect(mask, {0, 1, begin, queries - begin}, {0, 1, 0, k_lens_[document]}).pairs;
}

std::vector<PackedCut> balanced_cuts(const WorkCurve& work, int32_t ranks, const PackedTokens& tokens) {
  std::vector<PackedCut> cuts;
  cuts.reserve(2 * static_cast<size_t>(ranks));
  OpenTokens open(work, tokens);
  const int64_t mean = open.pairs() / ranks;
  for (int32_t rank = ranks - 1; rank >= 0 && open.tokens() > 0; --rank) {
    const int64_t size = ceil_div(open.tokens(), rank + 1), target = open.pairs() / (rank + 1);
    // A rank with less than the target raises the target of the other ranks, which must stay near the mean.
    const int64_t least = target <= mean + mean / 64 ? target - target / 64 : target, most = mean + mean / 32;
    open.take(rank == 0 ? 0 : find_window(open, size, target, least, most), size, rank, cuts);
  }
  return cuts;
}

}  // namespace tandem::context_parallel
