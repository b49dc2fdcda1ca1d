// Tests of PTX ISA, "Half Precision Floating Point Instructions": f16, bf16 and pairs of them.
#include <algorithm>
#include <cmath>

#include "vgpu/src/units/numbers.h"
#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

using vgpu::units::decode;
using vgpu::units::encode;
using vgpu::units::Format;

struct Options {
  Format format = Format::f16;
  bool ftz = false, sat = false, relu = false;
  std::string suffix() const {
    return std::string(ftz ? ".ftz" : "") + (sat ? ".sat" : "") + (relu ? ".relu" : "") + "." +
           vgpu::units::name_of(format);
  }
};

uint32_t flushed(uint32_t h, const Options& o) {
  return o.ftz && (h & 0x7c00) == 0 && o.format == Format::f16 ? h & 0x8000 : h;
}

// Rounds x to a half. x is exact, or rounded to odd with enough bits.
uint16_t rounded(double x, const Options& o) {
  // Rounds a float64 to odd in float32 first, then once to the half.
  auto f = static_cast<float>(x);
  if (std::isfinite(f) && static_cast<double>(f) != x) {
    if (std::fabs(static_cast<double>(f)) > std::fabs(x)) f = std::nextafterf(f, 0);
    f = value_of<float>(bits_of(f) | 1);
  }
  if (std::isinf(f) && std::isfinite(x)) f = std::copysign(0x1.fffffep127f, f);
  uint32_t h = encode(f, o.format);
  // Flushes values that are below the smallest normal number after rounding to 11 bits. A subnormal number's fewer bits
  // do not count.
  if (o.ftz && o.format == Format::f16 && std::fabs(x) < 0x1.ffep-15) h &= 0x8000;
  if (o.relu && !std::isnan(x) && std::signbit(x)) h = 0;
  if (o.sat) h = std::isnan(x) || !(x > 0) ? 0 : std::min(h, o.format == Format::f16 ? 0x3c00u : 0x3f80u);
  return static_cast<uint16_t>(h);
}

// Converts a function of halves to a function of 16-bit registers, or of both halves of a 32-bit register.
template <class F>
auto single(Options o, F f) {
  return [=](auto... h) { return Half{rounded(f(static_cast<double>(decode(flushed(h.bits, o), o.format))...), o)}; };
}
template <int Count, class F>
auto scalar(Options o, F f) {
  const auto call = single(o, f);
  if constexpr (Count == 1)
    return [=](Half a) { return call(a); };
  else if constexpr (Count == 2)
    return [=](Half a, Half b) { return call(a, b); };
  else
    return [=](Half a, Half b, Half c) { return call(a, b, c); };
}
template <int Count, class F>
auto packed(Options o, F f) {
  const auto call = single(o, f);
  const auto half = [](Pair p, int i) { return Half{static_cast<uint16_t>(p.bits >> (16 * i))}; };
  const auto join = [](Half low, Half high) { return Pair{uint32_t{high.bits} << 16 | low.bits}; };
  if constexpr (Count == 1)
    return [=](Pair a) { return join(call(half(a, 0)), call(half(a, 1))); };
  else if constexpr (Count == 2)
    return [=](Pair a, Pair b) { return join(call(half(a, 0), half(b, 0)), call(half(a, 1), half(b, 1))); };
  else
    return [=](Pair a, Pair b, Pair c) {
      return join(call(half(a, 0), half(b, 0), half(c, 0)), call(half(a, 1), half(b, 1), half(c, 1)));
    };
}

constexpr const char* kOperands[] = {"", " d, a;", " d, a, b;", " d, a, b, c;"};

template <int Count, class F>
void add_forms(const std::string& name, const Options& o, F f, std::vector<Form>* forms) {
  forms->push_back(form(name + o.suffix() + kOperands[Count], scalar<Count>(o, f)));
  forms->push_back(form(name + o.suffix() + "x2" + kOperands[Count], packed<Count>(o, f)));
}

// Sums distant terms: the bits that a double loses go into its last bit.
double sum_to_odd(double a, double b) {
  const double s = a + b, part = s - a, error = (a - (s - part)) + (b - part);
  if (!std::isfinite(s) || error == 0) return s;
  const double toward = (error > 0) == (s > 0) ? s : std::nextafter(s, 0.0);
  return value_of<double>(bits_of(toward) | 1);
}

std::vector<Options> arithmetic_options() {
  std::vector<Options> list;
  for (const bool ftz : {false, true})
    for (const bool sat : {false, true}) list.push_back({Format::f16, ftz, sat, false});
  list.push_back({Format::bf16, false, false, false});
  return list;
}

