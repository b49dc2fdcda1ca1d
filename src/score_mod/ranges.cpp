#include "score_mod/ranges.h"

#include <algorithm>
#include <cmath>

#include "score_mod/arithmetic.h"

namespace tandem::score_mod {
namespace {

FloatRange range_of_real(Op op, FloatRange a, FloatRange b, FloatRange c) {
  switch (op) {
    case Op::negate: return range_negate(a);
    case Op::abs: return range_abs(a);
    case Op::sign: return range_sign(a);
    case Op::add: return range_add(a, b);
    case Op::subtract: return range_subtract(a, b);
    case Op::multiply: return range_multiply(a, b);
    case Op::min: return range_min(a, b);
    case Op::max: return range_max(a, b);
    case Op::clamp: return range_clamp(a, b, c);
    default: return kAnyFloat;
  }
}

IntRange range_of_integer(Op op, IntRange a, IntRange b) {
  switch (op) {
    case Op::negate: return range_negate(a);
    case Op::abs: return range_abs(a);
    case Op::sign: return range_sign(a);
    case Op::flip: return range_flip(a);
    case Op::to_int: return range_to_int(a);
    case Op::add: return range_add(a, b);
    case Op::subtract: return range_subtract(a, b);
    case Op::multiply: return range_multiply(a, b);
    case Op::floor_divide: return range_floor_divide(a, b);
    case Op::modulo: return range_modulo(a, b);
    case Op::min: return range_min(a, b);
    case Op::max: return range_max(a, b);
    case Op::bit_and: return range_bit_and(a, b);
    case Op::bit_or: return range_bit_or(a, b);
    case Op::bit_xor: return range_bit_xor(a, b);
    case Op::shift_left: return range_shift_left(a, b);
    case Op::shift_right: return range_shift_right(a, b);
    default: return kAnyInt;
  }
}

template <class Range>
IntRange range_of_comparison(Op op, Range a, Range b) {
  switch (op) {
    case Op::less: return range_less(a, b);
    case Op::less_equal: return range_less_equal(a, b);
    case Op::equal: return range_equal(a, b);
    default: return range_not_equal(a, b);
  }
}

}  // namespace

RangeEvaluator::RangeEvaluator(const Graph& graph, std::span<const NodeId> outputs, const Values& values)
    : graph_(graph), values_(values), order_(graph.needed_by(outputs)), results_(static_cast<size_t>(graph.size())) {}

// Returns the range of all elements that the indices may select, if they are few.
RangeEvaluator::NodeRange RangeEvaluator::gather(const Node& node) const {
  const TensorView& tensor = values_.tensors[static_cast<size_t>(node.index)];
  const NodeRange any = {node.type == Type::boolean ? kAnyBool : kAnyInt, kAnyFloat};
  int32_t first[kMaxRank] = {}, last[kMaxRank] = {};
  int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    const IntRange index = integers(node.operands[static_cast<size_t>(i)]);
    first[i] = clamp_index(index.low, tensor.size[i]);
    last[i] = clamp_index(index.high, tensor.size[i]);
    count *= last[i] - first[i] + 1;
    if (count > kRangeElements) return any;
  }
  NodeRange range;
  int32_t at[kMaxRank];
  std::copy_n(first, kMaxRank, at);
  for (int64_t n = 0; n < count; ++n) {
    const double x = read(tensor, offset_of(tensor, {at, static_cast<size_t>(tensor.rank)}));
    NodeRange one;
    if (node.type == Type::real) {
      one.real = range_of(static_cast<float>(x));
    } else {
      one.integer = range_of(static_cast<int>(x));
    }
    range = n == 0 ? one : NodeRange{union_of(range.integer, one.integer), union_of(range.real, one.real)};
    for (int i = tensor.rank - 1; i >= 0 && ++at[i] > last[i]; --i) at[i] = first[i];
  }
  return range;
}

RangeEvaluator::NodeRange RangeEvaluator::leaf(const Node& node, const PositionRange& position) const {
  if (node.op == Op::gather) return gather(node);
  if (node.op == Op::input) {
    const auto input = static_cast<Input>(node.index);
    return {input == Input::score ? kAnyInt : position.of(input), kAnyFloat};
  }
  const double value = node.op == Op::scalar ? values_.scalars[static_cast<size_t>(node.index)] : node.value;
  if (node.type == Type::real) return {kAnyInt, range_of(static_cast<float>(value))};
  return {range_of(static_cast<int>(value)), kAnyFloat};
}

RangeEvaluator::NodeRange RangeEvaluator::apply(const Node& node) const {
  NodeRange operands[3];
  const int count = operands_of(node.op);
  for (int i = 0; i < count; ++i) operands[i] = results_[static_cast<size_t>(node.operands[static_cast<size_t>(i)])];
  const auto& [a, b, c] = operands;
  const Type type = graph_[node.operands[static_cast<size_t>(count - 1)]].type;
  switch (node.op) {
    case Op::select: return {range_select(a.integer, b.integer, c.integer), range_select(a.integer, b.real, c.real)};
    case Op::to_real: return {kAnyInt, range_to_real(a.integer)};
    case Op::less:
    case Op::less_equal:
    case Op::equal:
    case Op::not_equal:
      return {type == Type::real ? range_of_comparison(node.op, a.real, b.real)
                                 : range_of_comparison(node.op, a.integer, b.integer),
              kAnyFloat};
    default: break;
  }
  if (type == Type::real) {
    if (node.op == Op::to_int) return {range_to_int(a.real), kAnyFloat};
    return {kAnyInt, range_of_real(node.op, a.real, b.real, c.real)};
  }
  if (type == Type::boolean && node.op == Op::flip) return {range_not(a.integer), kAnyFloat};
  return {range_of_integer(node.op, a.integer, b.integer), kAnyFloat};
}

void RangeEvaluator::run(const PositionRange& position) {
  for (const NodeId id : order_) {
    const Node& node = graph_[id];
    results_[static_cast<size_t>(id)] = operands_of(node.op) == 0 ? leaf(node, position) : apply(node);
  }
}

}  // namespace tandem::score_mod
