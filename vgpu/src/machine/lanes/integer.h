// Integer arithmetic. PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision", "SIMD".
#pragma once

#include "vgpu/src/machine/lanes/row.h"

namespace tandem::vgpu::machine {
namespace TANDEM_TARGET {
namespace {

template <class T>
inline constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
template <class T>
inline constexpr T smallest = is_signed<T> ? static_cast<T>(Unsigned<T>{1} << (8 * sizeof(T) - 1)) : T{0};
template <class T>
inline constexpr T largest = static_cast<T>(~static_cast<Unsigned<T>>(smallest<T>));

// Sums and products wrap, because they are computed on unsigned values of at least 32 bits.
template <class T>
inline Place<T> bits(T x) {
  return static_cast<Place<T>>(x);
}
template <class T>
struct WideOf;
template <>
struct WideOf<u16> {
  using Type = u32;
};
template <>
struct WideOf<s16> {
  using Type = s32;
};
template <>
struct WideOf<u32> {
  using Type = u64;
};
template <>
struct WideOf<s32> {
  using Type = s64;
};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
template <>
struct WideOf<u64> {
  using Type = unsigned __int128;
};
template <>
struct WideOf<s64> {
  using Type = __int128;
};
#pragma GCC diagnostic pop
template <class T>
using Wide = typename WideOf<T>::Type;

struct Add {
  template <class T>
  static auto of(T a, T b) {
    return bits(a) + bits(b);
  }
};
struct Sub {
  template <class T>
  static auto of(T a, T b) {
    return bits(a) - bits(b);
  }
};
struct MulLo {
  template <class T>
  static auto of(T a, T b) {
    return bits(a) * bits(b);
  }
};
struct MulHi {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>((Wide<T>{a} * Wide<T>{b}) >> (8 * sizeof(T)));
  }
};
struct MulWide {
  template <class T>
  static Wide<T> of(T a, T b) {
    return static_cast<Wide<T>>(bits(Wide<T>{a}) * bits(Wide<T>{b}));
  }
};
struct MadLo {
  template <class T>
  static auto of(T a, T b, T c) {
    return bits(a) * bits(b) + bits(c);
  }
};
struct MadHi {
  template <class T>
  static auto of(T a, T b, T c) {
    return bits(MulHi::of(a, b)) + bits(c);
  }
};
struct MadHiSat {
  static s32 of(s32 a, s32 b, s32 c) {
    const s64 sum = s64{MulHi::of(a, b)} + c;
    return static_cast<s32>(sum < smallest<s32> ? smallest<s32> : sum > largest<s32> ? largest<s32> : sum);
  }
};
struct MadWide {
  template <class T>
  static auto of(T a, T b, Wide<T> c) {
    return bits(MulWide::of(a, b)) + bits(c);
  }
};

template <class T>
inline T low24(T a) {  // sign-extended where signed
  return static_cast<T>(static_cast<T>(bits(a) << 8) >> 8);
}
struct Mul24Lo {
  template <class T>
  static auto of(T a, T b) {
    return bits(low24(a)) * bits(low24(b));
  }
};
struct Mul24Hi {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>((Wide<T>{low24(a)} * Wide<T>{low24(b)}) >> 16);
  }
};
struct Mad24Lo {
  template <class T>
  static auto of(T a, T b, T c) {
    return Mul24Lo::of(a, b) + bits(c);
  }
};
struct Mad24Hi {
  template <class T>
  static auto of(T a, T b, T c) {
    return bits(Mul24Hi::of(a, b)) + bits(c);
  }
};

struct AddSat {
  static s32 of(s32 a, s32 b) {
    const s64 sum = s64{a} + b;
    return static_cast<s32>(sum < smallest<s32> ? smallest<s32> : sum > largest<s32> ? largest<s32> : sum);
  }
};
struct SubSat {
  static s32 of(s32 a, s32 b) {
    const s64 sum = s64{a} - b;
    return static_cast<s32>(sum < smallest<s32> ? smallest<s32> : sum > largest<s32> ? largest<s32> : sum);
  }
};

struct Min {
  template <class T>
  static T of(T a, T b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    return a > b ? a : b;
  }
};
struct MinRelu {
  static s32 of(s32 a, s32 b) { return Max::of(Min::of(a, b), 0); }
};
struct MaxRelu {
  static s32 of(s32 a, s32 b) { return Max::of(Max::of(a, b), 0); }
};
struct Sad {
  template <class T>
  static auto of(T a, T b, T c) {
    return bits(c) + (a < b ? bits(b) - bits(a) : bits(a) - bits(b));
  }
};
struct Neg {
  template <class T>
  static auto of(T a) {
    return Place<T>{0} - bits(a);
  }
};
struct Abs {
  template <class T>
  static auto of(T a) {
    return a < 0 ? Place<T>{0} - bits(a) : bits(a);
  }
};

// Hardware returns all ones for a division by zero, and the dividend as remainder.
struct Div {
  template <class T>
  static T of(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if (is_signed<T> && b == static_cast<T>(-1)) return static_cast<T>(Place<T>{0} - bits(a));
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T>
  static T of(T a, T b) {
    if (b == 0) return a;
    if (is_signed<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};

// The carry is 0 or 1, in a separate row.
struct AddCarry {
  template <class T>
  static T of(T a, T b, u32 carry) {
    return static_cast<T>(a + b + carry);
  }
};
struct AddCarryOut {
  template <class T>
  static u32 of(T a, T b, u32 carry) {
    const T sum = a + b;
    return u32{sum < a} | u32{static_cast<T>(sum + carry) < sum};
  }
};
struct SubCarry {
  template <class T>
  static T of(T a, T b, u32 borrow) {
    return static_cast<T>(a - b - borrow);
  }
};
struct SubCarryOut {
  template <class T>
  static u32 of(T a, T b, u32 borrow) {
    return u32{a < b} | u32{static_cast<T>(a - b) < borrow};
  }
};

template <class A, class B>
struct Dp4a {
  static u32 of(u32 a, u32 b, u32 c) {
    for (int i = 0; i < 4; ++i)
      c += static_cast<u32>(s32{static_cast<A>(a >> (8 * i))} * s32{static_cast<B>(b >> (8 * i))});
    return c;
  }
};
template <class A, class B, int Shift>  // Shift: 0 for .lo, 16 for .hi
struct Dp2a {
  static u32 of(u32 a, u32 b, u32 c) {
    for (int i = 0; i < 2; ++i)
      c += static_cast<u32>(s32{static_cast<A>(a >> (16 * i))} * s32{static_cast<B>(b >> (8 * i + Shift))});
    return c;
  }
};

// Operates on two 16-bit values in 32 bits.
template <class F, class T>
struct Halves {
  static u32 of(u32 a, u32 b) {
    const auto part = [](u32 x, u32 y, int at) {
      return u32{static_cast<u16>(F::of(static_cast<T>(x >> at), static_cast<T>(y >> at)))} << at;
    };
    return part(a, b, 0) | part(a, b, 16);
  }
};
struct MinRelu16 {
  static s16 of(s16 a, s16 b) { return Max::of(Min::of(a, b), s16{0}); }
};
struct MaxRelu16 {
  static s16 of(s16 a, s16 b) { return Max::of(Max::of(a, b), s16{0}); }
};

#define TANDEM_SAME2(F, name, T)        \
  {                                     \
    name "." #T, R2 { two<F, T, T, T> } \
  }
#define TANDEM_SAME3(F, name, T)             \
  {                                          \
    name "." #T, R3 { three<F, T, T, T, T> } \
  }
#define TANDEM_INTEGERS(M, F, name) \
  M(F, name, u16), M(F, name, s16), M(F, name, u32), M(F, name, s32), M(F, name, u64), M(F, name, s64)

constexpr LaneEntry kInteger[] = {
    TANDEM_INTEGERS(TANDEM_SAME2, Add, "add"),
    TANDEM_INTEGERS(TANDEM_SAME2, Sub, "sub"),
    TANDEM_INTEGERS(TANDEM_SAME2, MulLo, "mul.lo"),
    TANDEM_INTEGERS(TANDEM_SAME2, MulHi, "mul.hi"),
    TANDEM_INTEGERS(TANDEM_SAME2, Div, "div"),
    TANDEM_INTEGERS(TANDEM_SAME2, Rem, "rem"),
    TANDEM_INTEGERS(TANDEM_SAME2, Min, "min"),
    TANDEM_INTEGERS(TANDEM_SAME2, Max, "max"),
    TANDEM_INTEGERS(TANDEM_SAME3, MadLo, "mad.lo"),
    TANDEM_INTEGERS(TANDEM_SAME3, MadHi, "mad.hi"),
    TANDEM_INTEGERS(TANDEM_SAME3, Sad, "sad"),
    {"add.sat.s32", R2{two<AddSat, s32, s32, s32>}},
    {"sub.sat.s32", R2{two<SubSat, s32, s32, s32>}},
    {"mad.hi.sat.s32", R3{three<MadHiSat, s32, s32, s32, s32>}},
    {"mul.wide.u16", R2{two<MulWide, u32, u16, u16>}},
    {"mul.wide.s16", R2{two<MulWide, s32, s16, s16>}},
    {"mul.wide.u32", R2{two<MulWide, u64, u32, u32>}},
    {"mul.wide.s32", R2{two<MulWide, s64, s32, s32>}},
    {"mad.wide.u16", R3{three<MadWide, u32, u16, u16, u32>}},
    {"mad.wide.s16", R3{three<MadWide, s32, s16, s16, s32>}},
    {"mad.wide.u32", R3{three<MadWide, u64, u32, u32, u64>}},
    {"mad.wide.s32", R3{three<MadWide, s64, s32, s32, s64>}},
    TANDEM_SAME2(Mul24Lo, "mul24.lo", u32),
    TANDEM_SAME2(Mul24Lo, "mul24.lo", s32),
    TANDEM_SAME2(Mul24Hi, "mul24.hi", u32),
    TANDEM_SAME2(Mul24Hi, "mul24.hi", s32),
    TANDEM_SAME3(Mad24Lo, "mad24.lo", u32),
    TANDEM_SAME3(Mad24Lo, "mad24.lo", s32),
    TANDEM_SAME3(Mad24Hi, "mad24.hi", u32),
    TANDEM_SAME3(Mad24Hi, "mad24.hi", s32),
    {"min.relu.s32", R2{two<MinRelu, s32, s32, s32>}},
    {"max.relu.s32", R2{two<MaxRelu, s32, s32, s32>}},
    {"neg.s16", R1{one<Neg, s16, s16>}},
    {"neg.s32", R1{one<Neg, s32, s32>}},
    {"neg.s64", R1{one<Neg, s64, s64>}},
    {"abs.s16", R1{one<Abs, s16, s16>}},
    {"abs.s32", R1{one<Abs, s32, s32>}},
    {"abs.s64", R1{one<Abs, s64, s64>}},
    {"carry.add.u32", R3{three<AddCarry, u32, u32, u32, u32>}},
    {"carry.add.u64", R3{three<AddCarry, u64, u64, u64, u32>}},
    {"carry.add.out.u32", R3{three<AddCarryOut, u32, u32, u32, u32>}},
    {"carry.add.out.u64", R3{three<AddCarryOut, u32, u64, u64, u32>}},
    {"carry.sub.u32", R3{three<SubCarry, u32, u32, u32, u32>}},
    {"carry.sub.u64", R3{three<SubCarry, u64, u64, u64, u32>}},
    {"carry.sub.out.u32", R3{three<SubCarryOut, u32, u32, u32, u32>}},
    {"carry.sub.out.u64", R3{three<SubCarryOut, u32, u64, u64, u32>}},
    {"dp4a.u32.u32", R3{three<Dp4a<u8, u8>, u32, u32, u32, u32>}},
    {"dp4a.u32.s32", R3{three<Dp4a<u8, s8>, u32, u32, u32, u32>}},
    {"dp4a.s32.u32", R3{three<Dp4a<s8, u8>, u32, u32, u32, u32>}},
    {"dp4a.s32.s32", R3{three<Dp4a<s8, s8>, u32, u32, u32, u32>}},
    {"dp2a.lo.u32.u32", R3{three<Dp2a<u16, u8, 0>, u32, u32, u32, u32>}},
    {"dp2a.lo.u32.s32", R3{three<Dp2a<u16, s8, 0>, u32, u32, u32, u32>}},
    {"dp2a.lo.s32.u32", R3{three<Dp2a<s16, u8, 0>, u32, u32, u32, u32>}},
    {"dp2a.lo.s32.s32", R3{three<Dp2a<s16, s8, 0>, u32, u32, u32, u32>}},
    {"dp2a.hi.u32.u32", R3{three<Dp2a<u16, u8, 16>, u32, u32, u32, u32>}},
    {"dp2a.hi.u32.s32", R3{three<Dp2a<u16, s8, 16>, u32, u32, u32, u32>}},
    {"dp2a.hi.s32.u32", R3{three<Dp2a<s16, u8, 16>, u32, u32, u32, u32>}},
    {"dp2a.hi.s32.s32", R3{three<Dp2a<s16, s8, 16>, u32, u32, u32, u32>}},
    {"add.u16x2", R2{two<Halves<Add, u16>, u32, u32, u32>}},
    {"add.s16x2", R2{two<Halves<Add, u16>, u32, u32, u32>}},
    {"min.u16x2", R2{two<Halves<Min, u16>, u32, u32, u32>}},
    {"min.s16x2", R2{two<Halves<Min, s16>, u32, u32, u32>}},
    {"max.u16x2", R2{two<Halves<Max, u16>, u32, u32, u32>}},
    {"max.s16x2", R2{two<Halves<Max, s16>, u32, u32, u32>}},
    {"min.relu.s16x2", R2{two<Halves<MinRelu16, s16>, u32, u32, u32>}},
    {"max.relu.s16x2", R2{two<Halves<MaxRelu16, s16>, u32, u32, u32>}},
};

}  // namespace
}  // namespace TANDEM_TARGET
}  // namespace tandem::vgpu::machine
