#include "context_parallel/chunk_leaves.h"

#include <algorithm>

#include "context_parallel/shard_call.h"

namespace tandem::context_parallel {

std::vector<std::vector<int64_t>> key_leaves(const ContextPlan& plan, int32_t rank) {
  const PlacedRuns queries(plan.queries().shards(rank));
  std::vector<std::vector<int64_t>> leaves(queries.runs().size());
  for (const ContextStep& s : plan.steps(rank)) leaves[queries.find(s.q)].push_back(s.key_order);
  for (std::vector<int64_t>& chunks : leaves) std::sort(chunks.begin(), chunks.end());
  return leaves;
}

KeyChunks query_leaves(const ContextPlan& plan, int32_t k_rank) {
  KeyChunks chunks;
  for (const ContextStep& s : plan.key_steps(k_rank)) {
    QueryLeaves& leaves = chunks[{s.k.document, s.key_order}];
    leaves.all.push_back(s.query_order);
    leaves.by_rank[s.rank].push_back(s.query_order);
  }
  for (auto& [key, leaves] : chunks) {
    std::sort(leaves.all.begin(), leaves.all.end());
    for (auto& [rank, own] : leaves.by_rank) std::sort(own.begin(), own.end());
  }
  return chunks;
}

}  // namespace tandem::context_parallel
