// Cuts the packed queries so that each rank has the same tokens and the same visible pairs, for any mask.
//
// Windows of tokens / ranks queries tile the sequence, and their mean work is the mean of all ranks. Some window has
// exactly the mean work, because the work of a window changes gradually with its position. A rank gets this window, the
// gap closes, and the rest is divided in the same way. A window adds at most two cuts. A causal document on 3 ranks
// becomes a zigzag:
//
//     rank 0   rank 1   rank 2 rank 2   rank 1   rank 0
#pragma once

#include <span>
#include <vector>

#include "context_parallel/layout.h"

namespace tandem::context_parallel {

// The visible pairs of all queries before a position of the packed sequence.
class WorkCurve {
 public:
  // starts: documents + 1 prefix sums of query lengths; k_lens and masks: of each document.
  WorkCurve(std::span<const int64_t> starts, std::span<const int64_t> k_lens, std::span<const DocumentMask> masks);

  int64_t before(int64_t packed) const;
  int64_t total() const { return pairs_.back(); }

 private:
  size_t document_at(int64_t packed) const;
  int64_t in_document(size_t document, int64_t queries) const;

  std::span<const int64_t> starts_, k_lens_;
  std::span<const DocumentMask> masks_;
  std::vector<int64_t> pairs_;      // before each document
  std::vector<int64_t> row_pairs_;  // block mask: before each row of blocks, in its document
  std::vector<size_t> row_begin_;
  std::vector<int32_t> bucket_document_;  // document of every 2^bucket_bits_-th token
  int bucket_bits_ = 0;
};

std::vector<PackedCut> balanced_cuts(const WorkCurve& work, int32_t ranks, const PackedTokens& tokens);

}  // namespace tandem::context_parallel
