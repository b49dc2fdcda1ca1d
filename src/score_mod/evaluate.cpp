#include "score_mod/evaluate.h"

#include <algorithm>

namespace tandem::score_mod {

template <class Real>
Evaluator<Real>::Evaluator(const Graph& graph, std::span<const NodeId> outputs)
    : graph_(graph), order_(graph.needed_by(outputs)), results_(static_cast<size_t>(graph.size())) {}

template <class Real>
Value<Real> Evaluator<Real>::leaf(const Node& node, Real score, const Position& position, const Values& values) const {
  double value = node.value;
  if (node.op == Op::input) {
    const auto input = static_cast<Input>(node.index);
    if (input == Input::score) return {score, 0};
    value = position.of(input);
  } else if (node.op == Op::scalar) {
    value = values.scalars[static_cast<size_t>(node.index)];
  } else if (node.op == Op::gather) {
    const TensorView& tensor = values.tensors[static_cast<size_t>(node.index)];
    int32_t indices[kMaxRank];
    for (size_t i = 0; i < static_cast<size_t>(tensor.rank); ++i) indices[i] = (*this)[node.operands[i]].integer;
    value = read(tensor, offset_of(tensor, {indices, static_cast<size_t>(tensor.rank)}));
  }
  if (node.type == Type::real) return {static_cast<Real>(value), 0};
  return {0, static_cast<int32_t>(value)};
}

template <class Real>
void Evaluator<Real>::run(Real score, const Position& position, const Values& values) {
  for (const NodeId id : order_) {
    const Node& node = graph_[id];
    const int count = operands_of(node.op);
    if (count == 0) {
      results_[static_cast<size_t>(id)] = leaf(node, score, position, values);
      continue;
    }
    Value<Real> operands[3];
    for (int i = 0; i < std::min(count, 3); ++i) operands[i] = (*this)[node.operands[static_cast<size_t>(i)]];
    const Type type = graph_[node.operands[static_cast<size_t>(count - 1)]].type;
    results_[static_cast<size_t>(id)] = apply(node.op, type, operands);
  }
}

template class Evaluator<float>;
template class Evaluator<double>;

}  // namespace tandem::score_mod
