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

HeadShare share_of(const ContextPlan& plan, int64_t heads_q, int64_t heads_k, int32_t rank) {
  const int32_t ranks = plan.ranks();
  if (plan.chunk() == 0) return {head_runs(heads_q, heads_k, ranks, rank)};
  const int64_t begin = heads_k * rank / ranks, end = heads_k * (rank + 1) / ranks;
  const int64_t group = heads_k > 0 ? heads_q / heads_k : 1;
  HeadShare share;
  if (begin < end) share.runs.push_back({begin * group, end * group, begin, end});
  return share;
}

Problem heads_of(Problem p, const HeadRun& run) {
  p.heads_q = run.q_end - run.q_begin;
  p.heads_k = run.k_end - run.k_begin;
  for (View* v : {&p.q, &p.out, &p.lse, &p.dout, &p.dlse, &p.dq}) *v = from_head(*v, run.q_begin);
  for (View* v : {&p.k, &p.v, &p.dk, &p.dv}) *v = from_head(*v, run.k_begin);
  p.alibi_slopes = from_head(p.alibi_slopes, run.q_begin);
  for (BiasView* bias : {&p.bias, &p.dbias}) {
    if (!*bias || bias->shape[1] == 1) continue;
    bias->data += run.q_begin * bias->stride[1] * size_of(bias->dtype);
    bias->shape[1] = p.heads_q;
    if (p.heads_q == 1) bias->stride[1] = 0;
  }
  return p;
}

}  // namespace tandem::context_parallel
