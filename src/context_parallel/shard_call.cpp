#include "context_parallel/shard_call.h"

#include <tuple>

namespace tandem::context_parallel {
namespace {

// A tensor of rows in the C interface's form: (1, rows, heads, dim).
struct RowTensor {
  RowTensor(const View& v, const RowShape& s) : shape{1, s.rows, s.heads, s.dim}, strides{0, v.row, v.head, 1} {
    tensor = {v.data, {TANDEM_CPU, 0}, 4, dtype_of(v.dtype), shape, strides, 0};
  }
  // The log-sum-exp: (1, heads, rows).
  static RowTensor of_lse(const View& v, const RowShape& s) {
    RowTensor t(v, s);
    t.shape[1] = s.heads, t.strides[1] = v.head;
    t.shape[2] = s.rows, t.strides[2] = v.row;
    t.tensor.ndim = 3;
    return t;
  }
  const tandem_tensor* get() {
    tensor.shape = shape;
    tensor.strides = strides;
    return &tensor;
  }

  static tandem_dtype dtype_of(DType t) {
    const auto bits = static_cast<uint8_t>(8 * size_of(t));
    return {static_cast<uint8_t>(t == DType::bf16 ? TANDEM_BFLOAT : TANDEM_FLOAT), bits, 1};
  }

  int64_t shape[4], strides[4];
  tandem_tensor tensor;
};

}  // namespace

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
  const size_t bytes = call_.engine->workspace_size(problem);
  if (workspace_.size() < bytes) workspace_.resize(bytes);
  const tandem_attention_args no_tensors{};
  return call_.engine->run(problem, {no_tensors, problem.pass, workspace_.data(), workspace_.size()}, nullptr);
}

Status StepRunner::merge(std::span<const OutPart> parts, const OutPart& result, const RowShape& shape) {
  if (shape.rows == 0 || shape.heads == 0) return {};
  MergeProblem m;
  m.parts = std::ssize(parts);
  m.batch = 1;
  m.seqlen = shape.rows;
  m.heads = shape.heads;
  m.head_dim = shape.dim;
  m.out = result.out;
  m.lse = result.lse;
  std::vector<RowTensor> tensors;
  std::vector<const tandem_tensor*> outs, lses;
  for (const OutPart& part : parts) {
    tensors.emplace_back(part.out, shape);
    tensors.push_back(RowTensor::of_lse(part.lse, shape));
  }
  for (size_t n = 0; n < tensors.size(); n += 2) {
    outs.push_back(tensors[n].get());
    lses.push_back(tensors[n + 1].get());
  }
  m.part_out = outs.data();
  m.part_lse = lses.data();
  return call_.engine->merge(m, nullptr);
}

// A merge of one part with the weight 1 converts its type.
Status StepRunner::convert(const View& from, const View& to, const RowShape& shape) {
  if (!to) return {};
  float zero = 0;
  const View no_lse{.data = reinterpret_cast<std::byte*>(&zero), .dtype = kSumType, .present = true};
  const OutPart part{from, no_lse};
  return merge({&part, 1}, {to, {}}, shape);
}

}  // namespace tandem::context_parallel
