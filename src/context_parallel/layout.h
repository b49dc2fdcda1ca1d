// The tokens that each rank owns: a permutation between (document, position) and (rank, local index).
//
// A rank's shard holds its tokens in ascending (document, position) order. The owners of 8 tokens on 2 ranks:
//
//     contiguous    00001111    cuts of the packed sequence
//     zigzag        00111100    cuts of the packed sequence
//     per document  00111100    a zigzag in each document
//     striped       01010101    in each document; with chunks, of whole chunks
//     balanced      00111100    cuts that give each rank the same tokens and the same visible pairs
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "context_parallel/visible_pairs.h"

namespace tandem::context_parallel {

enum class LayoutKind : uint8_t { contiguous, zigzag, per_document, striped, balanced };

const char* name_of(LayoutKind kind);

// A run of tokens that one rank owns.
struct Shard {
  TokenRange tokens;
  int32_t rank = 0;
  int64_t first = 0;  // local index of the first token
};

struct TokenPlace {
  int32_t rank = 0;
  int64_t local = 0;
};

struct TokenPosition {
  int32_t document = 0;
  int64_t position = 0;
};

// The tokens [begin, end) of the packed sequence belong to a rank.
struct PackedCut {
  int64_t begin = 0, end = 0;
  int32_t rank = 0;
};

// The lengths of documents as documents + 1 prefix sums, and the positions at which they may be cut.
struct PackedTokens {
  std::span<const int64_t> starts;
  int64_t chunk = 0;  // 0, or cuts lie at multiples of chunk in each document

  int64_t total() const { return starts.back(); }
  // Returns the possible cut next to a position of the packed sequence.
  int64_t nearest_cut(int64_t packed) const;
};

// Nothing is stored for each document and rank, so that a layout costs as much as its cuts.
class ShardLayout {
 public:
  ShardLayout() = default;
  // For a balanced layout the caller computes the cuts.
  ShardLayout(LayoutKind kind, int32_t ranks, const PackedTokens& tokens, std::vector<PackedCut> balanced);

  // The runs of tokens of a rank, in the order of its shard. With chunks each run is one chunk.
  std::vector<Shard> shards(int32_t rank) const;

  int32_t ranks() const { return ranks_; }
  int64_t tokens(int32_t rank) const;  // rows of the rank's tensors

  // The permutation for single tokens, in time linear in the shards of a rank.
  TokenPlace place(int32_t document, int64_t position) const;
  TokenPosition token(int32_t rank, int64_t local) const;

 private:
  int32_t owner(int32_t document, int64_t position) const;
  // Calls visit(tokens) for runs of a rank, where neighbours may touch.
  template <class Visit>
  void for_each_run(int32_t rank, Visit&& visit) const;
  template <class Visit>
  void for_each_run_of(int32_t document, int32_t rank, Visit&& visit) const;

  LayoutKind kind_ = LayoutKind::contiguous;
  int32_t ranks_ = 0;
  int64_t chunk_ = 0;
  std::vector<int64_t> starts_;
  std::vector<PackedCut> cuts_;  // by rank, then by begin; empty if each document is cut
  std::vector<size_t> rank_begin_;
};

}  // namespace tandem::context_parallel
