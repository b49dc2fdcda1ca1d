// The types and operations of modifications.
#pragma once

#include <cstdint>

namespace tandem::score_mod {

// bool, int (32 bits, two's complement, wraps around) and float (float32 in engines, float64 in the oracle).
enum class Type : uint8_t { boolean, integer, real };
inline constexpr int kTypes = 3;

const char* name_of(Type type);  // "bool", "int", "float"

enum class Input : uint8_t { score, batch, head, q, k, seqlen_q, seqlen_k };
inline constexpr int kInputs = 7;

const char* name_of(Input input);
constexpr Type type_of(Input input) { return input == Input::score ? Type::real : Type::integer; }

// Operands of one operation have one type, but for select's condition and clamp's and gather's as said here.
enum class Op : uint8_t {
  // Leaves: value; index is an Input; index is that of a scalar.
  constant,
  input,
  scalar,
  // Of a tensor (index), at int operands, as many as it has dimensions; each is clamped to its dimension.
  gather,
  // One operand.
  negate,
  abs,
  sign,  // -1, 0 or 1; 0 of NaN
  flip,  // not of a bool, ~ of an int
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
  sin,    // of radians
  cos,
  erf,
  tanh,
  sigmoid,
  sqrt,
  to_real,  // of an int or a bool
  to_int,   // of a bool; of a float towards 0, clamped to int's range, 0 of NaN
  // Two operands.
  add,
  subtract,
  multiply,
  divide,  // of floats
  floor_divide,
  modulo,  // has the sign of the divisor
  min,     // NaN if either is
  max,
  bit_and,  // of ints or bools, as the next two
  bit_or,
  bit_xor,
  shift_left,
  shift_right,
  less,  // gives a bool, as the next three
  less_equal,
  equal,
  not_equal,
  // Three operands.
  select,  // condition, where it is true, where it is not
  clamp,   // of floats: x, least, most
};
inline constexpr int kOps = static_cast<int>(Op::clamp) + 1;

const char* name_of(Op op);
int operands_of(Op op);  // 0 of gather, whose tensor says

inline constexpr int kMaxRank = 4;  // of a tensor

}  // namespace tandem::score_mod
