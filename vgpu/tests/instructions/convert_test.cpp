// Tests of PTX ISA, "cvt" and "mov".
#include <cfenv>
#include <cmath>
#include <limits>

#include "vgpu/src/units/numbers.h"
#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

using vgpu::units::decode;
using vgpu::units::encode;
using vgpu::units::Fit;
using vgpu::units::Format;
using vgpu::units::Rounding;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// Registers have at least 16 bits, so that bytes are in their low bits.
template <class T>
using Register = std::conditional_t<sizeof(T) == 1, u16, std::make_unsigned_t<T>>;
template <class T>
std::string name() {
  return (std::numeric_limits<T>::is_signed ? "s" : "u") + std::to_string(8 * sizeof(T));
}
// Returns the register's contents: the value, extended by the type's sign.
template <class T>
Register<T> extended(T x) {
  return static_cast<Register<T>>(x);
}

template <class F>
void for_integers(F&& f) {
  f(int8_t{}), f(uint8_t{}), f(int16_t{}), f(uint16_t{}), f(int32_t{}), f(uint32_t{}), f(int64_t{}), f(uint64_t{});
}

TEST(Convert, BetweenIntegers) {
  std::vector<Form> forms;
  for_integers([&]<class To>(To) {
    for_integers([&]<class From>(From) {
      const std::string types = "." + name<To>() + "." + name<From>() + " d, a;";
      forms.push_back(
          form("cvt" + types, [](Register<From> a) { return extended(static_cast<To>(static_cast<From>(a))); }));
      // True if the conversion can saturate.
      using To_limits = std::numeric_limits<To>;
      using From_limits = std::numeric_limits<From>;
      const bool holds = To_limits::digits >= From_limits::digits && (To_limits::is_signed || !From_limits::is_signed);
      if (holds) return;
      forms.push_back(form("cvt.sat" + types, [](Register<From> r) {
        const auto a = static_cast<From>(r);
        if (std::cmp_less(a, To_limits::min())) return extended(To_limits::min());
        if (std::cmp_greater(a, To_limits::max())) return extended(To_limits::max());
        return extended(static_cast<To>(a));
      }));
    });
  });
  try_all(forms);
}

double flushed(double x, bool ftz) { return ftz && std::fabs(x) < 0x1p-126 ? std::copysign(0.0, x) : x; }

double to_integral(const std::string& how, double x) {
  if (how == "rni") return std::nearbyint(x);
  if (how == "rzi") return std::trunc(x);
  return how == "rmi" ? std::floor(x) : std::ceil(x);
}

// Values beyond the type's range give its nearest end. NaN gives zero, or the sign bit alone if source or result has 64
// bits.
template <class To>
To clamped(double x, bool wide_source) {
  if (std::isnan(x)) return wide_source || sizeof(To) == 8 ? static_cast<To>(u64{1} << (8 * sizeof(To) - 1)) : To{0};
  const auto low = static_cast<long double>(std::numeric_limits<To>::min()),
             high = static_cast<long double>(std::numeric_limits<To>::max());
  if (static_cast<long double>(x) <= low) return std::numeric_limits<To>::min();
  if (static_cast<long double>(x) >= high) return std::numeric_limits<To>::max();
  return static_cast<To>(static_cast<long double>(x));
}

TEST(Convert, FloatToInteger) {
  std::vector<Form> forms;
  for (const std::string how : {"rni", "rzi", "rmi", "rpi"})
    for_integers([&]<class To>(To) {
      if (sizeof(To) == 1) return;
      for (const bool ftz : {false, true})
        forms.push_back(form("cvt." + how + (ftz ? ".ftz." : ".") + name<To>() + ".f32 d, a;", [=](float a) {
          return extended(clamped<To>(to_integral(how, flushed(static_cast<double>(a), ftz)), false));
        }));
      forms.push_back(form("cvt." + how + "." + name<To>() + ".f64 d, a;",
                           [=](double a) { return extended(clamped<To>(to_integral(how, a), true)); }));
      for (const Format format : {Format::f16, Format::bf16})
        forms.push_back(
            form("cvt." + how + "." + name<To>() + "." + vgpu::units::name_of(format) + " d, a;", [=](Half a) {
              return extended(clamped<To>(to_integral(how, static_cast<double>(decode(a.bits, format))), false));
            }));
    });
  try_all(forms);
}

