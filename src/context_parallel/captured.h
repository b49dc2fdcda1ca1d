// The gradients of the tensors that a score_mod reads. All ranks receive the same gradients, summed over all ranks.
//
// Every step adds to all elements. Without chunks a rank has one sum, and the ranks' sums are added in their order.
// With chunks a step has one sum for each key head, so that the execution by heads has the same bits. The key chunks of
// a query chunk follow the tree of merge_tree.h, and so do the query chunks of all documents. The sums of the key heads
// are added last.
#pragma once

#include <memory>
#include <vector>

#include "context_parallel/shard_call.h"
#include "context_parallel/tree_sum.h"

namespace tandem {
struct CapturedGradient;  // problem/bound_expression.h
}

namespace tandem::context_parallel {

class CapturedSums {
 public:
  // Moves the gradients out of the call's problem, so that only run() writes them.
  CapturedSums(ShardCall* call, bool by_heads);

  // Begins the backward of this call, which has the queries of a rank and all of its heads.
  Status begin(const ShardCall& call);
  // Runs a step of this call and adds its gradients.
  Status run(StepRunner& runner, const ContextStep& step, const Problem& p);

  // Sums the gradients of all ranks. Does nothing if the call has none.
  Status finish();

 private:
  // The rows of a message: of the cells that one rank sums, for each vector of cells.
  struct Slice {
    int64_t begin = 0, rows = 0;
  };

  bool is_wanted() const { return gradients_ != nullptr; }
  RowBuffer vectors(int64_t count) const;
  Status clear();
  void bind(RowBuffer& vectors, int64_t vector, Problem* p) const;
  Status add_chunk(int64_t chunk, RowBuffer value);
  std::vector<int64_t> chunks_of(int32_t rank) const;
  int64_t vectors_of(int32_t rank) const;
  Slice slice_of(int32_t rank) const;
  Status copy_part(int32_t rank, RowMemory* part);
  Status exchange(RowBuffer* whole);
  Status sum_parts(std::vector<RowMemory>& parts, RowBuffer* sum);
  Status add_vectors(const View& from, int64_t count, RowBuffer* sum) const;
  Status write(RowBuffer& whole) const;
  Status write(const CapturedGradient& gradient, std::byte* cells) const;

  const ShardCall& call_;
  std::shared_ptr<const BoundExpression> gradients_;  // null: not wanted
  bool by_heads_ = false;
  int64_t rows_ = 0;                       // rows of a vector of cells
  std::vector<int64_t> first_chunks_;      // each document's first chunk of queries
  RowBuffer sum_;                          // without chunks
  PlacedRuns queries_;                     // with chunks, as the rest
  std::vector<TreeSum<RowBuffer>> trees_;  // over the key chunks of each run of queries
  TreeSum<RowBuffer> chunks_;              // over the query chunks
};

}  // namespace tandem::context_parallel
