// The value of each operation for one element. Loops over tiles and printed code must agree with it.
#pragma once

#include <cstdint>
#include <limits>

#include "score_mod/graph.h"

namespace tandem::score_mod {

// A bool is the integer 0 or 1.
template <class Real>
struct Value {
  Real real = 0;
  int32_t integer = 0;
};

// Computes op, whose operands have this type. For select, this type is the type of the branches. For to_real, to_int
// and comparisons, this type is the type of the argument. Real is float or double.
template <class Real>
Value<Real> apply(Op op, Type type, const Value<Real>* operands);

extern template Value<float> apply(Op, Type, const Value<float>*);
extern template Value<double> apply(Op, Type, const Value<double>*);

// Integers follow torch: division rounds down, and modulo has the divisor's sign. Every case is defined: sums and
// products wrap around, a // 0 is 0, and a % 0 is a. A shift below 0 or above 31 keeps only the sign.
inline int32_t wrap(uint32_t bits) { return static_cast<int32_t>(bits); }
inline uint32_t bits_of(int32_t a) { return static_cast<uint32_t>(a); }

inline int32_t floor_divide(int32_t a, int32_t b) {
  if (b == 0) return 0;
  if (b == -1) return wrap(0 - bits_of(a));  // -INT_MIN does not fit in int
  const int32_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
inline int32_t modulo(int32_t a, int32_t b) { return wrap(bits_of(a) - bits_of(floor_divide(a, b)) * bits_of(b)); }
inline int32_t shift_left(int32_t a, int32_t by) { return by < 0 || by > 31 ? 0 : wrap(bits_of(a) << by); }
inline int32_t shift_right(int32_t a, int32_t by) { return a >> (by < 0 || by > 31 ? 31 : by); }

// The index that a gather reads along one dimension.
inline int32_t clamp_index(int32_t index, int32_t size) { return index < 0 ? 0 : index < size ? index : size - 1; }

}  // namespace tandem::score_mod