struct Mode {
  const char* name;
  int fenv;
  Rounding rounding;
};
const Mode kModes[] = {{"rn", FE_TONEAREST, Rounding::rn},
                       {"rz", FE_TOWARDZERO, Rounding::rz},
                       {"rm", FE_DOWNWARD, Rounding::rm},
                       {"rp", FE_UPWARD, Rounding::rp}};

template <class To, class From>
To rounded(const Mode& mode, From x) {
  if (std::is_integral_v<From> && x == 0) return To{0};  // compilers that convert by subtracting get -0 downwards
  volatile From a = x;
  std::fesetround(mode.fenv);
  volatile To result = static_cast<To>(a);
  std::fesetround(FE_TONEAREST);
  return result;
}

// Formats with more bits than float32 are first rounded to odd in float32.
Half half_of(long double x, Format format) {
  auto f = static_cast<float>(x);
  if (std::isfinite(f) && static_cast<long double>(f) != x) {
    if (std::fabs(static_cast<long double>(f)) > std::fabs(x)) f = std::nextafterf(f, 0);
    f = value_of<float>(bits_of(f) | 1);
  }
  if (std::isinf(f) && std::isfinite(x)) f = std::copysign(0x1.fffffep127f, f);
  return Half{static_cast<u16>(encode(f, format))};
}

TEST(Convert, IntegerToFloat) {
  std::vector<Form> forms;
  for_integers([&]<class From>(From) {
    for (const Mode& mode : kModes) {
      const std::string suffix = "." + name<From>() + " d, a;";
      forms.push_back(form(std::string("cvt.") + mode.name + ".f32" + suffix,
                           [=](Register<From> a) { return rounded<float>(mode, static_cast<From>(a)); }));
      forms.push_back(form(std::string("cvt.") + mode.name + ".f64" + suffix,
                           [=](Register<From> a) { return rounded<double>(mode, static_cast<From>(a)); }));
    }
    for (const Format format : {Format::f16, Format::bf16}) {
      if (format == Format::bf16 && sizeof(From) == 1) continue;  // the assembler has none
      forms.push_back(
          form(std::string("cvt.rn.") + vgpu::units::name_of(format) + "." + name<From>() + " d, a;",
               [=](Register<From> a) { return half_of(static_cast<long double>(static_cast<From>(a)), format); }));
    }
  });
  try_all(forms);
}

// PTX does not specify the NaN of a wider or equal type.
template <class T>
bool nan_or_same(const Values&, uint64_t got, uint64_t want) {
  return got == want || (std::isnan(value_of<T>(got)) && std::isnan(value_of<T>(want)));
}

// A result is tiny if it is below the smallest normal number with an unlimited exponent.
float narrowed(const Mode& mode, bool ftz, double a) {
  const auto higher = rounded<float>(mode, std::fabs(a) < 1 ? a * 0x1p64 : a);
  if (ftz && std::fabs(higher) < 0x1p-62f) return std::copysign(0.0f, higher);
  return rounded<float>(mode, a);
}

