#include "mods/softcap.h"

namespace tandem::mods {
namespace {

// What all scores have at a node; 0 where that is not known here.
double value_of(const Mod& mod, NodeId id, const Values& values) {
  const Node& node = mod.graph[id];
  if (node.op == Op::to_real) return value_of(mod, node.operands[0], values);
  if (node.op == Op::scalar) return values.scalars[static_cast<size_t>(node.index)];
  return node.op == Op::constant ? node.value : 0;
}

}  // namespace

double softcap_of(const Mod& mod, const Values& values) {
  const Graph& graph = mod.graph;
  const Node& product = graph[mod.result];
  if (product.op != Op::multiply) return 0;
  const auto [a, b, unused, no] = product.operands;
  const bool first = graph[a].op == Op::tanh;
  if (!first && graph[b].op != Op::tanh) return 0;
  const double cap = value_of(mod, first ? b : a, values);
  const Node& quotient = graph[graph[first ? a : b].operands[0]];
  if (quotient.op != Op::divide && quotient.op != Op::multiply) return 0;
  const Node& score = graph[quotient.operands[0]];
  if (score.op != Op::input || static_cast<Input>(score.index) != Input::score) return 0;
  const double by = value_of(mod, quotient.operands[1], values);
  return (quotient.op == Op::divide ? by == cap : by * cap == 1) ? cap : 0;
}

}  // namespace tandem::mods
