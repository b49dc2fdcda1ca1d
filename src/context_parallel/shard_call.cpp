#include "context_parallel/shard_call.h"

#include <algorithm>
#include <tuple>

#include "base/text.h"
#include "context_parallel/bias.h"

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

Problem StepRunner::problem_of(const ContextStep& step, int64_t q_row, const View& k, const View& v) {
  Problem p = call_.problem;
  p.batch = 1;
  p.seqlen_q = p.total_q = step.q.count;
  p.seqlen_k = p.total_k = step.k.count;
  p.k = k;
  p.v = v;
  for (View* view : {&p.q, &p.out, &p.lse, &p.dout, &p.dlse}) *view = from_row(*view, q_row);
  p.dq = p.dk = p.dv = {};
  p.sink = p.dsink = {};
  p.bias = bias_part(p.bias, step, q_row);
  p.dbias = {};
  if (p.alibi_slopes) p.alibi_slopes.data += step.q.document * p.alibi_slopes.batch * size_of(p.alibi_slopes.dtype);
  p.bottom_right = false;
  p.diagonal_offset = clamp_diagonal(step.diagonal);
  p.window_left = step.window_left;
  p.window_right = step.window_right;
  place_ = place_of(step);
  if (call_.plan->block_mask()) p.block_mask = blocks_.list(*call_.plan, step);
  return p;
}

tandem_place StepRunner::place_of(const ContextStep& step) const {
  const PackedDocument& document = call_.plan->documents()[static_cast<size_t>(step.q.document)];
  const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
  return {step.q.document,
          number(step.q.begin),
          number(step.k.begin),
          number(step.q.stride),
          number(document.q_len),
          number(document.k_len),
          number(clamp_diagonal(document.diagonal)),
          number(call_.first_head),
          number(call_.heads_q)};
}

Status StepRunner::run(Problem problem, int64_t first_head) {
  if (problem.heads_q == 0) return {};
  const auto bytes = static_cast<int64_t>(call_.engine.engine->workspace_size(problem));
  if (problem.block_mask) TANDEM_TRY(blocks_.write(call_.engine, &problem.block_mask));
  place_.first_head = static_cast<int32_t>(call_.first_head + first_head);
  if (problem.placed) TANDEM_TRY(call_.engine.write(call_.places, &place_, sizeof place_));
  if (workspace_.size() < bytes) workspace_ = RowMemory(call_.engine, bytes);
  const tandem_attention_args no_tensors{};
  return call_.engine.engine->run(problem,
                                  {no_tensors, problem.pass, workspace_.data(), static_cast<size_t>(workspace_.size())},
                                  call_.engine.stream);
}

}  // namespace tandem::context_parallel
