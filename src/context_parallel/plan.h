// The plan of one attention over several ranks: the tokens that each rank owns, and the steps of each rank.
//
// make_context_plan() turns documents, mask, ranks and layout into a plan by arithmetic on the host. Every rank
// computes the same plan from the same arguments. The steps of a rank cover its visible (query, key) pairs exactly
// once, and a step without visible pairs does not exist. execution.h executes a plan.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "context_parallel/layout.h"

namespace tandem::context_parallel {

inline constexpr int32_t kMaxRanks = 65536;
inline constexpr int64_t kMaxShards = int64_t{1} << 22;

// One packed sequence. Query i is at distance i + diagonal - j from key j, as in tandem.h.
struct PackedDocument {
  int64_t q_len = 0, k_len = 0;
  int64_t diagonal = 0;  // k_len - q_len aligns the last query with the last key
};

struct ContextProblem {
  std::span<const PackedDocument> documents;
  int64_t window_left = TANDEM_UNBOUNDED, window_right = TANDEM_UNBOUNDED;  // causal: window_right = 0
  BlockMask block_mask;
  int32_t ranks = 1;
  LayoutKind layout = LayoutKind::balanced;
  // 0, or the tokens of a chunk. With chunks, cuts and merges do not depend on the number of ranks.
  int64_t chunk = 0;
};

enum class StepMask : uint8_t { full, band, blocks };  // blocks: the block mask and the band

// Queries of one rank attend to keys of one rank.
struct ContextStep {
  TokenRange q, k;    // absolute positions
  int32_t rank = 0;   // owns the queries and computes the step
  int32_t peer = 0;   // owns the keys
  int32_t round = 0;  // iteration of a ring in which the keys arrive
  StepMask mask = StepMask::full;
  // The mask of a call whose rows count from 0 in q and in k. A bound that hides no key of the step is unbounded.
  int64_t diagonal = 0;
  int64_t window_left = TANDEM_UNBOUNDED, window_right = TANDEM_UNBOUNDED;
  // With chunks: the numbers of the chunks of keys and queries, which are the leaves of merge_tree.h. Without chunks:
  // the first positions of the shards.
  int64_t key_order = 0, query_order = 0;
  int64_t pairs = 0;  // visible pairs
};

// Keys that a rank receives from a peer.
struct KeyTransfer {
  TokenRange k;
  int32_t peer = 0, round = 0;
};

class ContextPlan {
 public:
  // The steps that q_rank computes with the keys of k_rank, by document, query and key.
  std::vector<ContextStep> steps_between(int32_t q_rank, int32_t k_rank) const;

  // All steps that a rank computes, and all steps that other ranks and itself compute with its keys, by round.
  std::vector<ContextStep> steps(int32_t rank) const;
  std::vector<ContextStep> key_steps(int32_t rank) const;

  // The rank whose keys a rank computes with in a round, and the reverse.
  int32_t peer(int32_t rank, int32_t round) const { return (rank - round + ranks()) % ranks(); }
  int32_t reader(int32_t rank, int32_t round) const { return (rank + round) % ranks(); }

  // The keys that a rank needs from other ranks, each once, by round, document and position.
  std::vector<KeyTransfer> transfers(int32_t rank) const;
  // The keys of k_rank that q_rank needs, each once, by document and position.
  std::vector<TokenRange> transfers_between(int32_t q_rank, int32_t k_rank) const;

  // The same documents, mask and chunks on one rank.
  ContextPlan on_one_rank() const;

  int32_t ranks() const { return queries_.ranks(); }
  int64_t chunk() const { return chunk_; }
  LayoutKind layout() const { return layout_; }
  const ShardLayout& queries() const { return queries_; }
  const ShardLayout& keys() const { return same_shards_ ? queries_ : keys_; }
  std::span<const PackedDocument> documents() const { return documents_; }
  const BlockMask& block_mask() const { return block_mask_; }
  DocumentMask mask_of(int32_t document) const;
  int64_t pairs(int32_t rank) const;  // visible pairs of the rank's queries

  // Equal on ranks that called make_context_plan() with equal arguments.
  uint64_t hash() const;

  // Refuses tensors whose rows are not the rank's shard.
  Status check_shard(int32_t rank, int64_t q_rows, int64_t k_rows) const;

 private:
  friend Status make_context_plan(const ContextProblem& problem, ContextPlan* plan);

  void append_steps(std::span<const Shard> q, std::span<const Shard> k, std::vector<ContextStep>& steps) const;
  ContextStep make_step(const Shard& q, const Shard& k, VisibleRect rect) const;

  std::vector<PackedDocument> documents_;
  std::vector<int64_t> first_rows_;  // each document's first row of blocks
  int64_t window_left_ = TANDEM_UNBOUNDED, window_right_ = TANDEM_UNBOUNDED;
  BlockMask block_mask_;
  LayoutKind layout_ = LayoutKind::contiguous;
  int64_t chunk_ = 0;
  bool same_shards_ = false;  // queries and keys have equal lengths in every document
  ShardLayout queries_, keys_;
};

// Checks the problem and computes its layout. The block mask's memory must outlive the plan.
Status make_context_plan(const ContextProblem& problem, ContextPlan* plan);

}  // namespace tandem::context_parallel
