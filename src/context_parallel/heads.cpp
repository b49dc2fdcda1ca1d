#include "context_parallel/heads.h"

#include <algorithm>

namespace tandem::context_parallel {

FixedVector<HeadRun, 3> head_runs(int64_t heads_q, int64_t heads_k, int32_t ranks, int32_t rank) {
  FixedVector<HeadRun, 3> runs;
  const int64_t group = heads_k > 0 ? heads_q / heads_k : 1;
  const int64_t end = heads_q * (rank + 1) / ranks;
  for (int64_t begin = heads_q * rank / ranks; begin < end;) {
    const int64_t key_head = begin / group;
    // A run is a part of one group, or whole groups.
    int64_t next = std::min(end, (key_head + 1) * group);
    if (begin % group == 0 && end - begin >= group) next = end / group * group;
    runs.push_back({begin, next, key_head, (next - 1) / group + 1});
    begin = next;
  }
  return runs;
}

}  // namespace tandem::context_parallel
