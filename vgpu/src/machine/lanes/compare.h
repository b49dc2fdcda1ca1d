// Comparisons: rows in, predicates out. PTX ISA, "Comparison and Selection Instructions".
#pragma once

#include "vgpu/src/machine/lanes/bits.h"

namespace tandem::vgpu::machine {
namespace TANDEM_TARGET {
namespace {

struct Eq {
  template <class T>
  static bool of(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <class T>
  static bool of(T a, T b) {
    return a != b;
  }
};
struct Lt {
  template <class T>
  static bool of(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <class T>
  static bool of(T a, T b) {
    return a <= b;
  }
};
struct Gt {
  template <class T>
  static bool of(T a, T b) {
    return a > b;
  }
};
struct Ge {
  template <class T>
  static bool of(T a, T b) {
    return a >= b;
  }
};
// Floating point: C++'s != is true for NaN, but PTX's ne is false.
struct NeOrdered {
  template <class T>
  static bool of(T a, T b) {
    return a < b || a > b;
  }
};
struct EqOr {
  template <class T>
  static bool of(T a, T b) {
    return !(a < b || a > b);
  }
};
struct LtOr {
  template <class T>
  static bool of(T a, T b) {
    return !(a >= b);
  }
};
struct LeOr {
  template <class T>
  static bool of(T a, T b) {
    return !(a > b);
  }
};
struct GtOr {
  template <class T>
  static bool of(T a, T b) {
    return !(a <= b);
  }
};
struct GeOr {
  template <class T>
  static bool of(T a, T b) {
    return !(a < b);
  }
};
struct Num {
  template <class T>
  static bool of(T a, T b) {
    return !__builtin_isnan(a) && !__builtin_isnan(b);
  }
};
struct Nan {
  template <class T>
  static bool of(T a, T b) {
    return __builtin_isnan(a) || __builtin_isnan(b);
  }
};

// Subnormal values compare as zero.
inline f32 flush(f32 x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
template <class F>
struct Flushed {
  static bool of(f32 a, f32 b) { return F::of(flush(a), flush(b)); }
};

struct IsFinite {
  template <class T>
  static bool of(T a) {
    return __builtin_isfinite(a);
  }
};
struct IsInfinite {
  template <class T>
  static bool of(T a) {
    return __builtin_isinf(a);
  }
};
struct IsNumber {
  template <class T>
  static bool of(T a) {
    return !__builtin_isnan(a);
  }
};
struct IsNan {
  template <class T>
  static bool of(T a) {
    return __builtin_isnan(a);
  }
};
// Zeros count as normal numbers in PTX.
struct IsNormal32 {
  static bool of(u32 a) {
    const u32 e = a >> 23 & 0xff;
    return (e != 0 && e != 0xff) || a << 1 == 0;
  }
};
struct IsSubnormal32 {
  static bool of(u32 a) { return (a & 0x7f800000u) == 0 && a << 1 != 0; }
};
struct IsNormal64 {
  static bool of(u64 a) {
    const u64 e = a >> 52 & 0x7ff;
    return (e != 0 && e != 0x7ff) || a << 1 == 0;
  }
};
struct IsSubnormal64 {
  static bool of(u64 a) { return (a & 0x7ff0000000000000u) == 0 && a << 1 != 0; }
};

#define TANDEM_TEST(F, name, T)                   \
  {                                               \
    "setp." name "." #T, R2 { test_two<F, T, T> } \
  }
#define TANDEM_TESTS(F, name)                                                                                 \
  TANDEM_TEST(F, name, u16), TANDEM_TEST(F, name, s16), TANDEM_TEST(F, name, u32), TANDEM_TEST(F, name, s32), \
      TANDEM_TEST(F, name, u64), TANDEM_TEST(F, name, s64)
#define TANDEM_REAL_TESTS(F, name)                                 \
  TANDEM_TEST(F, name, f32), TANDEM_TEST(F, name, f64), {          \
    "setp." name ".ftz.f32", R2 { test_two<Flushed<F>, f32, f32> } \
  }

constexpr LaneEntry kCompare[] = {
    TANDEM_TESTS(Eq, "eq"),         TANDEM_TESTS(Ne, "ne"),
    TANDEM_TESTS(Lt, "lt"),         TANDEM_TESTS(Le, "le"),
    TANDEM_TESTS(Gt, "gt"),         TANDEM_TESTS(Ge, "ge"),
    TANDEM_REAL_TESTS(Eq, "eq"),    TANDEM_REAL_TESTS(NeOrdered, "ne"),
    TANDEM_REAL_TESTS(Lt, "lt"),    TANDEM_REAL_TESTS(Le, "le"),
    TANDEM_REAL_TESTS(Gt, "gt"),    TANDEM_REAL_TESTS(Ge, "ge"),
    TANDEM_REAL_TESTS(EqOr, "equ"), TANDEM_REAL_TESTS(Ne, "neu"),
    TANDEM_REAL_TESTS(LtOr, "ltu"), TANDEM_REAL_TESTS(LeOr, "leu"),
    TANDEM_REAL_TESTS(GtOr, "gtu"), TANDEM_REAL_TESTS(GeOr, "geu"),
    TANDEM_REAL_TESTS(Num, "num"),  TANDEM_REAL_TESTS(Nan, "nan"),
};

constexpr LaneEntry kProperties[] = {
    {"testp.finite.f32", R1{test_one<IsFinite, f32>}},
    {"testp.finite.f64", R1{test_one<IsFinite, f64>}},
    {"testp.infinite.f32", R1{test_one<IsInfinite, f32>}},
    {"testp.infinite.f64", R1{test_one<IsInfinite, f64>}},
    {"testp.number.f32", R1{test_one<IsNumber, f32>}},
    {"testp.number.f64", R1{test_one<IsNumber, f64>}},
    {"testp.notanumber.f32", R1{test_one<IsNan, f32>}},
    {"testp.notanumber.f64", R1{test_one<IsNan, f64>}},
    {"testp.normal.f32", R1{test_one<IsNormal32, u32>}},
    {"testp.normal.f64", R1{test_one<IsNormal64, u64>}},
    {"testp.subnormal.f32", R1{test_one<IsSubnormal32, u32>}},
    {"testp.subnormal.f64", R1{test_one<IsSubnormal64, u64>}},
};

}  // namespace
}  // namespace TANDEM_TARGET
}  // namespace tandem::vgpu::machine
