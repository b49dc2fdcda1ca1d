// Plain loops that the compiler turns into vector instructions. Only the table is visible to other files, and no
// function of other files is called. Therefore no code for one instruction set is linked into generic code.
#include "score_mod/tile_loops.h"

namespace tandem::score_mod {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

// ---- Functions of floats, in float64: the error of a short series vanishes in the rounding to float32 -----------

inline u64 bits_of(double x) { return __builtin_bit_cast(u64, x); }
inline double double_of(u64 bits) { return __builtin_bit_cast(double, bits); }

constexpr double kLn2 = 0.6931471805599453094, kLog2e = 1.4426950408889634074;

// 2^x with a relative error of 7e-12; 0 and infinity far beyond float32's range.
inline double exp2_of(double x) {
  x = x > 1000 ? 1000 : x;
  x = x < -1000 ? -1000 : x;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding a number rounds it to an integer
  const double shifted = x + kRound;
  const double r = (x - (shifted - kRound)) * kLn2;  // |r| <= 0.35
  double p = 1.0 / 362880;                           // e^r by its Taylor series
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1;
  p = p * r + 1;
  return p * double_of((bits_of(shifted) + 1023) << 52);
}

// Computes ln x for a positive normal number: x = 2^e m with m from sqrt(1/2) to sqrt(2).
inline double log_of(double x) {
  constexpr u64 kSqrtHalf = 0x3FE6A09E667F3BCD;
  const u64 above = bits_of(x) - kSqrtHalf + (u64{1024} << 52);
  const auto exponent = static_cast<int32_t>(above >> 52) - 1024;
  const double m = double_of(bits_of(x) - (static_cast<u64>(static_cast<int64_t>(exponent)) << 52));
  const double f = (m - 1) / (m + 1), s = f * f;  // |f| < 0.172: ln m = 2 (f + f^3 / 3 + ...)
  double p = 1.0 / 17;
  p = p * s + 1.0 / 15;
  p = p * s + 1.0 / 13;
  p = p * s + 1.0 / 11;
  p = p * s + 1.0 / 9;
  p = p * s + 1.0 / 7;
  p = p * s + 1.0 / 5;
  p = p * s + 1.0 / 3;
  p = p * s + 1;
  return exponent * kLn2 + 2 * f * p;
}

// Extends the logarithm of positive numbers to every float.
inline float with_edges(float x, double logarithm) {
  float result = static_cast<float>(logarithm);
  result = x == 0 ? -__builtin_inff() : result;
  result = x == __builtin_inff() ? x : result;
  return x >= 0 ? result : __builtin_nanf("");
}

inline float exp2_float(float x) { return static_cast<float>(exp2_of(x)); }
inline float exp_float(float x) { return static_cast<float>(exp2_of(x * kLog2e)); }
inline float log_float(float x) { return with_edges(x, log_of(x)); }
inline float log2_float(float x) { return with_edges(x, log_of(x) * kLog2e); }
inline float sigmoid_float(float x) { return static_cast<float>(1 / (1 + exp2_of(x * -kLog2e))); }
inline float tanh_float(float x) {
  const double wide = x, size = __builtin_fabs(wide);
  const double large = 1 - 2 / (1 + exp2_of(size * (2 * kLog2e)));
  const double small = size - size * size * size / 3;  // the general form would cancel for small x
  return static_cast<float>(__builtin_copysign(size < 0.001 ? small : large, wide));
}
// One libm call per element, in float64. The call's error vanishes in the rounding to float32.
inline float expm1_float(float x) { return static_cast<float>(__builtin_expm1(static_cast<double>(x))); }
inline float log1p_float(float x) { return static_cast<float>(__builtin_log1p(static_cast<double>(x))); }
inline float sin_float(float x) { return static_cast<float>(__builtin_sin(static_cast<double>(x))); }
inline float cos_float(float x) { return static_cast<float>(__builtin_cos(static_cast<double>(x))); }
inline float erf_float(float x) { return static_cast<float>(__builtin_erf(static_cast<double>(x))); }

// ---- Floats ---------------------------------------------------------------------------------------------------------

inline float negate(float a) { return -a; }
inline float abs_float(float a) { return __builtin_fabsf(a); }
inline float sign_float(float a) { return (a > 0 ? 1.0f : 0.0f) - (a < 0 ? 1.0f : 0.0f); }
inline float floor_float(float a) { return __builtin_floorf(a); }
inline float ceil_float(float a) { return __builtin_ceilf(a); }
inline float trunc_float(float a) { return __builtin_truncf(a); }
inline float round_float(float a) { return __builtin_nearbyintf(a); }
inline float sqrt_float(float a) { return __builtin_sqrtf(a); }
inline float add(float a, float b) { return a + b; }
inline float subtract(float a, float b) { return a - b; }
inline float multiply(float a, float b) { return a * b; }
inline float divide(float a, float b) { return a / b; }
inline float min_float(float a, float b) { return ((a < b) | (a != a)) ? a : b; }
inline float max_float(float a, float b) { return ((a > b) | (a != a)) ? a : b; }
inline float clamp_float(float x, float least, float most) { return min_float(max_float(x, least), most); }
inline float modulo_float(float a, float b) {
  const float rest = __builtin_fmodf(a, b);
  return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}
inline float floor_divide_float(float a, float b) {
  if (b == 0) return a / b;
  const float rest = __builtin_fmodf(a, b);
  float quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return __builtin_copysignf(0.0f, a / b);
  const float whole = __builtin_floorf(quotient);
  return quotient - whole > 0.5f ? whole + 1 : whole;
}
inline int32_t to_int(float a) {
  const bool inside = (a > -2147483648.0f) & (a < 2147483648.0f);
  const auto whole = static_cast<int32_t>(inside ? a : 0.0f);
  const int32_t edge = a >= 2147483648.0f ? INT32_MAX : a <= -2147483648.0f ? INT32_MIN : 0;
  return inside ? whole : edge;
}

// ---- Ints, as defined in arithmetic.h -------------------------------------------------------------------------------

inline int32_t wrap(u32 bits) { return static_cast<int32_t>(bits); }
inline int32_t negate_int(int32_t a) { return wrap(0 - static_cast<u32>(a)); }
inline int32_t abs_int(int32_t a) { return a < 0 ? negate_int(a) : a; }
inline int32_t sign_int(int32_t a) { return (a > 0) - (a < 0); }
inline int32_t flip_int(int32_t a) { return ~a; }
inline int32_t flip_bool(int32_t a) { return a ^ 1; }
inline int32_t add_int(int32_t a, int32_t b) { return wrap(static_cast<u32>(a) + static_cast<u32>(b)); }
inline int32_t subtract_int(int32_t a, int32_t b) { return wrap(static_cast<u32>(a) - static_cast<u32>(b)); }
inline int32_t multiply_int(int32_t a, int32_t b) { return wrap(static_cast<u32>(a) * static_cast<u32>(b)); }
inline int32_t min_int(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t max_int(int32_t a, int32_t b) { return a > b ? a : b; }
inline int32_t and_int(int32_t a, int32_t b) { return a & b; }
inline int32_t or_int(int32_t a, int32_t b) { return a | b; }
inline int32_t xor_int(int32_t a, int32_t b) { return a ^ b; }
inline int32_t shift_left(int32_t a, int32_t by) {
  return static_cast<u32>(by) > 31 ? 0 : wrap(static_cast<u32>(a) << (by & 31));
}
inline int32_t shift_right(int32_t a, int32_t by) { return a >> (static_cast<u32>(by) > 31 ? 31 : by); }
// The quotient is computed in float64, which is exact: the rounding error is smaller than the distance of a fraction
// from an integer.
inline int32_t floor_divide_int(int32_t a, int32_t b) {
  const double quotient = __builtin_floor(static_cast<double>(a) / (b == 0 ? 1.0 : static_cast<double>(b)));
  const bool fits = quotient < 2147483648.0;  // false only for INT_MIN / -1
  const auto whole = static_cast<int32_t>(fits ? quotient : 0.0);
  return b == 0 ? 0 : fits ? whole : INT32_MIN;
}
inline int32_t modulo_int(int32_t a, int32_t b) { return subtract_int(a, multiply_int(floor_divide_int(a, b), b)); }

inline float to_real(int32_t a) { return static_cast<float>(a); }
inline int32_t same(int32_t a) { return a; }

template <class T>
inline int32_t less(T a, T b) {
  return a < b;
}
template <class T>
inline int32_t less_equal(T a, T b) {
  return a <= b;
}
template <class T>
inline int32_t equal(T a, T b) {
  return a == b;
}
template <class T>
inline int32_t not_equal(T a, T b) {
  return a != b;
}

// ---- Loops ----------------------------------------------------------------------------------------------------------

template <class To, class T, To (*f)(T)>
void loop1(const LoopArguments& arguments) {
  auto* __restrict to = static_cast<To*>(arguments.to);
  const auto* __restrict a = static_cast<const T*>(arguments.from[0]);
  for (int i = 0; i < arguments.count; ++i) to[i] = f(a[i]);
}

template <class To, class T, To (*f)(T, T)>
void loop2(const LoopArguments& arguments) {
  auto* __restrict to = static_cast<To*>(arguments.to);
  const auto* a = static_cast<const T*>(arguments.from[0]);
  const auto* b = static_cast<const T*>(arguments.from[1]);
  for (int i = 0; i < arguments.count; ++i) to[i] = f(a[i], b[i]);
}

void loop_clamp(const LoopArguments& arguments) {
  auto* __restrict to = static_cast<float*>(arguments.to);
  const auto* x = static_cast<const float*>(arguments.from[0]);
  const auto* least = static_cast<const float*>(arguments.from[1]);
  const auto* most = static_cast<const float*>(arguments.from[2]);
  for (int i = 0; i < arguments.count; ++i) to[i] = clamp_float(x[i], least[i], most[i]);
}

template <class T>
void loop_select(const LoopArguments& arguments) {
  auto* __restrict to = static_cast<T*>(arguments.to);
  const auto* condition = static_cast<const int32_t*>(arguments.from[0]);
  const auto* a = static_cast<const T*>(arguments.from[1]);
  const auto* b = static_cast<const T*>(arguments.from[2]);
  for (int i = 0; i < arguments.count; ++i) {
    const T yes = a[i], no = b[i];  // loads both, so that no element branches
    to[i] = condition[i] != 0 ? yes : no;
  }
}

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct Bool {
  uint8_t byte;
};

inline float load(const double* at) { return static_cast<float>(*at); }
inline float load(const float* at) { return *at; }
inline float load(const Bf16* at) { return __builtin_bit_cast(float, static_cast<u32>(at->bits) << 16); }
inline float load(const F16* at) {
  const u32 sign = static_cast<u32>(at->bits & 0x8000) << 16, rest = at->bits & 0x7fff;
  const float small = static_cast<float>(rest) * 0x1p-24f;  // exponent 0: only the fraction
  const u32 large = (rest << 13) + ((rest >= 0x7c00 ? 224u : 112u) << 23);
  return __builtin_bit_cast(float, sign | (rest < 0x400 ? __builtin_bit_cast(u32, small) : large));
}
inline int32_t load(const int64_t* at) {
  return static_cast<int32_t>(*at < INT32_MIN ? INT32_MIN : *at > INT32_MAX ? INT32_MAX : *at);
}
inline int32_t load(const int32_t* at) { return *at; }
inline int32_t load(const Bool* at) { return at->byte != 0; }

template <class To, class T>
void loop_gather(const LoopArguments& arguments) {
  const TensorView& tensor = *arguments.tensor;
  int64_t offsets[kTile];
  for (int i = 0; i < arguments.count; ++i) offsets[i] = 0;
  for (int dimension = 0; dimension < tensor.rank; ++dimension) {
    const auto* index = static_cast<const int32_t*>(arguments.from[dimension]);
    const int32_t last = tensor.size[dimension] - 1;
    const int64_t stride = tensor.stride[dimension];
    for (int i = 0; i < arguments.count; ++i) {
      offsets[i] += min_int(max_int(index[i], 0), last) * stride;
    }
  }
  auto* __restrict to = static_cast<To*>(arguments.to);
  const T* data = reinterpret_cast<const T*>(tensor.data);
  for (int i = 0; i < arguments.count; ++i) to[i] = load(data + offsets[i]);
}

// ---- The table ------------------------------------------------------------------------------------------------------

constexpr void add_conversions(TileLoops* table) {
  const auto set = [table](Op op, Type type, Loop loop) {
    table->loops[static_cast<int>(op)][static_cast<int>(type)] = loop;
  };
  set(Op::select, Type::boolean, loop_select<int32_t>);
  set(Op::select, Type::integer, loop_select<int32_t>);
  set(Op::select, Type::real, loop_select<float>);
  set(Op::to_real, Type::boolean, loop1<float, int32_t, to_real>);
  set(Op::to_real, Type::integer, loop1<float, int32_t, to_real>);
  set(Op::to_int, Type::boolean, loop1<int32_t, int32_t, same>);
  set(Op::to_int, Type::real, loop1<int32_t, float, to_int>);
}

constexpr void add_gathers(TileLoops* table) {
  table->gathers[static_cast<int>(Element::f64)] = loop_gather<float, double>;
  table->gathers[static_cast<int>(Element::f32)] = loop_gather<float, float>;
  table->gathers[static_cast<int>(Element::bf16)] = loop_gather<float, Bf16>;
  table->gathers[static_cast<int>(Element::f16)] = loop_gather<float, F16>;
  table->gathers[static_cast<int>(Element::i64)] = loop_gather<int32_t, int64_t>;
  table->gathers[static_cast<int>(Element::i32)] = loop_gather<int32_t, int32_t>;
  table->gathers[static_cast<int>(Element::boolean)] = loop_gather<int32_t, Bool>;
}

constexpr TileLoops make_table(const char* name) {
  TileLoops table{name, {}, {}};
  const auto bools = [&table](Op op, Loop loop) { table.loops[static_cast<int>(op)][0] = loop; };
  const auto ints = [&table](Op op, Loop loop) { table.loops[static_cast<int>(op)][1] = loop; };
  const auto floats = [&table](Op op, Loop loop) { table.loops[static_cast<int>(op)][2] = loop; };
  const auto on_float = [&]<float (*f)(float)>(Op op) { floats(op, loop1<float, float, f>); };
  const auto on_floats = [&]<float (*f)(float, float)>(Op op) { floats(op, loop2<float, float, f>); };
  const auto on_int = [&]<int32_t (*f)(int32_t)>(Op op) { ints(op, loop1<int32_t, int32_t, f>); };
  const auto on_ints = [&]<int32_t (*f)(int32_t, int32_t)>(Op op) { ints(op, loop2<int32_t, int32_t, f>); };
  const auto on_bools = [&]<int32_t (*f)(int32_t, int32_t)>(Op op) { bools(op, loop2<int32_t, int32_t, f>); };

  on_float.operator()<negate>(Op::negate);
  on_float.operator()<abs_float>(Op::abs);
  on_float.operator()<sign_float>(Op::sign);
  on_float.operator()<floor_float>(Op::floor);
  on_float.operator()<ceil_float>(Op::ceil);
  on_float.operator()<trunc_float>(Op::trunc);
  on_float.operator()<round_float>(Op::round);
  on_float.operator()<exp_float>(Op::exp);
  on_float.operator()<exp2_float>(Op::exp2);
  on_float.operator()<log_float>(Op::log);
  on_float.operator()<log2_float>(Op::log2);
  on_float.operator()<expm1_float>(Op::expm1);
  on_float.operator()<log1p_float>(Op::log1p);
  on_float.operator()<sin_float>(Op::sin);
  on_float.operator()<cos_float>(Op::cos);
  on_float.operator()<erf_float>(Op::erf);
  on_float.operator()<tanh_float>(Op::tanh);
  on_float.operator()<sigmoid_float>(Op::sigmoid);
  on_float.operator()<sqrt_float>(Op::sqrt);
  on_floats.operator()<add>(Op::add);
  on_floats.operator()<subtract>(Op::subtract);
  on_floats.operator()<multiply>(Op::multiply);
  on_floats.operator()<divide>(Op::divide);
  on_floats.operator()<floor_divide_float>(Op::floor_divide);
  on_floats.operator()<modulo_float>(Op::modulo);
  on_floats.operator()<min_float>(Op::min);
  on_floats.operator()<max_float>(Op::max);
  floats(Op::clamp, loop_clamp);

  on_int.operator()<negate_int>(Op::negate);
  on_int.operator()<abs_int>(Op::abs);
  on_int.operator()<sign_int>(Op::sign);
  on_int.operator()<flip_int>(Op::flip);
  on_ints.operator()<add_int>(Op::add);
  on_ints.operator()<subtract_int>(Op::subtract);
  on_ints.operator()<multiply_int>(Op::multiply);
  on_ints.operator()<floor_divide_int>(Op::floor_divide);
  on_ints.operator()<modulo_int>(Op::modulo);
  on_ints.operator()<min_int>(Op::min);
  on_ints.operator()<max_int>(Op::max);
  on_ints.operator()<and_int>(Op::bit_and);
  on_ints.operator()<or_int>(Op::bit_or);
  on_ints.operator()<xor_int>(Op::bit_xor);
  on_ints.operator()<shift_left>(Op::shift_left);
  on_ints.operator()<shift_right>(Op::shift_right);

  bools(Op::flip, loop1<int32_t, int32_t, flip_bool>);
  on_bools.operator()<and_int>(Op::bit_and);
  on_bools.operator()<or_int>(Op::bit_or);
  on_bools.operator()<xor_int>(Op::bit_xor);

  on_ints.operator()<less<int32_t>>(Op::less);
  on_ints.operator()<less_equal<int32_t>>(Op::less_equal);
  on_ints.operator()<equal<int32_t>>(Op::equal);
  on_ints.operator()<not_equal<int32_t>>(Op::not_equal);
  on_bools.operator()<equal<int32_t>>(Op::equal);
  on_bools.operator()<not_equal<int32_t>>(Op::not_equal);
  floats(Op::less, loop2<int32_t, float, less<float>>);
  floats(Op::less_equal, loop2<int32_t, float, less_equal<float>>);
  floats(Op::equal, loop2<int32_t, float, equal<float>>);
  floats(Op::not_equal, loop2<int32_t, float, not_equal<float>>);

  add_conversions(&table);
  add_gathers(&table);
  return table;
}

}  // namespace

#define TANDEM_TEXT_(x) #x
#define TANDEM_TEXT(x) TANDEM_TEXT_(x)
#define TANDEM_TABLE_(target) tile_loops_##target
#define TANDEM_TABLE(target) TANDEM_TABLE_(target)

extern const TileLoops TANDEM_TABLE(TANDEM_TARGET);
const TileLoops TANDEM_TABLE(TANDEM_TARGET) = make_table(TANDEM_TEXT(TANDEM_TARGET));

}  // namespace tandem::score_mod