TEST(Convert, BetweenFloats) {
  std::vector<Form> forms;
  const auto flush32 = [](float x, bool ftz) { return static_cast<float>(flushed(static_cast<double>(x), ftz)); };
  for (const bool ftz : {false, true}) {
    const std::string f = ftz ? ".ftz" : "";
    forms.push_back(form("cvt" + f + ".f64.f32 d, a;", [=](float a) {
                      return static_cast<double>(flush32(a, ftz));
                    }).within(nan_or_same<double>));
    for (const Mode& mode : kModes)
      forms.push_back(form(std::string("cvt.") + mode.name + f + ".f32.f64 d, a;", [=](double a) {
                        return narrowed(mode, ftz, a);
                      }).within(nan_or_same<float>));
    for (const std::string how : {"rni", "rzi", "rmi", "rpi"})
      forms.push_back(form("cvt." + how + f + ".f32.f32 d, a;", [=](float a) {
                        return static_cast<float>(to_integral(how, static_cast<double>(flush32(a, ftz))));
                      }).within(nan_or_same<float>));
    forms.push_back(form("cvt" + f + ".sat.f32.f32 d, a;", [=](float a) {
      a = flush32(a, ftz);
      return a > 0 ? std::fmin(a, 1.0f) : 0.0f;
    }));
    forms.push_back(form("cvt" + f + ".f32.f16 d, a;", [=](Half a) {
                      return decode(a.bits, Format::f16);
                    }).within(nan_or_same<float>));
  }
  for (const std::string how : {"rni", "rzi", "rmi", "rpi"})
    forms.push_back(form("cvt." + how + ".f64.f64 d, a;", [=](double a) {
                      return to_integral(how, a);
                    }).within(nan_or_same<double>));
  forms.push_back(
      form("cvt.f32.bf16 d, a;", [](Half a) { return decode(a.bits, Format::bf16); }).within(nan_or_same<float>));
  forms.push_back(form("cvt.f64.f16 d, a;", [](Half a) {
                    return static_cast<double>(decode(a.bits, Format::f16));
                  }).within(nan_or_same<double>));
  forms.push_back(form("cvt.f64.bf16 d, a;", [](Half a) {
                    return static_cast<double>(decode(a.bits, Format::bf16));
                  }).within(nan_or_same<double>));
  // A float64 NaN keeps its sign and the upper bits of its mantissa. Other formats have one NaN.
  const auto of_double = [](Format format, int mantissa) {
    return [=](double a) {
      if (!std::isnan(a)) return half_of(a, format);
      const u64 image = bits_of(a);
      return Half{
          static_cast<u16>((image >> 48 & 0x8000) | (image >> (52 - mantissa) & 0x7fff) | 1u << (mantissa - 1))};
    };
  };
  forms.push_back(form("cvt.rn.f16.f64 d, a;", of_double(Format::f16, 10)));
  forms.push_back(form("cvt.rn.bf16.f64 d, a;", of_double(Format::bf16, 7)));
  forms.push_back(
      form("cvt.rn.bf16.f16 d, a;", [](Half a) { return half_of(decode(a.bits, Format::f16), Format::bf16); }));
  forms.push_back(
      form("cvt.rn.f16.bf16 d, a;", [](Half a) { return half_of(decode(a.bits, Format::bf16), Format::f16); }));
  try_all(forms);
}

TEST(Convert, NaNOfDouble) {
  const auto nan = value_of<double>(0xfff4000020000001);
  const auto half = [](u32 quiet) {
    return [=](const Values&, uint64_t got, uint64_t) { return (got & 0x7fff & quiet) == quiet; };
  };
  try_all({form("cvt.rn.f32.f64 d, a;", [](double) { return std::nanf(""); }).of(nan).within(nan_or_same<float>),
           form("cvt.rn.f16.f64 d, a;", [](double) { return Half{0x7e00}; }).of(nan).within(half(0x7c00)),
           form("cvt.rn.bf16.f64 d, a;", [](double) { return Half{0x7fc0}; }).of(nan).within(half(0x7f80))});
}

// Tests a number just below the smallest normal float32, which rounds to the normal number.
TEST(Convert, FlushesWhatIsTinyWhenRounded) {
  const double a = 0x1.ffffffcp-127;
  try_all({form("cvt.rn.ftz.f32.f64 d, a;", [](double) { return 0x1p-126f; }).of(a),
           form("cvt.rz.ftz.f32.f64 d, a;", [](double) { return 0.0f; }).of(a),
           form("cvt.rp.ftz.f32.f64 d, a;", [](double) { return 0x1p-126f; }).of(a),
           form("cvt.rm.ftz.f32.f64 d, a;", [](double) { return -0x1p-126f; }).of(-a)});
}

