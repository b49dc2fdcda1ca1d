#include "context_parallel/bias.h"

#include "base/text.h"

namespace tandem::context_parallel {

BiasView bias_part(const BiasView& bias, const ContextStep& step, int64_t q_row) {
  if (!bias) return {};
  BiasView part = bias;
  part.data += (q_row * bias.stride[2] + step.k.begin * bias.stride[3]) * size_of(bias.dtype);
  part.shape[2] = step.q.count;
  part.shape[3] = step.k.count;
  part.stride[3] *= step.k.stride;
  for (const int dim : {2, 3}) {
    if (part.shape[dim] == 1) part.stride[dim] = 0;
  }
  return part;
}

View rows_of(const BiasView& bias) {
  return {
      .data = bias.data, .dtype = bias.dtype, .row = bias.stride[2], .head = bias.stride[1], .present = bias.present};
}

RowShape shape_of(const BiasView& bias) { return {bias.shape[2], bias.shape[1], bias.shape[3]}; }

BiasView bias_over(const View& rows, const RowShape& shape) {
  BiasView bias{.data = rows.data, .dtype = rows.dtype, .present = true};
  const int64_t sizes[] = {1, shape.heads, shape.rows, shape.dim}, strides[] = {0, rows.head, rows.row, 1};
  for (int dim = 0; dim < 4; ++dim) {
    bias.shape[dim] = sizes[dim];
    bias.stride[dim] = sizes[dim] > 1 ? strides[dim] : 0;
  }
  return bias;
}

Status add_heads(const RowEngine& engine, const View& parts, const View& sum, const RowShape& shape) {
  for (int64_t head = 0; head < shape.heads; ++head) {
    TANDEM_TRY(engine.add(from_head(parts, head), sum, {shape.rows, 1, shape.dim}));
  }
  return {};
}

bool BiasGradient::sums_heads() const {
  return call_.plan->chunk() > 0 && to_.shape[1] == 1 && call_.problem.heads_q > 1;
}

Status BiasGradient::clear() { return to_ ? call_.engine.clear(rows_of(to_), shape_of(to_)) : Status{}; }

Status BiasGradient::bind(const ContextStep& step, int64_t q_row, Problem* p) {
  p->dbias = bias_part(to_, step, q_row);
  if (!to_ || !sums_heads()) return {};
  heads_ = RowBuffer(call_.engine, kSumType, {step.q.count, call_.problem.heads_q, step.k.count});
  p->dbias = bias_over(heads_.view(), heads_.shape());
  return heads_.clear();
}

Status BiasGradient::add(const ContextStep& step, int64_t q_row) {
  if (!to_ || !sums_heads()) return {};
  RowBuffer sum(call_.engine, kSumType, {step.q.count, 1, step.k.count});
  TANDEM_TRY(sum.clear());
  TANDEM_TRY(add_heads(call_.engine, heads_.view(), sum.view(), heads_.shape()));
  return call_.engine.copy(sum.view(), rows_of(bias_part(to_, step, q_row)), sum.shape());
}

}  // namespace tandem::context_parallel
