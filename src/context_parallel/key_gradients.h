// Gradients of keys and values, which return to the rank that owns the keys as float32 parts.
//
// Without chunks a part has the rows of the keys that traveled, and the owner adds parts by round. With chunks a part
// is a list of nodes of the tree over the chunks of queries, for each chunk of keys.
#pragma once

#include <map>
#include <utility>

#include "context_parallel/chunk_leaves.h"
#include "context_parallel/key_exchange.h"
#include "context_parallel/tree_sum.h"

namespace tandem::context_parallel {

struct KeyGradientRows {
  RowBuffer dk, dv;

  KeyGradientRows() = default;
  KeyGradientRows(const ShardCall& call, int64_t rows)
      : dk(call.engine, kSumType, call.k_shape(rows)), dv(call.engine, kSumType, call.v_shape(rows)) {}
  Status clear();
  Status copy(const ShardCall& call, const View& to_dk, const View& to_dv);
  Status add(const ShardCall& call, const View& from_dk, const View& from_dv);
};

// Gradients of a peer's keys in one round, summed over the steps of this rank.
class RoundGradients {
 public:
  RoundGradients(const ShardCall& call, const RoundKeys& keys);
  Status clear() { return sums_.clear(); }

  // Sets the outputs dk and dv of a step's problem. After the call of the engine, add() adds them to the sums.
  Status bind(const ContextStep& step, Problem* p);
  Status add(const ContextStep& step);

  // Returns the sums in the form that OwnKeyGradients reads.
  Status message(RowMemory* bytes);

 private:
  const ShardCall& call_;
  const PlacedRuns& places_;
  RowMemory sums_;        // without chunks: rows of dk, then rows of dv
  KeyGradientRows leaf_;  // with chunks: of the present step
  std::map<std::pair<int32_t, int64_t>, TreeSum<KeyGradientRows>> trees_;
};

// Gradients of the rank's own keys, summed over the parts of all ranks.
class OwnKeyGradients {
 public:
  explicit OwnKeyGradients(const ShardCall& call);

  // The size of the part that a rank sends, and the addition of this part.
  RowMemory message_from(int32_t rank) const;
  Status add(int32_t rank, RowMemory& message);
  Status clear() { return sums_.clear(); }

  // Converts the sums to the types of the results.
  Status finish();

 private:
  Status add_nodes(int32_t rank, RowMemory& message);

  const ShardCall& call_;
  PlacedRuns keys_;
  KeyGradientRows sums_;
  KeyChunks chunks_;
  std::map<std::pair<int32_t, int64_t>, TreeSum<KeyGradientRows>> trees_;
};

}  // namespace tandem::context_parallel