// Tests the largest number of 24 bits below the smallest normal number, and values between the two.
TEST(Convert, FlushesTheLargestTinyNumber) {
  const double largest = 0x1.fffffep-127, smallest_normal = 0x1p-126, middle = 0x1.ffffffp-127;
  std::vector<Values> sets;
  for (const double a : {largest, std::nextafter(largest, 1), std::nextafter(middle, 0), middle,
                         std::nextafter(middle, 1), std::nextafter(smallest_normal, 0)})
    sets.push_back({bits_of(a)}), sets.push_back({bits_of(-a)});
  std::vector<Form> forms;
  for (const Mode& mode : kModes)
    forms.push_back(form(std::string("cvt.") + mode.name + ".ftz.f32.f64 d, a;", [=](double a) {
                      return narrowed(mode, true, a);
                    }).of_each(sets));
  try_all(forms);
}

TEST(Convert, ToHalves) {
  std::vector<Form> forms;
  for (const Mode& mode : kModes)
    forms.push_back(form(std::string("cvt.") + mode.name + ".f16.f32 d, a;", [=](float a) {
      return Half{static_cast<u16>(encode(a, Format::f16, {mode.rounding, false, false, false}))};
    }));
  for (const Mode& mode : {kModes[0], kModes[1]})
    for (const Format format : {Format::f16, Format::bf16})
      for (const bool relu : {false, true})
        for (const bool satfinite : {false, true}) {
          const Fit fit = {mode.rounding, satfinite, relu, false};
          const std::string suffix = std::string(".") + mode.name + (relu ? ".relu" : "") +
                                     (satfinite ? ".satfinite." : ".") + vgpu::units::name_of(format);
          forms.push_back(form("cvt" + suffix + ".f32 d, a;",
                               [=](float a) { return Half{static_cast<u16>(encode(a, format, fit))}; }));
          forms.push_back(form("cvt" + suffix + "x2.f32 d, a, b;", [=](float a, float b) {
            return Pair{encode(a, format, fit) << 16 | encode(b, format, fit)};
          }));
        }
  try_all(forms);
}

TEST(Convert, ToTf32) {
  // The assembler adds half of the last bit for .rna and truncates. .satfinite then subtracts one bit from infinity and
  // NaN.
  const auto away = [](float a, bool satfinite) {
    const u32 bits = value_of<u32>(bits_of(a)), magnitude = bits & 0x7fffffff;
    const u32 cut = (magnitude < 0x7f800000 ? bits + 0x1000 : bits) & 0xffffe000;
    return satfinite && (cut & 0x7fffffff) >= 0x7f800000 ? cut - 0x2000 : cut;
  };
  std::vector<Form> forms = {
      form("cvt.rna.tf32.f32 d, a;", [=](float a) { return away(a, false); }),
      form("cvt.rna.satfinite.tf32.f32 d, a;", [=](float a) { return away(a, true); }),
  };
  for (const Mode& mode : {kModes[0], kModes[1]})
    for (const bool relu : {false, true})
      forms.push_back(form(std::string("cvt.") + mode.name + (relu ? ".relu" : "") + ".tf32.f32 d, a;", [=](float a) {
        return std::isnan(a) ? 0x7fffe000 : encode(a, Format::tf32, {mode.rounding, false, relu, false});
      }));
  try_all(forms);
}

