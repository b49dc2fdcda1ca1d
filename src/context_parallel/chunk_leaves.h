// The leaves of the sums over chunks: the chunks with visible pairs.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "context_parallel/plan.h"

namespace tandem::context_parallel {

// For each run of a rank's queries the numbers of the key chunks that it sees, ascending.
std::vector<std::vector<int64_t>> key_leaves(const ContextPlan& plan, int32_t rank);

// The query chunks that see one key chunk: on all ranks, and on each rank that has some. Numbers ascend.
struct QueryLeaves {
  std::vector<int64_t> all;
  std::map<int32_t, std::vector<int64_t>> by_rank;
};

// The query chunks of each key chunk of a rank, by document and number of the key chunk.
using KeyChunks = std::map<std::pair<int32_t, int64_t>, QueryLeaves>;
KeyChunks query_leaves(const ContextPlan& plan, int32_t k_rank);

}  // namespace tandem::context_parallel
