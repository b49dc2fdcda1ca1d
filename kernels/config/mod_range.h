// Interval arithmetic for score_mods and mask_mods: the range of a value over all queries and keys of a block, from the
// ranges of its operands. Each operation of docs/score_mod.md has one function with the name in mod_functions.cuh, for
// host and kernels. A range may be too wide, never too narrow.
#pragma once

// Ints and bools (0 and 1). low <= high.
struct IntRange {
  int low, high;
};
// Floats: low <= high; bounds may be infinite. nan: the value may also be NaN.
struct FloatRange {
  float low, high;
  bool nan;
};

// The maximum number of elements that a gather examines.
constexpr int kRangeElements = 1024;

constexpr IntRange kAnyInt{-2147483647 - 1, 2147483647}, kAnyBool{0, 1};
constexpr float kRangeInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr FloatRange kAnyFloat{-kRangeInfinity, kRangeInfinity, true};

constexpr int range_least(int a, int b) { return a < b ? a : b; }
constexpr int range_most(int a, int b) { return a > b ? a : b; }

constexpr bool is_point(IntRange a) { return a.low == a.high; }
constexpr bool is_bool(IntRange a) { return a.low >= 0 && a.high <= 1; }
constexpr IntRange range_of(int x) { return {x, x}; }
constexpr FloatRange range_of(float x) { return x == x ? FloatRange{x, x, false} : kAnyFloat; }
constexpr IntRange union_of(IntRange a, IntRange b) { return {range_least(a.low, b.low), range_most(a.high, b.high)}; }
constexpr FloatRange union_of(FloatRange a, FloatRange b) {
  return {a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high, a.nan || b.nan};
}
// The range is unknown if a bound is beyond int, because values may have wrapped around.
constexpr IntRange wrapped(long long low, long long high) {
  const bool fits = low >= kAnyInt.low && high <= kAnyInt.high;
  return fits ? IntRange{static_cast<int>(low), static_cast<int>(high)} : kAnyInt;
}
constexpr IntRange bool_range(bool can_be_true, bool can_be_false) { return {!can_be_false, can_be_true}; }

// ---- Ints ----