TEST(Convert, EightBits) {
  std::vector<Form> forms;
  for (const Format format : {Format::e4m3, Format::e5m2})
    for (const bool relu : {false, true}) {
      const Fit fit = {Rounding::rn, true, relu, false};
      const std::string type = std::string(vgpu::units::name_of(format)) + "x2", r = relu ? ".relu" : "";
      forms.push_back(form("cvt.rn.satfinite" + r + "." + type + ".f32 d, a, b;", [=](float a, float b) {
        return static_cast<u16>(encode(a, format, fit) << 8 | encode(b, format, fit));
      }));
      forms.push_back(form("cvt.rn.satfinite" + r + "." + type + ".f16x2 d, a;", [=](Pair a) {
        return static_cast<u16>(encode(decode(a.bits >> 16, Format::f16), format, fit) << 8 |
                                encode(decode(a.bits & 0xffff, Format::f16), format, fit));
      }));
      forms.push_back(form("cvt.rn" + r + ".f16x2." + type + " d, a;", [=](u16 a) {
        const Fit half = {Rounding::rn, false, relu, false};
        return Pair{encode(decode(a >> 8, format), Format::f16, half) << 16 |
                    encode(decode(a & 0xff, format), Format::f16, half)};
      }));
    }
  try_all(forms);
}

// Tests Blackwell's narrower formats. Formats of 4 bits are tested as bytes, because only this instruction has
// registers of that type.
TEST(Convert, SixBitsAndScales) {
  std::vector<Form> forms;
  for (const Format format : {Format::e2m3, Format::e3m2})
    for (const bool relu : {false, true}) {
      const Fit fit = {Rounding::rn, true, relu, false};
      const std::string type = std::string(vgpu::units::name_of(format)) + "x2", r = relu ? ".relu" : "";
      forms.push_back(form("cvt.rn.satfinite" + r + "." + type + ".f32 d, a, b;", [=](float a, float b) {
        return static_cast<u16>(encode(a, format, fit) << 8 | encode(b, format, fit));
      }));
      forms.push_back(form("cvt.rn" + r + ".f16x2." + type + " d, a;", [=](u16 a) {
                        const Fit half = {Rounding::rn, false, relu, false};
                        return Pair{encode(decode(a >> 8, format), Format::f16, half) << 16 |
                                    encode(decode(a & 0xff, format), Format::f16, half)};
                      }).where([](u16 a) { return (a & 0xc0c0) == 0; }));
    }
  for (const Mode& mode : {kModes[1], kModes[3]})
    for (const bool satfinite : {false, true}) {
      const Fit fit = {mode.rounding, satfinite, false, false};
      forms.push_back(form(std::string("cvt.") + mode.name + (satfinite ? ".satfinite" : "") + ".ue8m0x2.f32 d, a, b;",
                           [=](float a, float b) {
                             return static_cast<u16>(encode(a, Format::ue8m0, fit) << 8 |
                                                     encode(b, Format::ue8m0, fit));
                           }));
    }
  forms.push_back(form("cvt.rn.bf16x2.ue8m0x2 d, a;", [](u16 a) {
    return Pair{encode(decode(a >> 8, Format::ue8m0), Format::bf16) << 16 |
                encode(decode(a & 0xff, Format::ue8m0), Format::bf16)};
  }));
  forms.push_back(
      form("{\n.reg .b8 n;\ncvt.rn.satfinite.e2m1x2.f32 n, a, b;\nmov.b32 d, {n, n, n, n};\n}", [](float a, float b) {
        const Fit fit = {Rounding::rn, true, false, false};
        return (encode(a, Format::e2m1, fit) << 4 | encode(b, Format::e2m1, fit)) * 0x01010101u;
      }));
  forms.push_back(
      form("{\n.reg .b8 n0, n1, n2, n3;\nmov.b32 {n0, n1, n2, n3}, a;\ncvt.rn.f16x2.e2m1x2 d, n1;\n}", [](u32 a) {
        return Pair{encode(decode(a >> 12 & 15, Format::e2m1), Format::f16) << 16 |
                    encode(decode(a >> 8 & 15, Format::e2m1), Format::f16)};
      }));
  for (Form& form : forms) form.needs = Needs::blackwell;
  try_all(forms);
}

