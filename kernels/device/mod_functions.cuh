// The operations of score_mods and mask_mods, one function each (docs/score_mod.md). src/score_mod/print.cpp prints
// expressions as calls of these functions. A bool is the int 0 or 1.
#pragma once
#include "config/mods.h"
#include "device/row.cuh"
#include "ptx/global.cuh"
#include "ptx/warp.cuh"

// The position of a score: query q and key k.
struct ModPlace {
  int batch, head, q, k, seqlen_q, seqlen_k;
};

// Functions printed for a kernel with modifications: the new score, its derivative by the old score, and the key's
// visibility. The functions are templates, so that an absent one is not instantiated. Costly values that all scores of
// a row share are preloaded per row, and a mask's values per key.
template <auto T>
struct ScoreRow;
template <auto T>
TANDEM_DEVICE ScoreRow<T> score_row(const ModPlace& at, const ModNames& names);
template <auto T>
TANDEM_DEVICE float score_mod(float score, const ScoreRow<T>& row, const ModPlace& at, const ModNames& names);
template <auto T>
TANDEM_DEVICE float score_slope(float score, const ScoreRow<T>& row, const ModPlace& at, const ModNames& names);
template <auto T>
constexpr bool rows_are_alike();  // all rows of a head share their values
template <auto T>
struct MaskRow;
template <auto T>
TANDEM_DEVICE MaskRow<T> mask_row(const ModPlace& at, const ModNames& names);
template <auto T>
struct MaskKey;
template <auto T>
TANDEM_DEVICE MaskKey<T> mask_key(const ModPlace& at, const ModNames& names);
template <auto T>
TANDEM_DEVICE bool mask_mod(const MaskRow<T>& row, const MaskKey<T>& key, const ModPlace& at, const ModNames& names);
template <auto T>
constexpr int mask_operations();  // per score, without row and key values
template <auto T>
TANDEM_DEVICE bool mask_mod(const ModPlace& at, const ModNames& names) {
  return mask_mod<T>(mask_row<T>(at, names), mask_key<T>(at, names), at, names);
}
// Prefetches the elements that mask_mod() reads for a query with any key. A warp prefetches an iteration at once.
// Otherwise the warp would wait for memory at each evaluation.
template <auto T>
TANDEM_DEVICE void mask_touch_queries(const ModPlace& at, const ModNames& names);

// For score_mod: captures.add<number, tensor>(derivative, mod_cell(...)) for each element. Elements are grouped by the
// line along which a tile reads the same element again: a query, a key or a distance. CaptureLine::tile: all scores of
// a tile read the same element.
enum class CaptureLine { row, column, diagonal, tile };
template <auto T>
constexpr int captures_along(CaptureLine line);
template <auto T, CaptureLine line, class Captures>
TANDEM_DEVICE void score_captures(float score, const ModPlace& at, const ModNames& names, const Captures& captures);

constexpr int kLeastInt = -2147483647 - 1, kMaxInt = 2147483647;

TANDEM_DEVICE float mod_float(int bits) { return __int_as_float(bits); }