constexpr IntRange range_negate(IntRange a) {
  return wrapped(-static_cast<long long>(a.high), -static_cast<long long>(a.low));
}
constexpr IntRange range_abs(IntRange a) {
  const long long low = a.low, high = a.high;
  if (low >= 0) return a;
  return high <= 0 ? wrapped(-high, -low) : wrapped(0, -low > high ? -low : high);
}
constexpr int sign_of(int a) { return (a > 0) - (a < 0); }
constexpr IntRange range_sign(IntRange a) { return {sign_of(a.low), sign_of(a.high)}; }
constexpr IntRange range_flip(IntRange a) { return {~a.high, ~a.low}; }
constexpr IntRange range_not(IntRange a) { return {1 - a.high, 1 - a.low}; }
constexpr IntRange range_to_int(IntRange a) { return a; }
constexpr FloatRange range_to_real(IntRange a) {
  return {static_cast<float>(a.low), static_cast<float>(a.high), false};  // rounding is monotonic
}
constexpr IntRange range_add(IntRange a, IntRange b) {
  return wrapped(static_cast<long long>(a.low) + b.low, static_cast<long long>(a.high) + b.high);
}
constexpr IntRange range_subtract(IntRange a, IntRange b) {
  return wrapped(static_cast<long long>(a.low) - b.high, static_cast<long long>(a.high) - b.low);
}
// The range of a function that is monotonic in each operand: the extremes of its corners.
constexpr IntRange between(long long a, long long b, long long c, long long d) {
  const long long low_ab = a < b ? a : b, low_cd = c < d ? c : d, high_ab = a < b ? b : a, high_cd = c < d ? d : c;
  return wrapped(low_ab < low_cd ? low_ab : low_cd, high_ab > high_cd ? high_ab : high_cd);
}
constexpr IntRange range_multiply(IntRange a, IntRange b) {
  const long long low = a.low, high = a.high;
  return between(low * b.low, low * b.high, high * b.low, high * b.high);
}
constexpr long long floor_quotient(long long a, long long b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
constexpr IntRange range_floor_divide(IntRange a, IntRange b) {
  if (b.low == 0 && b.high == 0) return {0, 0};
  if (b.low <= 0 && b.high >= 0) return kAnyInt;
  return between(floor_quotient(a.low, b.low), floor_quotient(a.low, b.high), floor_quotient(a.high, b.low),
                 floor_quotient(a.high, b.high));
}
constexpr IntRange range_modulo(IntRange a, IntRange b) {
  if (b.low == 0 && b.high == 0) return a;
  if (b.low <= 0 && b.high >= 0) return kAnyInt;
  // Within one period of the divisor the remainder grows with a.
  if (is_point(b) && floor_quotient(a.low, b.low) == floor_quotient(a.high, b.low)) {
    const long long period = floor_quotient(a.low, b.low) * b.low;
    return {static_cast<int>(a.low - period), static_cast<int>(a.high - period)};
  }
  return b.low > 0 ? IntRange{0, b.high - 1} : IntRange{b.low + 1, 0};
}
constexpr IntRange range_min(IntRange a, IntRange b) {
  return {range_least(a.low, b.low), range_least(a.high, b.high)};
}
constexpr IntRange range_max(IntRange a, IntRange b) { return {range_most(a.low, b.low), range_most(a.high, b.high)}; }

// The least number of the form 2^n - 1 that is at least x. x is not negative.
constexpr int ones_above(int x) {
  for (int shift = 1; shift < 32; shift *= 2) x |= x >> shift;
  return x;
}
constexpr IntRange range_bit_and(IntRange a, IntRange b) {
  if (is_point(a) && is_point(b)) return range_of(a.low & b.low);
  if (is_bool(a) && is_bool(b)) return {a.low & b.low, a.high & b.high};
  if (a.low >= 0 && b.low >= 0) return {0, range_least(a.high, b.high)};
  if (a.low >= 0 || b.low >= 0) return {0, a.low >= 0 ? a.high : b.high};
  return kAnyInt;
}
constexpr IntRange range_bit_or(IntRange a, IntRange b) {
  if (is_point(a) && is_point(b)) return range_of(a.low | b.low);
  if (is_bool(a) && is_bool(b)) return {a.low | b.low, a.high | b.high};
  if (a.low >= 0 && b.low >= 0) return {range_most(a.low, b.low), ones_above(a.high | b.high)};
  return kAnyInt;
}
constexpr IntRange range_bit_xor(IntRange a, IntRange b) {
  if (is_point(a) && is_point(b)) return range_of(a.low ^ b.low);
  if (a.low >= 0 && b.low >= 0) return {0, ones_above(a.high | b.high)};
  return kAnyInt;
}
constexpr IntRange range_shift_left(IntRange a, IntRange by) {
  if (by.low < 0 || by.high > 31) return by.high < 0 || by.low > 31 ? IntRange{0, 0} : kAnyInt;
  const long long low = a.low, high = a.high, least = 1LL << by.low, most = 1LL << by.high;
  return between(low * least, low * most, high * least, high * most);
}
constexpr IntRange range_shift_right(IntRange a, IntRange by) {
  if (is_point(by)) {
    const int shift = by.low < 0 || by.low > 31 ? 31 : by.low;
    return {a.low >> shift, a.high >> shift};
  }
  return {range_least(a.low, 0), range_most(a.high, -1)};
}
constexpr IntRange range_less(IntRange a, IntRange b) { return bool_range(a.low < b.high, a.high >= b.low); }
constexpr IntRange range_less_equal(IntRange a, IntRange b) { return bool_range(a.low <= b.high, a.high > b.low); }
constexpr IntRange range_equal(IntRange a, IntRange b) {
  return bool_range(a.low <= b.high && b.low <= a.high, !is_point(a) || !is_point(b) || a.low != b.low);
}
constexpr IntRange range_not_equal(IntRange a, IntRange b) { return range_not(range_equal(a, b)); }
constexpr IntRange range_select(IntRange condition, IntRange a, IntRange b) {
  return is_point(condition) ? condition.low != 0 ? a : b : union_of(a, b);
}

// ---- Floats ----

constexpr FloatRange range_select(IntRange condition, FloatRange a, FloatRange b) {
  return is_point(condition) ? condition.low != 0 ? a : b : union_of(a, b);
}
constexpr bool is_finite(FloatRange a) { return a.low > -kRangeInfinity && a.high < kRangeInfinity && !a.nan; }
constexpr FloatRange range_negate(FloatRange a) { return {-a.high, -a.low, a.nan}; }
constexpr FloatRange range_abs(FloatRange a) {
  if (a.low >= 0) return a;
  if (a.high <= 0) return range_negate(a);
  return {0, -a.low > a.high ? -a.low : a.high, a.nan};
}
constexpr float sign_of(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : 0.0f; }
constexpr FloatRange range_sign(FloatRange a) {
  if (a.nan) return {-1, 1, false};
  return {sign_of(a.low), sign_of(a.high), false};
}
constexpr IntRange range_to_int(FloatRange a) {
  if (!is_finite(a) || a.low <= -2147483648.0f || a.high >= 2147483648.0f) return kAnyInt;
  return {static_cast<int>(a.low), static_cast<int>(a.high)};
}
constexpr FloatRange range_add(FloatRange a, FloatRange b) {
  if (!is_finite(a) || !is_finite(b)) return kAnyFloat;
  return {a.low + b.low, a.high + b.high, false};  // rounding is monotonic
}
constexpr FloatRange range_subtract(FloatRange a, FloatRange b) { return range_add(a, range_negate(b)); }
// The next float above a finite one.
constexpr float float_above(float x) {
  if (x == 0) return __builtin_bit_cast(float, 1);
  const int bits = __builtin_bit_cast(int, x);
  return __builtin_bit_cast(float, x > 0 ? bits + 1 : bits - 1);
}
// Widens the bounds by one float, because a compiler may add to a product before it is rounded.
constexpr FloatRange range_multiply(FloatRange a, FloatRange b) {
  if (!is_finite(a) || !is_finite(b)) return kAnyFloat;
  const float corners[] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
  float low = corners[0], high = corners[0];
  for (const float corner : corners) {
    low = corner < low ? corner : low;
    high = corner > high ? corner : high;
  }
  if (low <= -kRangeInfinity || high >= kRangeInfinity) return kAnyFloat;
  return {-float_above(-low), float_above(high), false};
}
constexpr FloatRange range_min(FloatRange a, FloatRange b) {
  return {a.low < b.low ? a.low : b.low, a.high < b.high ? a.high : b.high, a.nan || b.nan};
}
constexpr FloatRange range_max(FloatRange a, FloatRange b) {
  return {a.low > b.low ? a.low : b.low, a.high > b.high ? a.high : b.high, a.nan || b.nan};
}
constexpr FloatRange range_clamp(FloatRange x, FloatRange least, FloatRange most) {
  return range_min(range_max(x, least), most);
}
// A comparison with NaN is false.
constexpr IntRange range_less(FloatRange a, FloatRange b) {
  return bool_range(a.low < b.high, a.nan || b.nan || a.high >= b.low);
}
constexpr IntRange range_less_equal(FloatRange a, FloatRange b) {
  return bool_range(a.low <= b.high, a.nan || b.nan || a.high > b.low);
}
constexpr IntRange range_equal(FloatRange a, FloatRange b) {
  const bool points = a.low == a.high && b.low == b.high && a.low == b.low && !a.nan && !b.nan;
  return bool_range(a.low <= b.high && b.low <= a.high, !points);
}
constexpr IntRange range_not_equal(FloatRange a, FloatRange b) { return range_not(range_equal(a, b)); }

constexpr FloatRange range_floor(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_ceil(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_trunc(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_round(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_exp(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_exp2(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_log(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_log2(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_expm1(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_log1p(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_sin(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_cos(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_erf(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_tanh(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_sigmoid(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_sqrt(FloatRange) { return kAnyFloat; }
constexpr FloatRange range_divide(FloatRange, FloatRange) { return kAnyFloat; }
constexpr FloatRange range_floor_divide(FloatRange, FloatRange) { return kAnyFloat; }
constexpr FloatRange range_modulo(FloatRange, FloatRange) { return kAnyFloat; }
