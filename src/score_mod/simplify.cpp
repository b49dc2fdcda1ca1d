#include "score_mod/simplify.h"

#include <bit>
#include <cmath>
#include <utility>

#include "score_mod/arithmetic.h"

namespace tandem::score_mod {
namespace {

bool is_commutative(Op op) {
  switch (op) {
    case Op::add:
    case Op::multiply:
    case Op::bit_and:
    case Op::bit_or:
    case Op::bit_xor:
    case Op::equal:
    case Op::not_equal: return true;
    default: return false;
  }
}

// Returns true for functions without correct rounding, because each device computes them in a different way.
bool is_approximated(Op op) { return op >= Op::exp && op <= Op::sigmoid; }

template <class Real>
Value<Real> value_of(const Node& constant) {
  if (constant.type == Type::real) return {static_cast<Real>(constant.value), 0};
  return {0, static_cast<int32_t>(constant.value)};
}

bool same_float(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

// Returns n if x is 2^n, or -1 for other numbers and for 1.
int log2_of(int32_t x) { return x > 1 && std::has_single_bit(bits_of(x)) ? std::countr_zero(bits_of(x)) : -1; }

}  // namespace

NodeId Simplifier::simplify(Node& node) {
  if (const NodeId folded = fold(node); folded != kNoNode) return folded;
  order_operands(node);
  switch (operands_of(node.op)) {
    case 1: return one_operand(node);
    case 2: return two_operands(node);
    default: return node.op == Op::select ? select(node) : kNoNode;
  }
}

// A constant is a float64 value and, after rounding, a float32 value. Folding must give the result of the operation in
// both precisions.
NodeId Simplifier::fold(const Node& node) {
  const int count = operands_of(node.op);
  Value<double> wide[3];
  Value<float> narrow[3];
  for (int i = 0; i < count; ++i) {
    const NodeId operand = node.operands[static_cast<size_t>(i)];
    if (!graph_.is_constant(operand)) return kNoNode;
    wide[i] = value_of<double>(at(operand));
    narrow[i] = value_of<float>(at(operand));
  }
  if (count == 0 || is_approximated(node.op)) return kNoNode;
  const Type type = at(node.operands[static_cast<size_t>(count - 1)]).type;
  const Value<double> exact = apply(node.op, type, wide);
  const Value<float> rounded = apply(node.op, type, narrow);
  if (node.type != Type::real) {
    return exact.integer == rounded.integer ? graph_.constant(node.type, exact.integer) : kNoNode;
  }
  return same_float(static_cast<float>(exact.real), rounded.real) ? graph_.real(exact.real) : kNoNode;
}

// Puts constants second. Otherwise puts the older operand first.
void Simplifier::order_operands(Node& node) const {
  if (!is_commutative(node.op)) return;
  auto& [a, b, c, d] = node.operands;
  const bool constant_a = graph_.is_constant(a), constant_b = graph_.is_constant(b);
  if (constant_a != constant_b ? constant_a : a > b) std::swap(a, b);
}

NodeId Simplifier::one_operand(const Node& node) {
  const NodeId a = node.operands[0];
  const Node inner = at(a);
  switch (node.op) {
    case Op::negate: return inner.op == Op::negate ? inner.operands[0] : kNoNode;
    case Op::abs:
      if (inner.op == Op::abs) return a;
      return inner.op == Op::negate ? graph_.make(Op::abs, inner.operands[0]) : kNoNode;
    case Op::flip: {
      const auto [x, y, unused, no] = inner.operands;
      if (inner.op == Op::flip) return x;
      if (inner.op == Op::equal) return graph_.make(Op::not_equal, x, y);
      if (inner.op == Op::not_equal) return graph_.make(Op::equal, x, y);
      // With a NaN operand both comparisons of floats are false.
      const bool ordered = (inner.op == Op::less || inner.op == Op::less_equal) && at(x).type != Type::real;
      return ordered ? graph_.make(inner.op == Op::less ? Op::less_equal : Op::less, y, x) : kNoNode;
    }
    default: return kNoNode;
  }
}

NodeId Simplifier::two_operands(const Node& node) {
  const auto [a, b, unused, no] = node.operands;
  if (a == b) return with_itself(node);
  if (graph_.is_constant(b)) {
    const double constant = at(b).value;
    switch (at(a).type) {
      case Type::real: return real_by_constant(node, constant);
      case Type::integer: return integer_by_constant(node, static_cast<int32_t>(constant));
      case Type::boolean: return boolean_by_constant(node, constant != 0);
    }
  }
  // Simplifies x & (x & y): a mask joined with another mask that includes it.
  if (node.op == Op::bit_and || node.op == Op::bit_or) {
    if (joins(b, node.op, a)) return b;
    if (joins(a, node.op, b)) return a;
  }
  const Node second = at(b);
  if (second.op == Op::negate && node.op == Op::add) return graph_.make(Op::subtract, a, second.operands[0]);
  if (second.op == Op::negate && node.op == Op::subtract) return graph_.make(Op::add, a, second.operands[0]);
  return kNoNode;
}

bool Simplifier::joins(NodeId id, Op op, NodeId part) const {
  const Node& node = at(id);
  return node.op == op && (node.operands[0] == part || node.operands[1] == part);
}

NodeId Simplifier::with_itself(const Node& node) {
  const NodeId a = node.operands[0];
  const bool real = at(a).type == Type::real;
  switch (node.op) {
    case Op::min:
    case Op::max:
    case Op::bit_and:
    case Op::bit_or: return a;
    case Op::less: return graph_.boolean(false);
    case Op::subtract:
    case Op::bit_xor: return real ? kNoNode : graph_.constant(node.type, 0);
    case Op::less_equal:
    case Op::equal: return real ? kNoNode : graph_.boolean(true);
    case Op::not_equal: return real ? kNoNode : graph_.boolean(false);
    default: return kNoNode;
  }
}

NodeId Simplifier::real_by_constant(const Node& node, double constant) {
  const NodeId a = node.operands[0];
  switch (node.op) {
    case Op::add: return constant == 0 && std::signbit(constant) ? a : kNoNode;
    case Op::subtract: return constant == 0 && !std::signbit(constant) ? a : kNoNode;
    case Op::multiply:
      if (constant == 1) return a;
      return constant == -1 ? graph_.make(Op::negate, a) : kNoNode;
    case Op::divide: {
      if (constant == 1) return a;
      int exponent;
      const bool power_of_two = std::fabs(std::frexp(constant, &exponent)) == 0.5;
      const bool normal = exponent > -120 && exponent < 120;  // normal in float32, and so is its inverse
      return power_of_two && normal ? graph_.make(Op::multiply, a, graph_.real(1 / constant)) : kNoNode;
    }
    default: return kNoNode;
  }
}

NodeId Simplifier::integer_by_constant(const Node& node, int32_t constant) {
  const NodeId a = node.operands[0];
  const auto integer = [this](int32_t value) { return graph_.constant(Type::integer, value); };
  const int log2 = log2_of(constant);
  switch (node.op) {
    case Op::add:
    case Op::subtract:
    case Op::bit_or:
    case Op::bit_xor:
    case Op::shift_left:
    case Op::shift_right: return constant == 0 ? a : kNoNode;
    case Op::multiply:
      if (constant == 0) return integer(0);
      return constant == 1 ? a : kNoNode;
    case Op::bit_and:
      if (constant == 0) return integer(0);
      return constant == -1 ? a : kNoNode;
    case Op::floor_divide:
      if (constant == 1) return a;
      return log2 > 0 ? graph_.make(Op::shift_right, a, integer(log2)) : kNoNode;
    case Op::modulo:
      if (constant == 1) return integer(0);
      return log2 > 0 ? graph_.make(Op::bit_and, a, integer(constant - 1)) : kNoNode;
    default: return kNoNode;
  }
}

NodeId Simplifier::boolean_by_constant(const Node& node, bool constant) {
  const NodeId a = node.operands[0];
  switch (node.op) {
    case Op::bit_and: return constant ? a : graph_.boolean(false);
    case Op::bit_or: return constant ? graph_.boolean(true) : a;
    case Op::bit_xor:
    case Op::not_equal: return constant ? flip(a) : a;
    case Op::equal: return constant ? a : flip(a);
    default: return kNoNode;
  }
}

NodeId Simplifier::select(const Node& node) {
  const auto [condition, a, b, no] = node.operands;
  if (graph_.is_constant(condition)) return at(condition).value != 0 ? a : b;
  if (a == b) return a;
  if (at(condition).op == Op::flip) return graph_.make(Op::select, at(condition).operands[0], b, a);
  if (node.type != Type::boolean) return kNoNode;
  if (graph_.is_constant(b)) {
    return at(b).value != 0 ? graph_.make(Op::bit_or, flip(condition), a) : graph_.make(Op::bit_and, condition, a);
  }
  if (!graph_.is_constant(a)) return kNoNode;
  return at(a).value != 0 ? graph_.make(Op::bit_or, condition, b) : graph_.make(Op::bit_and, flip(condition), b);
}

}  // namespace tandem::score_mod
