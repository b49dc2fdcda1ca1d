#include "score_mod/arithmetic.h"

#include <cmath>
#include <cstdlib>

namespace tandem::score_mod {
namespace {

// The definition of Python and torch: the quotient is derived from the modulo, so that rounding never makes the two
// inconsistent.
template <class Real>
Real modulo_real(Real a, Real b) {
  const Real rest = std::fmod(a, b);
  return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}

template <class Real>
Real floor_divide_real(Real a, Real b) {
  if (b == 0) return a / b;
  const Real rest = std::fmod(a, b);
  Real quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(Real{0}, a / b);
  const Real whole = std::floor(quotient);
  return quotient - whole > Real{0.5} ? whole + 1 : whole;
}

template <class Real>
int32_t to_int(Real a) {
  if (std::isnan(a)) return 0;
  if (a >= Real{2147483648.0}) return INT32_MAX;
  return a <= Real{-2147483648.0} ? INT32_MIN : static_cast<int32_t>(a);
}

template <class Real>
Real apply_real(Op op, Real a, Real b, Real c) {
  switch (op) {
    case Op::negate: return -a;
    case Op::abs: return std::fabs(a);
    case Op::sign: return static_cast<Real>((a > 0) - (a < 0));
    case Op::floor: return std::floor(a);
    case Op::ceil: return std::ceil(a);
    case Op::trunc: return std::trunc(a);
    case Op::round: return std::nearbyint(a);
    case Op::exp: return std::exp(a);
    case Op::exp2: return std::exp2(a);
    case Op::expm1: return std::expm1(a);
    case Op::log: return std::log(a);
    case Op::log2: return std::log2(a);
    case Op::log1p: return std::log1p(a);
    case Op::sin: return std::sin(a);
    case Op::cos: return std::cos(a);
    case Op::erf: return std::erf(a);
    case Op::tanh: return std::tanh(a);
    case Op::sigmoid: return 1 / (1 + std::exp(-a));
    case Op::sqrt: return std::sqrt(a);
    case Op::add: return a + b;
    case Op::subtract: return a - b;
    case Op::multiply: return a * b;
    case Op::divide: return a / b;
    case Op::floor_divide: return floor_divide_real(a, b);
    case Op::modulo: return modulo_real(a, b);
    case Op::min: return a < b || std::isnan(a) ? a : b;
    case Op::max: return a > b || std::isnan(a) ? a : b;
    case Op::clamp: {
      const Real above = a > b || std::isnan(a) ? a : b;
      return above < c || std::isnan(above) ? above : c;
    }
    default: std::abort();  // the op takes no floats
  }
}

int32_t apply_integer(Op op, int32_t a, int32_t b) {
  switch (op) {
    case Op::negate: return wrap(0 - bits_of(a));
    case Op::abs: return a < 0 ? wrap(0 - bits_of(a)) : a;
    case Op::sign: return (a > 0) - (a < 0);
    case Op::flip: return ~a;
    case Op::add: return wrap(bits_of(a) + bits_of(b));
    case Op::subtract: return wrap(bits_of(a) - bits_of(b));
    case Op::multiply: return wrap(bits_of(a) * bits_of(b));
    case Op::floor_divide: return floor_divide(a, b);
    case Op::modulo: return modulo(a, b);
    case Op::min: return a < b ? a : b;
    case Op::max: return a > b ? a : b;
    case Op::bit_and: return a & b;
    case Op::bit_or: return a | b;
    case Op::bit_xor: return a ^ b;
    case Op::shift_left: return shift_left(a, b);
    case Op::shift_right: return shift_right(a, b);
    default: std::abort();  // the op takes no ints
  }
}

template <class T>
bool compare(Op op, T a, T b) {
  switch (op) {
    case Op::less: return a < b;
    case Op::less_equal: return a <= b;
    case Op::equal: return a == b;
    default: return a != b;
  }
}

}  // namespace

template <class Real>
Value<Real> apply(Op op, Type type, const Value<Real>* operands) {
  const auto& a = operands[0];
  switch (op) {
    case Op::select: return a.integer != 0 ? operands[1] : operands[2];
    case Op::to_real: return {static_cast<Real>(a.integer), 0};
    case Op::to_int: return {0, type == Type::real ? to_int(a.real) : a.integer};
    case Op::less:
    case Op::less_equal:
    case Op::equal:
    case Op::not_equal:
      return {0,
              type == Type::real ? compare(op, a.real, operands[1].real) : compare(op, a.integer, operands[1].integer)};
    default: break;
  }
  const int count = operands_of(op);
  if (type == Type::real) {
    return {apply_real(op, a.real, count > 1 ? operands[1].real : 0, count > 2 ? operands[2].real : 0), 0};
  }
  if (type == Type::boolean && op == Op::flip) return {0, a.integer ^ 1};
  return {0, apply_integer(op, a.integer, count > 1 ? operands[1].integer : 0)};
}

template Value<float> apply(Op, Type, const Value<float>*);
template Value<double> apply(Op, Type, const Value<double>*);

}  // namespace tandem::score_mod