TANDEM_DEVICE float mod_negate(float a) { return -a; }
TANDEM_DEVICE float mod_abs(float a) { return fabsf(a); }
TANDEM_DEVICE float mod_sign(float a) { return (a > 0 ? 1.0f : 0.0f) - (a < 0 ? 1.0f : 0.0f); }
TANDEM_DEVICE float mod_floor(float a) { return floorf(a); }
TANDEM_DEVICE float mod_ceil(float a) { return ceilf(a); }
TANDEM_DEVICE float mod_trunc(float a) { return truncf(a); }
TANDEM_DEVICE float mod_round(float a) { return rintf(a); }
TANDEM_DEVICE float mod_exp(float a) { return expf(a); }
TANDEM_DEVICE float mod_exp2(float a) { return exp2f(a); }
TANDEM_DEVICE float mod_log(float a) { return logf(a); }
TANDEM_DEVICE float mod_log2(float a) { return log2f(a); }
TANDEM_DEVICE float mod_expm1(float a) { return expm1f(a); }
TANDEM_DEVICE float mod_log1p(float a) { return log1pf(a); }
TANDEM_DEVICE float mod_sin(float a) { return sinf(a); }
TANDEM_DEVICE float mod_cos(float a) { return cosf(a); }
TANDEM_DEVICE float mod_erf(float a) { return erff(a); }
// Computes tanh with a relative error of at most 2^-21. 1 - |tanh|, which derivatives use, has full precision, because
// |a| avoids a reciprocal near 1. tanhf() has two units in the last place but diverges within a warp between small and
// large scores.
TANDEM_DEVICE float mod_tanh(float a) {
  constexpr float kNear = 0.6f, kDoubleLog2e = 2.88539008177792681472f;
  const float square = a * a;
  float near = fmaf(square, 0x1.01e104p-6f, -0x1.ac795cp-5f);
  near = fmaf(near, square, 0x1.10b282p-3f);
  near = fmaf(near, square, -0x1.5553dap-2f);
  near = fmaf(near, square, 1.0f) * a;
  const float far = fmaf(-2.0f, reciprocal(1.0f + exp2_approx(kDoubleLog2e * fabsf(a))), 1.0f);
  return fabsf(a) < kNear ? near : copysignf(far, a);
}
// Computes the sigmoid with a relative error of (2 + |a|) 2^-23; 0 below -88. |a| avoids a reciprocal near 1.
TANDEM_DEVICE float mod_sigmoid(float a) {
  const float rest = reciprocal(1.0f + exp2_approx(1.44269504088896340736f * fabsf(a)));
  return a < 0 ? rest : 1.0f - rest;
}
TANDEM_DEVICE float mod_sqrt(float a) { return sqrtf(a); }
TANDEM_DEVICE float mod_add(float a, float b) { return a + b; }
TANDEM_DEVICE float mod_subtract(float a, float b) { return a - b; }
TANDEM_DEVICE float mod_multiply(float a, float b) { return a * b; }
TANDEM_DEVICE float mod_divide(float a, float b) { return a / b; }
// Division by a divisor that all scores share: its reciprocal is computed once. The remainder corrects the rounding
// (Markstein) if it is a normal number. Otherwise, for quotients beyond about 2^+-60, the error is at most a unit in
// the last place.
TANDEM_DEVICE float mod_divide_by(float a, float b) {
  const float size = fabsf(b), scale = size < 0x1p-60f ? 0x1p64f : size > 0x1p60f ? 0x1p-64f : 1.0f;
  const float divisor = b * scale, inverse = 1.0f / divisor, dividend = a * scale, near = dividend * inverse;
  const float nearest = fmaf(fmaf(-near, divisor, dividend), inverse, near);
  return fabsf(dividend) > 0x1p-60f && fabsf(dividend) < 0x1p40f ? nearest : near;
}
TANDEM_DEVICE float mod_min(float a, float b) { return a < b || a != a ? a : b; }
TANDEM_DEVICE float mod_max(float a, float b) { return a > b || a != a ? a : b; }
TANDEM_DEVICE float mod_clamp(float x, float least, float most) { return mod_min(mod_max(x, least), most); }
TANDEM_DEVICE float mod_modulo(float a, float b) {
  const float rest = fmodf(a, b);
  return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}
TANDEM_DEVICE float mod_floor_divide(float a, float b) {
  if (b == 0) return a / b;
  const float rest = fmodf(a, b);
  float quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return copysignf(0.0f, a / b);
  const float whole = floorf(quotient);
  return quotient - whole > 0.5f ? whole + 1 : whole;
}
TANDEM_DEVICE int mod_less(float a, float b) { return a < b; }
TANDEM_DEVICE int mod_less_equal(float a, float b) { return a <= b; }
TANDEM_DEVICE int mod_equal(float a, float b) { return a == b; }
TANDEM_DEVICE int mod_not_equal(float a, float b) { return a != b; }
TANDEM_DEVICE float mod_select(int condition, float a, float b) { return condition ? a : b; }
TANDEM_DEVICE int mod_to_int(float a) {
  if (a != a) return 0;
  return a >= 2147483648.0f ? kMaxInt : a <= -2147483648.0f ? kLeastInt : static_cast<int>(a);
}

