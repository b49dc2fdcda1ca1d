// Conversions of integers, and float64 arithmetic. units/numbers.h has the arithmetic of float32 and narrower types.
// PTX ISA, "cvt", "Floating Point Instructions".
#pragma once

#include "vgpu/src/machine/lanes/compare.h"
#include "vgpu/src/units/tiny.h"

namespace tandem::vgpu::machine {
namespace TANDEM_TARGET {
namespace {

// Converts integers to integers: extended by the source's sign, truncated, or saturated.
template <bool Saturate, class D>
struct Convert {
  template <class A>
  static D of(A a) {
    if constexpr (Saturate) {
      if (a < A{0} && !is_signed<D>) return 0;
      if (a < A{0}) return static_cast<s64>(a) < static_cast<s64>(smallest<D>) ? smallest<D> : static_cast<D>(a);
      return static_cast<u64>(a) > static_cast<u64>(largest<D>) ? largest<D> : static_cast<D>(a);
    } else {
      return static_cast<D>(a);
    }
  }
};

// Converts integers to floating point, exact in float64 up to 32 bits; the environment sets the rounding mode. Clang
// converts unsigned integers by subtracting powers of two, which gives -0 for 0 when rounding down.
template <class D>
struct ToReal {
  template <class A>
  static D of(A a) {
    const auto real = static_cast<D>(a);
    if constexpr (is_signed<A>) return real;
    using Bits = std::conditional_t<sizeof(D) == 8, u64, u32>;
    return __builtin_bit_cast(D, __builtin_bit_cast(Bits, real) << 1 >> 1);
  }
};

// Converts floating point to integers. Mode: .rni .rzi .rmi .rpi. NaN gives 0, or in 64 bits the lowest integer.
enum class Integral { rni, rzi, rmi, rpi };
template <Integral Mode>
inline f64 integral(f64 x) {
  switch (Mode) {
    case Integral::rni: return __builtin_rint(x);
    case Integral::rzi: return __builtin_trunc(x);
    case Integral::rmi: return __builtin_floor(x);
    default: return __builtin_ceil(x);
  }
}
template <Integral Mode, class D, bool Ftz>
struct ToInteger {
  template <class A>
  static D of(A a) {
    if constexpr (sizeof(A) == 4 && Ftz) a = flush(a);
    if (__builtin_isnan(a))
      return sizeof(A) == 8 || sizeof(D) == 8 ? static_cast<D>(Unsigned<D>{1} << (8 * sizeof(D) - 1)) : D{0};
    const f64 x = integral<Mode>(static_cast<f64>(a));
    constexpr f64 kEnd = static_cast<f64>(Unsigned<D>{1} << (8 * sizeof(D) - 1)) * (is_signed<D> ? 1.0 : 2.0);
    if (x >= kEnd) return largest<D>;
    if (x <= static_cast<f64>(smallest<D>)) return smallest<D>;
    return static_cast<D>(x);
  }
};
template <Integral Mode, bool Ftz>
struct RoundReal {
  static f32 of(f32 a) {
    if (__builtin_isnan(a)) return __builtin_bit_cast(f32, 0x7fffffffu);
    if (Ftz) a = flush(a);
    return static_cast<f32>(integral<Mode>(a));
  }
  static f64 of(f64 a) { return integral<Mode>(a); }
};

// A float64 NaN keeps its mantissa and becomes quiet. With two NaNs the later operand wins, in this order: second
// factor, addend, first factor in a fused product, and dividend first in a division. A new NaN is negative.
inline f64 quiet(f64 a) { return __builtin_bit_cast(f64, __builtin_bit_cast(u64, a) | 0x0008000000000000u); }
inline f64 with_nan(f64 result, f64 first, f64 second) {
  if (result == result) return result;
  if (first != first) return quiet(first);
  return second != second ? quiet(second) : __builtin_bit_cast(f64, u64{0xfff8000000000000u});
}
struct RealAdd {
  static f64 of(f64 a, f64 b) { return with_nan(a + b, b, a); }
};
struct RealSub {
  static f64 of(f64 a, f64 b) { return with_nan(a - b, b, a); }
};
struct RealMul {
  static f64 of(f64 a, f64 b) { return with_nan(a * b, b, a); }
};
struct RealDiv {
  static f64 of(f64 a, f64 b) { return with_nan(a / b, a, b); }
};
struct RealFma {
  static f64 of(f64 a, f64 b, f64 c) { return b != b ? quiet(b) : with_nan(__builtin_fma(a, b, c), c, a); }
};
struct RealSqrt {
  static f64 of(f64 a) { return with_nan(__builtin_sqrt(a), a, a); }
};
struct RealRcp {
  static f64 of(f64 a) { return with_nan(1.0 / a, a, a); }
};
struct RealRsqrt {
  static f64 of(f64 a) { return with_nan(1.0 / __builtin_sqrt(a), a, a); }
};
template <bool Max>
struct RealChoice {
  static f64 of(f64 a, f64 b) {
    if (b != b) return a != a ? quiet(b) : a;
    if (a != a) return b;
    if (a == b) return (__builtin_signbit(a) != 0) == Max ? b : a;
    return (a < b) == Max ? b : a;
  }
};
// The sign of a NaN does not change.
struct RealNeg {
  static f64 of(f64 a) { return a != a ? quiet(a) : -a; }
};
struct RealAbs {
  static f64 of(f64 a) { return a != a ? quiet(a) : __builtin_fabs(a); }
};

inline f32 plain(f32 a) { return a != a ? __builtin_bit_cast(f32, 0x7fffffffu) : a; }
inline u32 upper_of_nan(f64 a, int bits) { return static_cast<u32>(__builtin_bit_cast(u64, quiet(a)) >> (52 - bits)); }

// A NaN of float64 keeps its sign and the upper bits of its mantissa.
struct Narrow {
  static f32 of(f64 a) {
    if (a == a) return static_cast<f32>(a);
    return __builtin_bit_cast(f32, (upper_of_nan(a, 23) & 0x7fffffffu) | (__builtin_signbit(a) != 0 ? 0x80000000u : 0));
  }
};
template <int Mantissa>
struct NarrowNan {  // the 16-bit number, unless a is NaN
  static u32 of(u32 number, f64 a) {
    return a == a ? number : (upper_of_nan(a, Mantissa) & 0x7fffu) | (__builtin_signbit(a) != 0 ? 0x8000u : 0);
  }
};
template <units::Rounding R>
struct NarrowFlushed {
  static f32 of(f64 a) { return units::is_tiny<R>(a) ? (__builtin_signbit(a) != 0 ? -0.0f : 0.0f) : Narrow::of(a); }
};
struct Widen {
  static f64 of(f32 a) { return a; }
};
struct WidenFlushed {
  static f64 of(f32 a) { return flush(plain(a)); }
};
struct FlushOnly {
  static f32 of(f32 a) { return flush(a); }
};
struct NanOnly {
  static f32 of(f32 a) { return plain(a); }
};
struct SaturateReal {
  static f64 of(f64 a) { return a > 0 ? (a < 1 ? a : 1.0) : 0.0; }
};

// The NaN of the GPU, without the sign of an exclusive or.
struct PlainNan32 {
  static u32 of(u32 a) { return a == 0xffffffffu ? 0x7fffffffu : a; }
};
struct PlainNan16 {
  static u32 of(u32 a) {
    a = (a & 0xffff) == 0xffff ? a & ~0x8000u : a;
    return a >> 16 == 0xffff ? a & ~0x80000000u : a;
  }
};

// For narrower formats: float32 with a sticky last bit, so that one more rounding gives the correctly rounded result.
struct ToOdd {
  static f32 of(f64 a) {
    const f32 near = static_cast<f32>(a);
    if (a != a || static_cast<f64>(near) == a || near - near != 0) return near;
    u32 image = __builtin_bit_cast(u32, near);
    const f64 back = static_cast<f64>(near);
    if ((a < 0 ? -back : back) > (a < 0 ? -a : a)) --image;  // toward zero, then odd
    return __builtin_bit_cast(f32, image | 1);
  }
  static f32 of(u64 a) {
    const int zeros = a == 0 ? 0 : __builtin_clzll(a);
    const u64 top = a << zeros;
    const u64 sticky = (top & 0x7ff) != 0 ? u64{0x800} : u64{0};
    const f32 odd = of(static_cast<f64>((top & ~u64{0x7ff}) | sticky));
    return __builtin_ldexpf(odd, -zeros);
  }
  static f32 of(s64 a) { return a < 0 ? -of(static_cast<u64>(0) - static_cast<u64>(a)) : of(static_cast<u64>(a)); }
};

struct Neg32 {
  static u32 of(u32 a) { return a ^ 0x80000000u; }
};
struct Abs32 {
  static u32 of(u32 a) { return a & 0x7fffffffu; }
};
// The instructions add zero, so that a NaN becomes the GPU's NaN.
struct RealNeg32 {
  static f32 of(f32 a) { return plain(-a); }
};
struct RealAbs32 {
  static f32 of(f32 a) { return plain(__builtin_fabsf(a)); }
};
template <u32 Sign>
struct NegBits {
  static u32 of(u32 a) { return a ^ Sign; }
};
template <u32 Sign>
struct AbsBits {
  static u32 of(u32 a) { return a & ~Sign; }
};
struct CopySign32 {
  static u32 of(u32 a, u32 b) { return (a & 0x80000000u) | (b & 0x7fffffffu); }
};  // sign of a
struct CopySign64 {
  static u64 of(u64 a, u64 b) { return (a & 0x8000000000000000u) | (b & 0x7fffffffffffffffu); }
};
struct XorSign32 {
  static u32 of(u32 a, u32 b) { return (a ^ b) & 0x80000000u; }
};
struct XorSign16 {
  static u32 of(u32 a, u32 b) { return (a ^ b) & 0x80008000u; }
};

#define TANDEM_CVT(D, A)                                     \
  {"cvt." #D "." #A, R1{one<Convert<false, D>, D, A>}}, {    \
    "cvt.sat." #D "." #A, R1 { one<Convert<true, D>, D, A> } \
  }
#define TANDEM_CVTS(D)                                                                              \
  TANDEM_CVT(D, u8), TANDEM_CVT(D, s8), TANDEM_CVT(D, u16), TANDEM_CVT(D, s16), TANDEM_CVT(D, u32), \
      TANDEM_CVT(D, s32), TANDEM_CVT(D, u64), TANDEM_CVT(D, s64)
#define TANDEM_TO_REAL(A)                                                                         \
  {"cvt.f32." #A, R1{one<ToReal<f32>, f32, A>}}, {"cvt.f64." #A, R1{one<ToReal<f64>, f64, A>}}, { \
    "odd.f32." #A, R1 { one<ToReal<f32>, f32, A> }                                                \
  }
#define TANDEM_TO_INTEGER(mode, D)                                                             \
  {"cvt." #mode "." #D ".f32", R1{one<ToInteger<Integral::mode, D, false>, D, f32>}},          \
      {"cvt." #mode ".ftz." #D ".f32", R1{one<ToInteger<Integral::mode, D, true>, D, f32>}}, { \
    "cvt." #mode "." #D ".f64", R1 { one<ToInteger<Integral::mode, D, false>, D, f64> }        \
  }
#define TANDEM_TO_INTEGERS(mode)                                                                \
  TANDEM_TO_INTEGER(mode, u8), TANDEM_TO_INTEGER(mode, s8), TANDEM_TO_INTEGER(mode, u16),       \
      TANDEM_TO_INTEGER(mode, s16), TANDEM_TO_INTEGER(mode, u32), TANDEM_TO_INTEGER(mode, s32), \
      TANDEM_TO_INTEGER(mode, u64), TANDEM_TO_INTEGER(mode, s64),                               \
      {"cvt." #mode ".f32.f32", R1{one<RoundReal<Integral::mode, false>, f32, f32>}},           \
      {"cvt." #mode ".ftz.f32.f32", R1{one<RoundReal<Integral::mode, true>, f32, f32>}}, {      \
    "cvt." #mode ".f64.f64", R1 { one<RoundReal<Integral::mode, false>, f64, f64> }             \
  }

constexpr LaneEntry kConvert[] = {
    TANDEM_CVTS(u8),
    TANDEM_CVTS(s8),
    TANDEM_CVTS(u16),
    TANDEM_CVTS(s16),
    TANDEM_CVTS(u32),
    TANDEM_CVTS(s32),
    TANDEM_CVTS(u64),
    TANDEM_CVTS(s64),
    TANDEM_TO_INTEGERS(rni),
    TANDEM_TO_INTEGERS(rzi),
    TANDEM_TO_INTEGERS(rmi),
    TANDEM_TO_INTEGERS(rpi),
    TANDEM_TO_REAL(u8),
    TANDEM_TO_REAL(s8),
    TANDEM_TO_REAL(u16),
    TANDEM_TO_REAL(s16),
    {"cvt.f32.u32", R1{one<ToReal<f32>, f32, u32>}},
    {"cvt.f64.u32", R1{one<ToReal<f64>, f64, u32>}},
    {"cvt.f32.s32", R1{one<ToReal<f32>, f32, s32>}},
    {"cvt.f64.s32", R1{one<ToReal<f64>, f64, s32>}},
    {"cvt.f32.u64", R1{one<ToReal<f32>, f32, u64>}},
    {"cvt.f64.u64", R1{one<ToReal<f64>, f64, u64>}},
    {"cvt.f32.s64", R1{one<ToReal<f32>, f32, s64>}},
    {"cvt.f64.s64", R1{one<ToReal<f64>, f64, s64>}},
    {"odd.f32.u64", R1{one<ToOdd, f32, u64>}},
    {"odd.f32.s64", R1{one<ToOdd, f32, s64>}},
    {"odd.f32.f64", R1{one<ToOdd, f32, f64>}},
    {"cvt.f32.f64", R1{one<Narrow, f32, f64>}},
    {"cvt.rn.ftz.f32.f64", R1{one<NarrowFlushed<units::Rounding::rn>, f32, f64>}},
    {"cvt.rz.ftz.f32.f64", R1{one<NarrowFlushed<units::Rounding::rz>, f32, f64>}},
    {"cvt.rm.ftz.f32.f64", R1{one<NarrowFlushed<units::Rounding::rm>, f32, f64>}},
    {"cvt.rp.ftz.f32.f64", R1{one<NarrowFlushed<units::Rounding::rp>, f32, f64>}},
    {"nan.f16.f64", R2{two<NarrowNan<10>, u32, u32, f64>}},
    {"nan.bf16.f64", R2{two<NarrowNan<7>, u32, u32, f64>}},
    {"cvt.f64.f32", R1{one<Widen, f64, f32>}},
    {"cvt.ftz.f64.f32", R1{one<WidenFlushed, f64, f32>}},
    {"flush.f32", R1{one<FlushOnly, f32, f32>}},
    {"canonical.f32", R1{one<NanOnly, f32, f32>}},
    {"plain_nan.32", R1{one<PlainNan32, u32, u32>}},
    {"plain_nan.16", R1{one<PlainNan16, u32, u32>}},
};

constexpr LaneEntry kReal[] = {
    {"add.f64", R2{two<RealAdd, f64, f64, f64>}},
    {"sub.f64", R2{two<RealSub, f64, f64, f64>}},
    {"mul.f64", R2{two<RealMul, f64, f64, f64>}},
    {"div.f64", R2{two<RealDiv, f64, f64, f64>}},
    {"fma.f64", R3{three<RealFma, f64, f64, f64, f64>}},
    {"min.f64", R2{two<RealChoice<false>, f64, f64, f64>}},
    {"max.f64", R2{two<RealChoice<true>, f64, f64, f64>}},
    {"sqrt.f64", R1{one<RealSqrt, f64, f64>}},
    {"rcp.f64", R1{one<RealRcp, f64, f64>}},
    {"rsqrt.f64", R1{one<RealRsqrt, f64, f64>}},
    {"saturate.f64", R1{one<SaturateReal, f64, f64>}},
    {"sign.32", R1{one<Neg32, u32, u32>}},
    {"magnitude.32", R1{one<Abs32, u32, u32>}},
    {"neg.f32", R1{one<RealNeg32, f32, f32>}},
    {"abs.f32", R1{one<RealAbs32, f32, f32>}},
    {"neg.f64", R1{one<RealNeg, f64, f64>}},
    {"abs.f64", R1{one<RealAbs, f64, f64>}},
    {"neg.16", R1{one<NegBits<0x8000>, u32, u32>}},
    {"abs.16", R1{one<AbsBits<0x8000>, u32, u32>}},
    {"neg.16x2", R1{one<NegBits<0x80008000>, u32, u32>}},
    {"abs.16x2", R1{one<AbsBits<0x80008000>, u32, u32>}},
    {"copysign.f32", R2{two<CopySign32, u32, u32, u32>}},
    {"copysign.f64", R2{two<CopySign64, u64, u64, u64>}},
    {"xorsign.32", R2{two<XorSign32, u32, u32, u32>}},
    {"xorsign.16", R2{two<XorSign16, u32, u32, u32>}},
};

}  // namespace
}  // namespace TANDEM_TARGET
}  // namespace tandem::vgpu::machine
