// Tests of PTX ISA, "Floating Point Instructions": float64.
#include <cfenv>
#include <cmath>

#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

struct Mode {
  const char* name;
  int fenv;
};
const Mode kModes[] = {{"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};

template <class F>
double rounded(int mode, F&& f) {
  std::fesetround(mode);
  volatile double result = f();
  std::fesetround(FE_TONEAREST);
  return result;
}

// PTX does not specify the NaN for float64.
bool same(const Values&, uint64_t got, uint64_t want) {
  return got == want || (std::isnan(value_of<double>(got)) && std::isnan(value_of<double>(want)));
}

TEST(Double, RoundedExactly) {
  std::vector<Form> forms;
  for (const Mode& mode : kModes) {
    const std::string suffix = std::string(".") + mode.name + ".f64 d, a";
    const int m = mode.fenv;
    forms.push_back(form("add" + suffix + ", b;", [=](double x, double y) {
      volatile double a = x, b = y;
      return rounded(m, [&] { return a + b; });
    }));
    forms.push_back(form("sub" + suffix + ", b;", [=](double x, double y) {
      volatile double a = x, b = y;
      return rounded(m, [&] { return a - b; });
    }));
    forms.push_back(form("mul" + suffix + ", b;", [=](double x, double y) {
      volatile double a = x, b = y;
      return rounded(m, [&] { return a * b; });
    }));
    for (const char* name : {"fma", "mad"})
      forms.push_back(form(name + suffix + ", b, c;", [=](double x, double y, double z) {
        volatile double a = x, b = y, c = z;
        return rounded(m, [&] { return std::fma(a, b, c); });
      }));
    forms.push_back(form("div" + suffix + ", b;", [=](double x, double y) {
      volatile double a = x, b = y;
      return rounded(m, [&] { return a / b; });
    }));
    forms.push_back(form("rcp" + suffix + ";", [=](double x) {
      volatile double a = x, one = 1;
      return rounded(m, [&] { return one / a; });
    }));
    forms.push_back(form("sqrt" + suffix + ";", [=](double x) {
      volatile double a = x;
      return rounded(m, [&] { return std::sqrt(a); });
    }));
  }
  for (Form& form : forms) form.within(same);
  try_all(forms);
}

TEST(Double, NaNOfEitherSign) {
  const auto nan = value_of<double>(0xfff0000000000123), other = value_of<double>(0x7ff8000000000456);
  std::vector<Form> forms = {
      form("neg.f64 d, a;", [](double a) { return a; }).of(nan),
      form("abs.f64 d, a;", [](double a) { return a; }).of(nan),
      form("add.f64 d, a, b;", [](double, double b) { return b; }).of(other, nan),
      form("sub.f64 d, a, b;", [](double, double b) { return b; }).of(1.0, nan),
      form("mul.f64 d, a, b;", [](double a, double) { return a; }).of(nan, -1.0),
      form("fma.rn.f64 d, a, b, c;", [](double, double, double c) { return c; }).of(other, 1.0, nan),
      form("min.f64 d, a, b;", [](double, double b) { return b; }).of(other, nan),
  };
  for (Form& form : forms) form.within(same);
  try_all(forms);
}

TEST(Double, SignsAndChoices) {
  std::vector<Form> forms = {
      form("neg.f64 d, a;", [](double a) { return -a; }),
      form("abs.f64 d, a;", [](double a) { return std::fabs(a); }),
      form("copysign.f64 d, a, b;", [](double a, double b) { return std::copysign(b, a); }),
      form("min.f64 d, a, b;",
           [](double a, double b) {
             if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
             return a < b || (a == b && std::signbit(a)) ? a : b;
           }),
      form("max.f64 d, a, b;",
           [](double a, double b) {
             if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
             return a > b || (a == b && std::signbit(b)) ? a : b;
           }),
  };
  for (Form& form : forms) form.within(same);
  try_all(forms);
}

}  // namespace
}  // namespace tandem::test
