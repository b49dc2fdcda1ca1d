// The types and operations of score_mod and mask_mod expressions.
#pragma once

#include <cstdint>

namespace tandem::score_mod {

// bool, int (32 bits, two's complement, wraps around) and float (float32 in engines, float64 in the reference).
enum class Type : uint8_t { boolean, integer, real };
inline constexpr int kTypes = 3;

const char* name_of(Type type);  // "bool", "int", "float"

enum class Input : uint8_t { score, batch, head, q, k, seqlen_q, seqlen_k };
inline constexpr int kInputs = 7;

const char* name_of(Input input);
constexpr Type type_of(Input input) { return input == Input::score ? Type::real : Type::integer; }

// All operands of an operation have one type, except select's condition, and clamp's and gather's operands, as noted
// below.
enum class Op : uint8_t {
  // Leaves. constant: value. input: index is an Input. scalar: index is the index of a scalar.
  constant,
  input,
  scalar,
  // Reads a tensor (index) at one int operand per dimension. Each operand is clamped to its dimension.
  gather,
  // Operations with one operand.
  negate,
  abs,
  sign,  // -1, 0 or 1; 0 for NaN
  flip,  // not for a bool, ~ for an int
  floor,
  ceil,
  trunc,
  round,  // ties to even
  exp,
  exp2,
  expm1,  // exp(a) - 1
  log,
  log2,
  log1p,  // log(1 + a)
  sin,    // radians
  cos,
  erf,
  tanh,
  sigmoid,
  sqrt,
  to_real,  // takes an int or a bool
  to_int,   // float: towards 0, clamped to int, NaN is 0; or a bool
  // Operations with two operands.
  add,
  subtract,
  multiply,
  divide,  // floats only
  floor_divide,
  modulo,  // has the sign of the divisor
  min,     // NaN if either is
  max,
  bit_and,  // ints or bools; the next two also
  bit_or,
  bit_xor,
  shift_left,
  shift_right,
  less,  // returns a bool; the next three also
  less_equal,
  equal,
  not_equal,
  // Operations with three operands.
  select,  // condition, value if true, value if false
  clamp,   // floats only: x, minimum, maximum
};
inline constexpr int kOps = static_cast<int>(Op::clamp) + 1;

const char* name_of(Op op);
int operands_of(Op op);  // 0 for gather: the rank of its tensor

inline constexpr int kMaxRank = 4;  // dimensions of a tensor

}  // namespace tandem::score_mod