TEST(HalfPrecision, AddSubMulFma) {
  std::vector<Form> forms;
  for (const Options& o : arithmetic_options()) {
    add_forms<2>(
        "add", o, [](double a, double b) { return sum_to_odd(a, b); }, &forms);
    add_forms<2>(
        "sub", o, [](double a, double b) { return sum_to_odd(a, -b); }, &forms);
    add_forms<2>(
        "mul", o, [](double a, double b) { return a * b; }, &forms);
    add_forms<3>(
        "fma.rn", o, [](double a, double b, double c) { return sum_to_odd(a * b, c); }, &forms);
  }
  for (const Options& o : {Options{Format::f16, false, false, true}, Options{Format::f16, true, false, true},
                           Options{Format::bf16, false, false, true}})
    add_forms<3>(
        "fma.rn", o, [](double a, double b, double c) { return sum_to_odd(a * b, c); }, &forms);
  try_all(forms);
}

TEST(HalfPrecision, SignsAndChoices) {
  std::vector<Form> forms;
  const auto least = [](double a, double b, bool propagate, bool max) {
    if (std::isnan(a) || std::isnan(b)) {
      if (propagate || (std::isnan(a) && std::isnan(b))) return std::nan("");
      return std::isnan(a) ? b : a;
    }
    const bool a_first = a < b || (a == b && std::signbit(a));
    return a_first != max ? a : b;
  };
  for (const Options& o : {Options{Format::f16, false, false, false}, Options{Format::f16, true, false, false},
                           Options{Format::bf16, false, false, false}})
    for (const bool nan : {false, true}) {
      const std::string order = o.ftz ? ".ftz" : "";
      const std::string suffix = order + (nan ? ".NaN." : ".") + vgpu::units::name_of(o.format);
      for (const bool max : {false, true}) {
        const std::string name = (max ? "max" : "min") + suffix;
        const auto f = [=](double a, double b) { return least(a, b, nan, max); };
        forms.push_back(form(name + " d, a, b;", scalar<2>(o, f)));
        forms.push_back(form(name + "x2 d, a, b;", packed<2>(o, f)));
      }
    }
  // Only the sign bits may change; PTX does not specify NaN's sign.
  const auto sign_only = [](const Values&, uint64_t got, uint64_t want) { return got == want; };
  for (const Format format : {Format::f16, Format::bf16}) {
    const std::string type = vgpu::units::name_of(format);
    const auto number = [=](Half a) { return !std::isnan(decode(a.bits, format)); };
    forms.push_back(form("neg." + type + " d, a;", [](Half a) { return Half{static_cast<uint16_t>(a.bits ^ 0x8000)}; })
                        .within(sign_only)
                        .where(number));
    forms.push_back(form("abs." + type + " d, a;", [](Half a) { return Half{static_cast<uint16_t>(a.bits & 0x7fff)}; })
                        .within(sign_only)
                        .where(number));
    const auto numbers = [=](Pair a) {
      return !std::isnan(decode(a.bits & 0xffff, format)) && !std::isnan(decode(a.bits >> 16, format));
    };
    forms.push_back(form("neg." + type + "x2 d, a;", [](Pair a) { return Pair{a.bits ^ 0x80008000}; }).where(numbers));
    forms.push_back(form("abs." + type + "x2 d, a;", [](Pair a) { return Pair{a.bits & 0x7fff7fff}; }).where(numbers));
  }
  try_all(forms);
}

TEST(HalfPrecision, Approximations) {
  std::vector<Form> forms;
  // Checks each half within a relative or absolute error.
  const auto bounded = [](Format format, double relative, double absolute, int count) {
    return [=](const Values&, uint64_t got, uint64_t want) {
      for (int i = 0; i < count; ++i) {
        const double x = decode(static_cast<uint32_t>(got >> (16 * i)) & 0xffff, format),
                     y = decode(static_cast<uint32_t>(want >> (16 * i)) & 0xffff, format);
        if (std::isnan(y) ? !std::isnan(x)
                          : x != y && !(std::fabs(x - y) <= std::max(absolute, relative * std::fabs(y))))
          return false;
      }
      return true;
    };
  };
  const auto add = [&](const std::string& name, const Options& o, auto f, double relative, double absolute) {
    const std::string type = vgpu::units::name_of(o.format);
    forms.push_back(form(name + type + " d, a;", scalar<1>(o, f)).within(bounded(o.format, relative, absolute, 1)));
    forms.push_back(form(name + type + "x2 d, a;", packed<1>(o, f)).within(bounded(o.format, relative, absolute, 2)));
  };
  const Options f16 = {Format::f16, false, false, false}, bf16 = {Format::bf16, false, false, false};
  const auto ex2 = [](double a) { return std::exp2(a); };
  const auto tanh = [](double a) { return std::tanh(a); };
  // Near the smallest numbers a relative error is smaller than their spacing.
  add("ex2.approx.", f16, ex2, std::exp2(-9.9), 0x1p-24);
  add("ex2.approx.ftz.", bf16, ex2, 0x1p-7, 0x1p-126);
  add("tanh.approx.", f16, tanh, 0, std::exp2(-10.9));
  add("tanh.approx.", bf16, tanh, 0, 0x1p-8);
  try_all(forms);
}

}  // namespace
}  // namespace tandem::test
