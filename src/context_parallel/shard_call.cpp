#include "context_parallel/shard_call.h"

#include <tuple>

namespace tandem::context_parallel {
PlacedRuns::PlacedRuns(const std::vector<TokenRange>& ranges) {
  int64_t first = 0;
  for (const TokenRange& range : ranges) {
    runs_.push_back({range, 0, first});
    first += range.count;
  }
}

size_t PlacedRuns::find(const TokenRange& range) const {
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), range, [](const TokenRange& r, const Shard& s) {
    return std::tie(r.document, r.begin) < std::tie(s.tokens.document, s.tokens.begin);
  });
  return static_cast<size_t>(after - runs_.begin()) - 1;
}

int64_t PlacedRuns::row(const TokenRange& range) const {
  const Shard& run = runs_[find(range)];
  return run.first + (range.begin - run.tokens.begin) / run.tokens.stride;
}

Problem StepRunner::problem_of(const ContextStep& step, int64_t q_row, const View& k, const View& v) const {
  Problem p = call_.problem;
  p.batch = 1;
  p.seqlen_q = p.total_q = step.q.count;
  p.seqlen_k = p.total_k = step.k.count;
  p.k = k;
  p.v = v;
  for (View* view : {&p.q, &p.out, &p.lse, &p.dout, &p.dlse}) *view = from_row(*view, q_row);
  p.dq = p.dk = p.dv = {};
  p.sink = p.dsink = {};
  if (p.alibi_slopes) p.alibi_slopes.data += step.q.document * p.alibi_slopes.batch * size_of(p.alibi_slopes.dtype);
  p.bottom_right = false;
  p.diagonal_offset = clamp_diagonal(step.diagonal);
  const PackedDocument& document = call_.plan->documents()[static_cast<size_t>(step.q.document)];
  p.placement.q_first = step.q.begin;
  p.placement.k_first = step.k.begin;
  p.placement.stride = step.q.stride;
  p.placement.sequence = step.q.document;
  p.placement.seqlen_q = document.q_len;
  p.placement.seqlen_k = document.k_len;
  p.window_left = step.window_left;
  p.window_right = step.window_right;
  return p;
}

Status StepRunner::run(const Problem& problem) {
  if (problem.heads_q == 0) return {};
  const auto bytes = static_cast<int64_t>(call_.engine.engine->workspace_size(problem));
  if (workspace_.size() < bytes) workspace_ = RowMemory(call_.engine, bytes);
  const tandem_attention_args no_tensors{};
  return call_.engine.engine->run(problem,
                                  {no_tensors, problem.pass, workspace_.data(), static_cast<size_t>(workspace_.size())},
                                  call_.engine.stream);
}

}  // namespace tandem::context_parallel