TEST(Convert, Stochastic) {
  using vgpu::units::encode_stochastic;
  std::vector<Form> forms;
  for (const bool relu : {false, true}) {
    const Fit fit = {Rounding::rn, false, relu, false};
    const std::string r = relu ? ".relu" : "";
    forms.push_back(form("cvt.rs" + r + ".f16x2.f32 d, a, b, c;", [=](float a, float b, u32 random) {
                      return Pair{encode_stochastic(a, Format::f16, random >> 16 & 0x1fff, 13, fit) << 16 |
                                  encode_stochastic(b, Format::f16, random & 0x1fff, 13, fit)};
                    }).where([](float, float, u32 random) { return (random & 0xe000e000) == 0; }));
    forms.push_back(form("cvt.rs" + r + ".bf16x2.f32 d, a, b, c;", [=](float a, float b, u32 random) {
      return Pair{encode_stochastic(a, Format::bf16, random >> 16, 16, fit) << 16 |
                  encode_stochastic(b, Format::bf16, random & 0xffff, 16, fit)};
    }));
  }
  for (Form& form : forms) form.needs = Needs::blackwell;
  try_all(forms);
}

TEST(Move, RegistersAndConstants) {
  std::vector<Form> forms;
  for (const char* type : {"b16", "u16", "s16"})
    forms.push_back(form(std::string("mov.") + type + " d, a;", [](u16 a) { return a; }));
  for (const char* type : {"b32", "u32", "s32", "f32"})
    forms.push_back(form(std::string("mov.") + type + " d, a;", [](u32 a) { return a; }));
  for (const char* type : {"b64", "u64", "s64", "f64"})
    forms.push_back(form(std::string("mov.") + type + " d, a;", [](u64 a) { return a; }));
  forms.push_back(form("mov.b32 d, {a, b};", [](u16 a, u16 b) { return u32{b} << 16 | a; }));
  forms.push_back(
      form("mov.b32 {d, e}, a;", [](u32 a) { return std::pair(static_cast<u16>(a), static_cast<u16>(a >> 16)); }));
  forms.push_back(form("mov.b64 d, {a, b};", [](u32 a, u32 b) { return u64{b} << 32 | a; }));
  forms.push_back(
      form("mov.b64 {d, e}, a;", [](u64 a) { return std::pair(static_cast<u32>(a), static_cast<u32>(a >> 32)); }));
  forms.push_back(form("mov.b64 {_, d}, a;", [](u64 a) { return static_cast<u32>(a >> 32); }));
  forms.push_back(form("mov.b64 d, {a, b, c, g};",
                       [](u16 a, u16 b, u16 c, u16 g) { return u64{g} << 48 | u64{c} << 32 | u64{b} << 16 | a; }));
  forms.push_back(form("{\n.reg .b128 w;\nmov.b128 w, {a, b};\nmov.b128 {e, d}, w;\n}",
                       [](u64 a, u64 b) { return std::pair(b, a); }));
  forms.push_back(form("mov.u32 d, 0xdeadbeef;", [] { return 0xdeadbeefu; }));
  forms.push_back(form("mov.s64 d, -3;", [] { return int64_t{-3}; }));
  forms.push_back(form("mov.f32 d, 0f40490FDB;", [] { return value_of<float>(0x40490fdb); }));
  forms.push_back(form("mov.f64 d, 0d400921FB54442D18;", [] { return value_of<double>(0x400921FB54442D18); }));
  forms.push_back(form("mov.b32 d, WARP_SZ;", [] { return u32{32}; }));
  try_all(forms);
}

// A false guard leaves the destination unchanged.
TEST(Move, Guarded) {
  try_all({
      form("mov.b32 d, a;\n@c mov.b32 d, b;", [](u32 a, u32 b, bool c) { return c ? b : a; }),
      form("mov.b32 d, a;\n@!c add.s32 d, a, b;", [](u32 a, u32 b, bool c) { return c ? a : a + b; }),
      form("mov.b64 d, a;\n@c mul.lo.s64 d, a, b;", [](u64 a, u64 b, bool c) { return c ? a * b : a; }),
      form("setp.eq.b32 d, a, a;\n@c setp.lt.s32 d, a, b;",
           [](int32_t a, int32_t b, bool c) { return c ? a < b : true; }),
  });
}

}  // namespace
}  // namespace tandem::test