TANDEM_DEVICE int mod_negate(int a) { return static_cast<int>(0 - static_cast<u32>(a)); }
TANDEM_DEVICE int mod_abs(int a) { return a < 0 ? mod_negate(a) : a; }
TANDEM_DEVICE int mod_sign(int a) { return (a > 0) - (a < 0); }
TANDEM_DEVICE int mod_flip(int a) { return ~a; }
TANDEM_DEVICE int mod_not(int a) { return a ^ 1; }
TANDEM_DEVICE int mod_add(int a, int b) { return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b)); }
TANDEM_DEVICE int mod_subtract(int a, int b) { return static_cast<int>(static_cast<u32>(a) - static_cast<u32>(b)); }
TANDEM_DEVICE int mod_multiply(int a, int b) { return static_cast<int>(static_cast<u32>(a) * static_cast<u32>(b)); }
// Returns the quotient rounded down; 0 for division by 0. Usually all scores share the divisor, so that the compiler
// hoists its reciprocal. About ten instructions remain, without branches.
TANDEM_DEVICE int mod_floor_divide(int a, int b) {
  const int sign = b >> 31;
  const u32 divisor = max(static_cast<u32>((b ^ sign) - static_cast<u32>(sign)), 1u);
  const u32 inverse = ~0u / divisor;  // 2^32 / divisor, low by less than 1 + 1 / divisor
  const u32 turned = static_cast<u32>(a) * static_cast<u32>(sign | 1);
  // A negative dividend is rounded down through its complement. The least int divided by -1 is not negative.
  const int below = static_cast<int>(turned & ~static_cast<u32>(a & sign)) >> 31;
  const u32 dividend = turned ^ static_cast<u32>(below);  // at most 2^31, so that the quotient is at most 1 low
  u32 quotient = __umulhi(dividend, inverse);
  quotient += dividend - quotient * divisor >= divisor;
  return static_cast<int>((quotient ^ static_cast<u32>(below)) & (b != 0 ? ~0u : 0u));
}
TANDEM_DEVICE int mod_modulo(int a, int b) { return mod_subtract(a, mod_multiply(mod_floor_divide(a, b), b)); }
TANDEM_DEVICE int mod_min(int a, int b) { return min(a, b); }
TANDEM_DEVICE int mod_max(int a, int b) { return max(a, b); }
TANDEM_DEVICE int mod_bit_and(int a, int b) { return a & b; }
TANDEM_DEVICE int mod_bit_or(int a, int b) { return a | b; }
TANDEM_DEVICE int mod_bit_xor(int a, int b) { return a ^ b; }
TANDEM_DEVICE int mod_shift_left(int a, int by) {
  return static_cast<u32>(by) > 31 ? 0 : static_cast<int>(static_cast<u32>(a) << by);
}
TANDEM_DEVICE int mod_shift_right(int a, int by) { return a >> (static_cast<u32>(by) > 31 ? 31 : by); }
TANDEM_DEVICE int mod_less(int a, int b) { return a < b; }
TANDEM_DEVICE int mod_less_equal(int a, int b) { return a <= b; }
TANDEM_DEVICE int mod_equal(int a, int b) { return a == b; }
TANDEM_DEVICE int mod_not_equal(int a, int b) { return a != b; }
TANDEM_DEVICE int mod_select(int condition, int a, int b) { return condition ? a : b; }
TANDEM_DEVICE float mod_to_real(int a) { return static_cast<float>(a); }
TANDEM_DEVICE int mod_to_int(int a) { return a; }

constexpr int size_of(ModElement element) {
  switch (element) {
    case ModElement::f64:
    case ModElement::i64: return 8;
    case ModElement::f32:
    case ModElement::i32: return 4;
    case ModElement::bf16:
    case ModElement::f16: return 2;
    default: return 1;
  }
}

// The type of a gather's result: float or int.
template <ModElement element>
TANDEM_DEVICE auto mod_load(const char* at) {
  if constexpr (element == ModElement::f64) {
    return static_cast<float>(*reinterpret_cast<const double*>(at));
  } else if constexpr (element == ModElement::f32) {
    return *reinterpret_cast<const float*>(at);
  } else if constexpr (element == ModElement::bf16 || element == ModElement::f16) {
    return to_float<element == ModElement::f16>(*reinterpret_cast<const u16*>(at));
  } else if constexpr (element == ModElement::i64) {
    const i64 wide = *reinterpret_cast<const i64*>(at);
    return static_cast<int>(min(max(wide, static_cast<i64>(kLeastInt)), static_cast<i64>(kMaxInt)));
  } else if constexpr (element == ModElement::i32) {
    return *reinterpret_cast<const int*>(at);
  } else {
    return static_cast<int>(*at != 0);
  }
}

// The address of the element, with each index clamped to its dimension. Offsets are products of unsigned numbers, two
// instructions each.
template <ModElement element, class... Index>
TANDEM_DEVICE const char* mod_address(const ModTensor& tensor, Index... indices) {
  const int at[sizeof...(indices) + 1] = {indices..., 0};
  const char* address = static_cast<const char*>(tensor.data);
#pragma unroll
  for (int n = 0; n < static_cast<int>(sizeof...(indices)); ++n)
    address += static_cast<u64>(static_cast<u32>(min(max(at[n], 0), tensor.size[n] - 1))) *
               static_cast<u64>(tensor.stride[n] * size_of(element));
  return address;
}
template <ModElement element, class... Index>
TANDEM_DEVICE auto mod_gather(const ModTensor& tensor, Index... indices) {
  return mod_load<element>(mod_address<element>(tensor, indices...));
}
template <ModElement element, class... Index>
TANDEM_DEVICE void mod_touch(const ModTensor& tensor, Index... indices) {
  prefetch_global(mod_address<element>(tensor, indices...));
}

// The number of the element within its tensor.
template <class... Index>
TANDEM_DEVICE i64 mod_cell(const ModTensor& tensor, Index... indices) {
  const int at[sizeof...(indices) + 1] = {indices..., 0};
  i64 cell = 0;
#pragma unroll
  for (int n = 0; n < static_cast<int>(sizeof...(indices)); ++n)
    cell = cell * tensor.size[n] + min(max(at[n], 0), tensor.size[n] - 1);
  return cell;
}
