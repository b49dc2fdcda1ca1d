#include "score_mod/differentiate.h"

#include <numbers>

namespace tandem::score_mod {
namespace {

// d result / d node. The derivative is 0 if guard is false, even if value is NaN.
struct Adjoint {
  NodeId guard = kNoNode;
  NodeId value = kNoNode;
};

class Differentiation {
 public:
  explicit Differentiation(Graph& graph) : graph_(graph), adjoints_(static_cast<size_t>(graph.size())) {
    find_active();
  }

  Gradient run(NodeId result) {
    contribute(result, {graph_.boolean(true), graph_.real(1)});
    for (NodeId id = result; id >= 0; --id) {
      if (reached(id)) propagate(id);
    }
    Gradient gradient{.score = graph_.real(0), .captured = {}};
    for (NodeId id = 0; id <= result; ++id) {
      if (!reached(id)) continue;
      const Op op = graph_[id].op;  // finish() creates nodes, so the graph may move
      if (op == Op::input) gradient.score = finish(id);
      if (op == Op::scalar || op == Op::gather) gradient.captured.push_back({id, finish(id)});
    }
    return gradient;
  }

 private:
  // Marks the nodes that depend on a variable of differentiation.
  void find_active() {
    active_.resize(adjoints_.size());
    for (NodeId id = 0; id < graph_.size(); ++id) {
      const Node& node = graph_[id];
      bool active = node.op == Op::input || node.op == Op::scalar || node.op == Op::gather;
      for (const NodeId operand : node.operands) active |= operand != kNoNode && active_[static_cast<size_t>(operand)];
      active_[static_cast<size_t>(id)] = active && node.type == Type::real;
    }
  }

  bool reached(NodeId id) const { return adjoints_[static_cast<size_t>(id)].guard != kNoNode; }

  NodeId finish(NodeId id) {
    const Adjoint& adjoint = adjoints_[static_cast<size_t>(id)];
    return graph_.make(Op::select, adjoint.guard, adjoint.value, graph_.real(0));
  }

  void contribute(NodeId to, const Adjoint& more) {
    if (!active_[static_cast<size_t>(to)] || graph_.is_constant(more.guard, 0)) return;
    Adjoint& sum = adjoints_[static_cast<size_t>(to)];
    if (sum.guard == kNoNode) {
      sum = more;
    } else if (sum.guard == more.guard) {
      sum.value = graph_.make(Op::add, sum.value, more.value);
    } else if (sum.guard == make(Op::flip, more.guard)) {
      sum = {graph_.boolean(true), graph_.make(Op::select, sum.guard, sum.value, more.value)};
    } else {
      const NodeId zero = graph_.real(0);
      const NodeId before = make(Op::select, sum.guard, sum.value, zero);
      const NodeId added = make(Op::select, more.guard, more.value, zero);
      sum = {make(Op::bit_or, sum.guard, more.guard), make(Op::add, before, added)};
    }
  }

  void propagate(NodeId id) {
    const Node node = graph_[id];
    const Adjoint out = adjoints_[static_cast<size_t>(id)];
    const auto [a, b, c, d] = node.operands;
    const NodeId v = out.value;
    const auto give = [&](NodeId to, NodeId value) { contribute(to, {out.guard, value}); };
    const auto give_where = [&](NodeId condition, NodeId to, NodeId value) {
      contribute(to, {make(Op::bit_and, out.guard, condition), value});
    };
    switch (node.op) {
      case Op::add: return give(a, v), give(b, v);
      case Op::subtract: return give(a, v), give(b, make(Op::negate, v));
      case Op::multiply: return give(a, make(Op::multiply, v, b)), give(b, make(Op::multiply, v, a));
      case Op::divide:
        give(a, make(Op::divide, v, b));
        return give(b, make(Op::negate, make(Op::multiply, v, make(Op::divide, id, b))));
      case Op::modulo:
        give(a, v);
        return give(b, make(Op::negate, make(Op::multiply, v, make(Op::floor_divide, a, b))));
      case Op::min: return give_extreme(a, b, out, make(Op::less, b, a), make(Op::less, a, b));
      case Op::max: return give_extreme(a, b, out, make(Op::less, a, b), make(Op::less, b, a));
      case Op::clamp:  // clamps a between b and c
        give_where(make(Op::bit_and, make(Op::less_equal, b, a), make(Op::less_equal, a, c)), a, v);
        give_where(make(Op::bit_and, make(Op::less, a, b), make(Op::less, b, c)), b, v);
        return give_where(make(Op::bit_or, make(Op::less, c, a), make(Op::less, c, b)), c, v);
      case Op::select:  // a is the condition
        give_where(a, b, v);
        return give_where(make(Op::flip, a), c, v);
      default:
        if (const NodeId value = one_operand(node, id, v); value != kNoNode) give(a, value);
    }
  }

  // less: true if a is not the extreme, so that a gets no gradient. less_b: the same for b. If one operand is NaN, both
  // get the gradient.
  void give_extreme(NodeId a, NodeId b, const Adjoint& out, NodeId less, NodeId less_b) {
    const NodeId half = make(Op::multiply, out.value, graph_.real(0.5));
    const NodeId value = make(Op::select, make(Op::equal, a, b), half, out.value);
    contribute(a, {make(Op::bit_and, out.guard, make(Op::flip, less)), value});
    contribute(b, {make(Op::bit_and, out.guard, make(Op::flip, less_b)), value});
  }

  // Returns v times the derivative of an operation with one float operand. kNoNode: the derivative is 0.
  NodeId one_operand(const Node& node, NodeId id, NodeId v) {
    const NodeId a = node.operands[0];
    const NodeId ln2 = graph_.real(std::numbers::ln2);
    switch (node.op) {
      case Op::negate: return make(Op::negate, v);
      case Op::abs: return make(Op::multiply, v, graph_.make(Op::sign, a));
      case Op::exp: return make(Op::multiply, v, id);
      case Op::exp2: return make(Op::multiply, make(Op::multiply, v, id), ln2);
      case Op::log: return make(Op::divide, v, a);
      case Op::log2: return make(Op::divide, v, make(Op::multiply, a, ln2));
      case Op::expm1: return make(Op::multiply, v, make(Op::add, id, graph_.real(1)));
      case Op::log1p: return make(Op::divide, v, make(Op::add, a, graph_.real(1)));
      case Op::sin: return make(Op::multiply, v, make(Op::cos, a));
      case Op::cos: return make(Op::negate, make(Op::multiply, v, make(Op::sin, a)));
      case Op::erf: {
        const NodeId density = make(Op::exp, make(Op::negate, make(Op::multiply, a, a)));
        return make(Op::multiply, v, make(Op::multiply, density, graph_.real(2 * std::numbers::inv_sqrtpi)));
      }
      case Op::tanh: return make(Op::multiply, v, make(Op::subtract, graph_.real(1), make(Op::multiply, id, id)));
      case Op::sigmoid: return make(Op::multiply, v, make(Op::multiply, make(Op::subtract, graph_.real(1), id), id));
      case Op::sqrt: return make(Op::divide, v, make(Op::multiply, id, graph_.real(2)));
      default: return kNoNode;
    }
  }

  NodeId make(Op op, NodeId a, NodeId b = kNoNode, NodeId c = kNoNode) { return graph_.make(op, a, b, c); }

  Graph& graph_;
  std::vector<Adjoint> adjoints_;
  std::vector<bool> active_;
};

}  // namespace

Gradient differentiate(Graph& graph, NodeId result) { return Differentiation(graph).run(result); }

}  // namespace tandem::score_mod
