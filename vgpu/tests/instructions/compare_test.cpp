// Tests of PTX ISA, "Comparison and Selection Instructions".
#include <cmath>
#include <limits>

#include "vgpu/src/units/numbers.h"
#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;

template <class T>
bool compares(const std::string& how, T a, T b) {
  bool ordered = true;
  if constexpr (std::is_floating_point_v<T>) ordered = !std::isnan(a) && !std::isnan(b);
  if (how == "num") return ordered;
  if (how == "nan") return !ordered;
  const bool unordered_too = how.size() == 3 && how[2] == 'u';
  if (!ordered) return unordered_too;
  const std::string base = how.substr(0, 2);
  if (base == "eq") return a == b;
  if (base == "ne") return a != b;
  if (base == "lt" || base == "lo") return a < b;
  if (base == "le" || base == "ls") return a <= b;
  if (base == "gt" || base == "hi") return a > b;
  return a >= b;  // ge, hs
}

template <class T>
void add_comparisons(const std::string& type, const std::vector<std::string>& hows, std::vector<Form>* forms) {
  for (const std::string& how : hows)
    forms->push_back(form("setp." + how + "." + type + " d, a, b;", [=](T a, T b) { return compares(how, a, b); }));
}

const std::vector<std::string> kSigned = {"eq", "ne", "lt", "le", "gt", "ge"};
const std::vector<std::string> kUnsigned = {"eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"};
const std::vector<std::string> kReal = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                        "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

TEST(Compare, Integers) {
  std::vector<Form> forms;
  add_comparisons<int16_t>("s16", kSigned, &forms);
  add_comparisons<s32>("s32", kSigned, &forms);
  add_comparisons<s64>("s64", kSigned, &forms);
  add_comparisons<uint16_t>("u16", kUnsigned, &forms);
  add_comparisons<u32>("u32", kUnsigned, &forms);
  add_comparisons<u64>("u64", kUnsigned, &forms);
  for (const char* how : {"eq", "ne"}) {
    add_comparisons<uint16_t>("b16", {how}, &forms);
    add_comparisons<u32>("b32", {how}, &forms);
    add_comparisons<u64>("b64", {how}, &forms);
  }
  forms.push_back(form("setp.gt.s32 d, a, -5;", [](s32 a) { return a > -5; }));
  try_all(forms);
}

float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

TEST(Compare, Reals) {
  std::vector<Form> forms;
  add_comparisons<float>("f32", kReal, &forms);
  add_comparisons<double>("f64", kReal, &forms);
  for (const std::string& how : kReal)
    forms.push_back(form("setp." + how + ".ftz.f32 d, a, b;",
                         [=](float a, float b) { return compares(how, flushed(a), flushed(b)); }));
  using vgpu::units::decode;
  using vgpu::units::Format;
  for (const std::string& how : kReal) {
    forms.push_back(form("setp." + how + ".f16 d, a, b;", [=](Half a, Half b) {
      return compares(how, decode(a.bits, Format::f16), decode(b.bits, Format::f16));
    }));
    forms.push_back(form("setp." + how + ".bf16 d, a, b;", [=](Half a, Half b) {
      return compares(how, decode(a.bits, Format::bf16), decode(b.bits, Format::bf16));
    }));
  }
  for (const char* how : {"lt", "neu"})
    forms.push_back(form(std::string("setp.") + how + ".f16x2 d|e, a, b;", [=](Pair a, Pair b) {
      const auto half = [&](int i) {
        return compares(std::string(how), decode(a.bits >> (16 * i) & 0xffff, Format::f16),
                        decode(b.bits >> (16 * i) & 0xffff, Format::f16));
      };
      return std::pair(half(0), half(1));
    }));
  try_all(forms);
}

// The second predicate is the negated comparison. Each is combined with a third predicate.
TEST(Compare, JoinedWithAPredicate) {
  try_all({
      form("setp.lt.s32 d|e, a, b;", [](s32 a, s32 b) { return std::pair(a < b, a >= b); }),
      form("setp.lt.and.s32 d|e, a, b, c;", [](s32 a, s32 b, bool c) { return std::pair(a < b && c, a >= b && c); }),
      form("setp.lt.or.s32 d|e, a, b, c;", [](s32 a, s32 b, bool c) { return std::pair(a < b || c, a >= b || c); }),
      form("setp.lt.xor.s32 d|e, a, b, c;",
           [](s32 a, s32 b, bool c) { return std::pair((a < b) != c, (a >= b) != c); }),
      form("setp.lt.and.s32 d, a, b, !c;", [](s32 a, s32 b, bool c) { return a < b && !c; }),
      form("setp.gt.or.f32 d, a, b, c;", [](float a, float b, bool c) { return a > b || c; }),
      form("setp.eq.and.u64 d, a, b, c;", [](u64 a, u64 b, bool c) { return a == b && c; }),
  });
}

TEST(Compare, Set) {
  try_all({
      form("set.lt.u32.s32 d, a, b;", [](s32 a, s32 b) { return a < b ? ~0u : 0u; }),
      form("set.gt.f32.s32 d, a, b;", [](s32 a, s32 b) { return a > b ? 1.0f : 0.0f; }),
      form("set.le.s32.f32 d, a, b;", [](float a, float b) { return a <= b ? -1 : 0; }),
      form("set.neu.f32.f32 d, a, b;", [](float a, float b) { return a != b ? 1.0f : 0.0f; }),
      form("set.hi.u32.u64 d, a, b;", [](u64 a, u64 b) { return a > b ? ~0u : 0u; }),
      form("set.eq.and.u32.u32 d, a, b, c;", [](u32 a, u32 b, bool c) { return a == b && c ? ~0u : 0u; }),
      form("set.gt.u32.f64 d, a, b;", [](double a, double b) { return a > b ? ~0u : 0u; }),
  });
}

TEST(Compare, Select) {
  std::vector<Form> forms;
  for (const char* type : {"b16", "u16", "s16"})
    forms.push_back(
        form(std::string("selp.") + type + " d, a, b, c;", [](uint16_t a, uint16_t b, bool c) { return c ? a : b; }));
  for (const char* type : {"b32", "u32", "s32", "f32"})
    forms.push_back(form(std::string("selp.") + type + " d, a, b, c;", [](u32 a, u32 b, bool c) { return c ? a : b; }));
  for (const char* type : {"b64", "u64", "s64", "f64"})
    forms.push_back(form(std::string("selp.") + type + " d, a, b, c;", [](u64 a, u64 b, bool c) { return c ? a : b; }));
  forms.push_back(form("selp.f32 d, 0f3F800000, a, !b;", [](float a, bool b) { return b ? a : 1.0f; }));
  forms.push_back(form("selp.b32 d, 1, 0, a;", [](bool a) { return u32{a}; }));
  forms.push_back(form("slct.u32.s32 d, a, b, c;", [](u32 a, u32 b, s32 c) { return c >= 0 ? a : b; }));
  forms.push_back(form("slct.b64.s32 d, a, b, c;", [](u64 a, u64 b, s32 c) { return c >= 0 ? a : b; }));
  forms.push_back(form("slct.f32.f32 d, a, b, c;", [](u32 a, u32 b, float c) { return c >= 0 ? a : b; }));
  forms.push_back(form("slct.ftz.u32.f32 d, a, b, c;", [](u32 a, u32 b, float c) { return flushed(c) >= 0 ? a : b; }));
  try_all(forms);
}

}  // namespace
}  // namespace tandem::test
