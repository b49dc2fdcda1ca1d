// Tests of PTX ISA, "Floating Point Instructions": float32, and pairs of float32.
#include <cfenv>
#include <cmath>
#include <limits>

#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

using u32 = uint32_t;

constexpr uint32_t kNaN = 0x7fffffff;

// Returns the GPU's form of a result: one NaN, and zero for subnormal numbers with ftz.
float flushed(float x, bool ftz) {
  return ftz && std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
float finished(float x, bool ftz) { return std::isnan(x) ? value_of<float>(kNaN) : flushed(x, ftz); }
float saturated(float x) { return x > 0 ? std::fmin(x, 1.0f) : 0.0f; }

struct Mode {
  const char* name;
  int fenv;
};
const Mode kModes[] = {{"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};

// Computes f on the CPU in a rounding mode. Volatile operands keep the compiler from folding.
template <class F>
float rounded(int mode, F&& f) {
  std::fesetround(mode);
  volatile float result = f();
  std::fesetround(FE_TONEAREST);
  return result;
}

// Computes op(a, b, c, lift), which is linear in lift. A GPU flushes a value that is tiny after rounding to 24 bits,
// for any exponent. The CPU rounds a subnormal number to fewer bits, so that the lifted value shows the result before
// flushing.
template <class Op>
float computed(const Mode& mode, bool ftz, float x, float y, float z, Op op) {
  volatile float a = flushed(x, ftz), b = flushed(y, ftz), c = flushed(z, ftz);
  const float result = rounded(mode.fenv, [&] { return op(a, b, c, 1.0f); });
  if (ftz && std::fabs(result) <= 0x1p-126f &&
      std::fabs(rounded(mode.fenv, [&] { return op(a, b, c, 0x1p64f); })) < 0x1p-62f)
    return std::copysign(0.0f, result);
  return finished(result, ftz);
}
float product_of(float a, float b, float, float lift) { return a * lift * b; }
float quotient_of(float a, float b, float, float lift) { return a * lift / b; }
float fused(float a, float b, float c, float lift) { return std::fma(a * lift, b, c * lift); }

// Calls f(operation, mode, ftz, suffix) for all variants that the operations share.
template <class F>
std::vector<Form> for_modes(F&& f) {
  std::vector<Form> forms;
  for (const Mode& mode : kModes)
    for (const bool ftz : {false, true}) f(mode, ftz, std::string(".") + mode.name + (ftz ? ".ftz" : ""), &forms);
  return forms;
}

TEST(Float, AddSubMul) {
  try_all(for_modes([](const Mode& mode, bool ftz, const std::string& suffix, std::vector<Form>* forms) {
    const auto two = [=](auto op) { return [=](float a, float b) { return computed(mode, ftz, a, b, 0, op); }; };
    const auto add = two([](float a, float b, float, float lift) { return a * lift + b * lift; });
    const auto sub = two([](float a, float b, float, float lift) { return a * lift - b * lift; });
    const auto mul = two(product_of);
    forms->push_back(form("add" + suffix + ".f32 d, a, b;", add));
    forms->push_back(form("sub" + suffix + ".f32 d, a, b;", sub));
    forms->push_back(form("mul" + suffix + ".f32 d, a, b;", mul));
    forms->push_back(
        form("add" + suffix + ".sat.f32 d, a, b;", [=](float a, float b) { return saturated(add(a, b)); }));
    forms->push_back(
        form("sub" + suffix + ".sat.f32 d, a, b;", [=](float a, float b) { return saturated(sub(a, b)); }));
    forms->push_back(
        form("mul" + suffix + ".sat.f32 d, a, b;", [=](float a, float b) { return saturated(mul(a, b)); }));
  }));
  try_all({form("add.f32 d, a, b;", [](float a, float b) { return finished(a + b, false); }),
           form("add.ftz.f32 d, a, b;",
                [](float a, float b) { return finished(flushed(a, true) + flushed(b, true), true); }),
           form("sub.ftz.f32 d, a, b;",
                [](float a, float b) { return finished(flushed(a, true) - flushed(b, true), true); }),
           form("mul.ftz.f32 d, a, 0f40490FDB;",
                [](float a) { return finished(flushed(a, true) * value_of<float>(0x40490fdb), true); })});
}

TEST(Float, Fma) {
  try_all(for_modes([](const Mode& mode, bool ftz, const std::string& suffix, std::vector<Form>* forms) {
    const auto fma = [=](float a, float b, float c) { return computed(mode, ftz, a, b, c, fused); };
    forms->push_back(form("fma" + suffix + ".f32 d, a, b, c;", fma));
    forms->push_back(form("mad" + suffix + ".f32 d, a, b, c;", fma));
    forms->push_back(form("fma" + suffix + ".sat.f32 d, a, b, c;",
                          [=](float a, float b, float c) { return saturated(fma(a, b, c)); }));
  }));
}

TEST(Float, DivideAndRoot) {
  try_all(for_modes([](const Mode& mode, bool ftz, const std::string& suffix, std::vector<Form>* forms) {
    forms->push_back(form("div" + suffix + ".f32 d, a, b;",
                          [=](float a, float b) { return computed(mode, ftz, a, b, 0, quotient_of); }));
    forms->push_back(
        form("rcp" + suffix + ".f32 d, a;", [=](float a) { return computed(mode, ftz, 1, a, 0, quotient_of); }));
    forms->push_back(form("sqrt" + suffix + ".f32 d, a;", [=](float x) {
      volatile float a = flushed(x, ftz);
      return finished(rounded(mode.fenv, [&] { return std::sqrt(a); }), ftz);
    }));
  }));
}

TEST(Float, SignsAndChoices) {
  const auto sign = [](float x) { return bits_of(x) & 0x80000000; };
  const auto least = [](float a, float b, bool propagate) {
    if (std::isnan(a) || std::isnan(b)) {
      if (propagate || (std::isnan(a) && std::isnan(b))) return value_of<float>(kNaN);
      return std::isnan(a) ? b : a;
    }
    return a < b || (a == b && std::signbit(a)) ? a : b;
  };
  const auto most = [](float a, float b, bool propagate) {
    if (std::isnan(a) || std::isnan(b)) {
      if (propagate || (std::isnan(a) && std::isnan(b))) return value_of<float>(kNaN);
      return std::isnan(a) ? b : a;
    }
    return a > b || (a == b && std::signbit(b)) ? a : b;
  };
  std::vector<Form> forms = {
      form("copysign.f32 d, a, b;",
           [=](float a, float b) { return value_of<float>((bits_of(b) & 0x7fffffff) | sign(a)); }),
  };
  // PTX does not specify the sign of a NaN.
  const auto nan_or_equal = [](const Values&, uint64_t got, uint64_t want) {
    return got == want || (std::isnan(value_of<float>(got)) && std::isnan(value_of<float>(want)));
  };
  for (const bool ftz : {false, true}) {
    const std::string f = ftz ? ".ftz" : "";
    forms.push_back(form("neg" + f + ".f32 d, a;", [=](float a) { return -flushed(a, ftz); }).within(nan_or_equal));
    forms.push_back(
        form("abs" + f + ".f32 d, a;", [=](float a) { return std::fabs(flushed(a, ftz)); }).within(nan_or_equal));
    for (const bool nan : {false, true}) {
      const std::string g = f + (nan ? ".NaN" : "");
      forms.push_back(form("min" + g + ".f32 d, a, b;",
                           [=](float a, float b) { return least(flushed(a, ftz), flushed(b, ftz), nan); }));
      forms.push_back(form("max" + g + ".f32 d, a, b;",
                           [=](float a, float b) { return most(flushed(a, ftz), flushed(b, ftz), nan); }));
      const auto crossed = [=](float a, float b, float magnitude) {
        if (std::isnan(magnitude)) return magnitude;
        return value_of<float>((bits_of(magnitude) & 0x7fffffff) | (sign(a) ^ sign(b)));
      };
      forms.push_back(form("min" + g + ".xorsign.abs.f32 d, a, b;", [=](float a, float b) {
        return crossed(a, b, least(std::fabs(flushed(a, ftz)), std::fabs(flushed(b, ftz)), nan));
      }));
      forms.push_back(form("max" + g + ".xorsign.abs.f32 d, a, b;", [=](float a, float b) {
        return crossed(a, b, most(std::fabs(flushed(a, ftz)), std::fabs(flushed(b, ftz)), nan));
      }));
      forms.push_back(form("max" + g + ".f32 d, a, b, c;", [=](float a, float b, float c) {
                        return most(most(flushed(a, ftz), flushed(b, ftz), nan), flushed(c, ftz), nan);
                      }).on(Needs::blackwell));
      forms.push_back(form("min" + g + ".f32 d, a, b, c;", [=](float a, float b, float c) {
                        return least(least(flushed(a, ftz), flushed(b, ftz), nan), flushed(c, ftz), nan);
                      }).on(Needs::blackwell));
    }
  }
  try_all(forms);
}

TEST(Float, TestProperties) {
  try_all({
      form("testp.finite.f32 d, a;", [](float a) { return std::isfinite(a); }),
      form("testp.infinite.f32 d, a;", [](float a) { return std::isinf(a); }),
      form("testp.number.f32 d, a;", [](float a) { return !std::isnan(a); }),
      form("testp.notanumber.f32 d, a;", [](float a) { return std::isnan(a); }),
      // Zeros count as normal numbers.
      form("testp.normal.f32 d, a;", [](float a) { return std::isnormal(a) || a == 0; }),
      form("testp.subnormal.f32 d, a;", [](float a) { return std::fpclassify(a) == FP_SUBNORMAL; }),
      form("testp.finite.f64 d, a;", [](double a) { return std::isfinite(a); }),
      form("testp.normal.f64 d, a;", [](double a) { return std::isnormal(a) || a == 0; }),
      form("testp.subnormal.f64 d, a;", [](double a) { return std::fpclassify(a) == FP_SUBNORMAL; }),
  });
}

// Approximations must be within the errors that the ISA allows.
TEST(Float, Approximations) {
  const auto one = [](const std::string& text, double ulps, bool ftz, float (*f)(double)) {
    return form(text, [=](float a) { return finished(f(static_cast<double>(flushed(a, ftz))), ftz); })
        .within_ulps(ulps);
  };
  // Returns a check: the error is at most `absolute`, or at most `relative` times the result.
  const auto bounded = [](double absolute, double relative) {
    return [=](const Values&, uint64_t got, uint64_t want) {
      const double x = value_of<float>(got), y = value_of<float>(want);
      if (std::isnan(y)) return std::isnan(x);
      return x == y || std::fabs(x - y) <= std::max(absolute, relative * std::fabs(y));
    };
  };
  std::vector<Form> forms;
  for (const bool ftz : {false, true}) {
    const std::string f = ftz ? ".approx.ftz.f32 d, a;" : ".approx.f32 d, a;";
    forms.push_back(one("ex2" + f, 2, ftz, [](double a) { return static_cast<float>(std::exp2(a)); }));
    forms.push_back(one("rcp" + f, 1, ftz, [](double a) { return static_cast<float>(1 / a); }));
    forms.push_back(one("rsqrt" + f, 3, ftz, [](double a) { return static_cast<float>(1 / std::sqrt(a)); }));
    forms.push_back(one("sqrt" + f, 3, ftz, [](double a) { return static_cast<float>(std::sqrt(a)); }));
    forms.push_back(one("lg2" + f, 0, ftz, [](double a) {
                      return static_cast<float>(std::log2(a));
                    }).within(bounded(0x1p-22, 0x1p-22)));
    const auto moderate = [](float a) { return !(std::fabs(a) > 314) || std::isinf(a); };
    forms.push_back(one("sin" + f, 0, ftz, [](double a) { return static_cast<float>(std::sin(a)); })
                        .within(bounded(0x1p-14, 0))
                        .where(moderate));
    forms.push_back(one("cos" + f, 0, ftz, [](double a) { return static_cast<float>(std::cos(a)); })
                        .within(bounded(0x1p-14, 0))
                        .where(moderate));
    // Computes a * (1 / b), which is zero beyond 2^126.
    forms.push_back(form(ftz ? "div.approx.ftz.f32 d, a, b;" : "div.approx.f32 d, a, b;",
                         [=](float a, float b) {
                           a = flushed(a, ftz), b = flushed(b, ftz);
                           const bool beyond = std::fabs(b) > 0x1p126f && !std::isinf(b);
                           return finished(beyond ? a * std::copysign(0.0f, b) : a / b, ftz);
                         })
                        .within_ulps(2)
                        .where([](float, float b) { return !(std::fabs(b) < 0x1p-126f) || b == 0; }));
    forms.push_back(form(ftz ? "div.full.ftz.f32 d, a, b;" : "div.full.f32 d, a, b;", [=](float a, float b) {
                      return finished(flushed(a, ftz) / flushed(b, ftz), ftz);
                    }).within_ulps(2));
  }
  forms.push_back(
      form("tanh.approx.f32 d, a;", [](float a) { return finished(std::tanh(a), false); }).within(bounded(0, 0x1p-10)));
  try_all(forms);
}

// The largest product below the smallest normal number that rounds to it is not flushed.
TEST(Float, FlushesWhatIsTinyWhenRounded) {
  const auto a = value_of<float>(0x20000001), b = value_of<float>(0x1ffffffe);  // (1 - 2^-46) 2^-126
  for (const bool down : {false, true}) {
    const float want = down ? 0.0f : 0x1p-126f;
    const std::string mode = down ? "rz" : "rn";
    try_all({form("mul." + mode + ".ftz.f32 d, a, b;", [=](float, float) { return want; }).of(a, b),
             form("fma." + mode + ".ftz.f32 d, a, b, c;", [=](float, float, float) { return want; }).of(a, b, 0.0f)});
  }
}

// Values just below the smallest normal number. The largest number of 24 bits there is tiny without rounding and is
// flushed. Rounded outwards to a subnormal number's bits, this number would be the smallest normal number. No sum has
// this value, because sums are multiples of 2^-149.
TEST(Float, FlushesTheLargestTinyNumber) {
  std::vector<Form> forms;
  for (const Mode& mode : kModes) {
    const std::string suffix = std::string(".") + mode.name + ".ftz.f32 d, a, b";
    // Results of magnitude 2^-126 less 2^-150, 2^-151 (half way), a bit more than that, and 2^-172.
    std::vector<Values> products, sums, quotients;
    for (const float sign : {1.0f, -1.0f}) {
      for (const auto& [a, b] :
           {std::pair(16777215 * 0x1p-75f, 0x1p-75f), std::pair(31 * 0x1p-75f, 1082401 * 0x1p-76f),
            std::pair(4134360 * 0x1p-85f, 4255117 * 0x1p-85f), std::pair(8388609 * 0x1p-86f, 16777214 * 0x1p-87f)}) {
        products.push_back({bits_of(sign * a), bits_of(b)});
        sums.push_back({bits_of(sign * a), bits_of(b), bits_of(sign * 0.0f)});
      }
      sums.push_back({bits_of(sign * -97 * 0x1p-75f), bits_of(172961 * 0x1p-75f), bits_of(sign * 0x1p-125f)});
      quotients.push_back({bits_of(sign * 16777215 * 0x1p-75f), bits_of(0x1p75f)});
    }
    forms.push_back(form("mul" + suffix + ";", [=](float a, float b) {
                      return computed(mode, true, a, b, 0, product_of);
                    }).of_each(products));
    forms.push_back(form("fma" + suffix + ", c;", [=](float a, float b, float c) {
                      return computed(mode, true, a, b, c, fused);
                    }).of_each(sums));
    forms.push_back(form("div" + suffix + ";", [=](float a, float b) {
                      return computed(mode, true, a, b, 0, quotient_of);
                    }).of_each(quotients));
  }
  try_all(forms);
}

// Results at the ends of the ranges must be exact.
TEST(Float, ApproximationsOfSpecialValues) {
  const float inf = INFINITY;
  struct Case {
    const char* text;
    float x, want;
  };
  for (const Case& c : {Case{"ex2.approx.ftz.f32 d, a;", -inf, 0.0f}, Case{"ex2.approx.ftz.f32 d, a;", inf, inf},
                        Case{"ex2.approx.ftz.f32 d, a;", -0.0f, 1}, Case{"ex2.approx.ftz.f32 d, a;", -127, 0},
                        Case{"lg2.approx.ftz.f32 d, a;", 0, -inf}, Case{"lg2.approx.ftz.f32 d, a;", 1, 0},
                        Case{"lg2.approx.f32 d, a;", inf, inf}, Case{"rcp.approx.ftz.f32 d, a;", -0.0f, -inf},
                        Case{"rcp.approx.ftz.f32 d, a;", -inf, -0.0f}, Case{"rsqrt.approx.ftz.f32 d, a;", inf, 0},
                        Case{"sqrt.approx.ftz.f32 d, a;", -0.0f, -0.0f}, Case{"sin.approx.f32 d, a;", -0.0f, -0.0f},
                        Case{"cos.approx.f32 d, a;", 0, 1}, Case{"tanh.approx.f32 d, a;", -inf, -1}})
    try_all({form(c.text, [=](float) { return c.want; }).of(c.x)});
}

// f32x2: computes both halves of 64 bits in the same way.
template <class F>
auto both(F f) {
  return [f](uint64_t a, uint64_t b, uint64_t c) {
    uint64_t d = 0;
    for (const int shift : {0, 32}) {
      const auto half = [&](uint64_t x) { return value_of<float>(x >> shift & 0xffffffff); };
      d |= bits_of(f(half(a), half(b), half(c))) << shift;
    }
    return d;
  };
}
TEST(Float, PairsOfFloat32) {
  std::vector<Form> forms =
      for_modes([](const Mode& mode, bool ftz, const std::string& suffix, std::vector<Form>* list) {
        const auto three = [=](auto op) {
          return both([=](float a, float b, float c) { return computed(mode, ftz, a, b, c, op); });
        };
        list->push_back(form("fma" + suffix + ".f32x2 d, a, b, c;", three(fused)));
        const auto add = three([](float a, float b, float, float lift) { return a * lift + b * lift; });
        const auto sub = three([](float a, float b, float, float lift) { return a * lift - b * lift; });
        const auto mul = three(product_of);
        list->push_back(form("add" + suffix + ".f32x2 d, a, b;", [=](uint64_t a, uint64_t b) { return add(a, b, 0); }));
        list->push_back(form("sub" + suffix + ".f32x2 d, a, b;", [=](uint64_t a, uint64_t b) { return sub(a, b, 0); }));
        list->push_back(form("mul" + suffix + ".f32x2 d, a, b;", [=](uint64_t a, uint64_t b) { return mul(a, b, 0); }));
      });
  const auto sum = both([](float x, float y, float) { return finished(x + y, false); });
  const auto product = both([](float x, float y, float) { return finished(x * y, false); });
  forms.push_back(form("add.f32x2 d, a, b;", [=](uint64_t a, uint64_t b) { return sum(a, b, 0); }));
  forms.push_back(form("mul.f32x2 d, a, b;", [=](uint64_t a, uint64_t b) { return product(a, b, 0); }));
  for (Form& form : forms) form.needs = Needs::blackwell;
  try_all(forms);
}

}  // namespace
}  // namespace tandem::test
