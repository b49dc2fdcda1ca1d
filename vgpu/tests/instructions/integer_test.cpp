// Tests of PTX ISA, "Integer Arithmetic Instructions" and "Extended-Precision Integer Arithmetic Instructions".
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>

#include "base/text.h"
#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

using s16 = int16_t;
using u16 = uint16_t;
using s32 = int32_t;
using u32 = uint32_t;
using s64 = int64_t;
using u64 = uint64_t;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
using s128 = __int128;
using u128 = unsigned __int128;
#pragma GCC diagnostic pop

// Returns PTX's name of T.
template <class T>
std::string name() {
  return str_cat(std::numeric_limits<T>::is_signed ? "s" : "u", 8 * sizeof(T));
}
template <class T>
T wrap(u128 x) {
  return static_cast<T>(x);
}
template <class T>
u128 wide(T x) {
  return static_cast<u128>(static_cast<s128>(x));
}

// Calls f<T>(forms) for all six types.
template <class F>
std::vector<Form> for_types(F&& f) {
  std::vector<Form> forms;
  f(s16{}, forms), f(u16{}, forms), f(s32{}, forms), f(u32{}, forms), f(s64{}, forms), f(u64{}, forms);
  return forms;
}

TEST(Integer, AddSub) {
  std::vector<Form> forms = for_types([]<class T>(T, std::vector<Form>& list) {
    list.push_back(form("add." + name<T>() + " d, a, b;", [](T a, T b) { return wrap<T>(wide(a) + wide(b)); }));
    list.push_back(form("sub." + name<T>() + " d, a, b;", [](T a, T b) { return wrap<T>(wide(a) - wide(b)); }));
    list.push_back(form("add." + name<T>() + " d, a, -7;", [](T a) { return wrap<T>(wide(a) - 7); }));
  });
  const auto clamp = [](s64 x) { return static_cast<s32>(std::clamp<s64>(x, INT32_MIN, INT32_MAX)); };
  forms.push_back(form("add.sat.s32 d, a, b;", [=](s32 a, s32 b) { return clamp(s64{a} + b); }));
  forms.push_back(form("sub.sat.s32 d, a, b;", [=](s32 a, s32 b) { return clamp(s64{a} - b); }));
  try_all(forms);
}

TEST(Integer, Multiply) {
  try_all(for_types([]<class T>(T, std::vector<Form>& list) {
    constexpr int bits = 8 * sizeof(T);
    const std::string n = name<T>();
    list.push_back(form("mul.lo." + n + " d, a, b;", [](T a, T b) { return wrap<T>(wide(a) * wide(b)); }));
    list.push_back(form("mul.hi." + n + " d, a, b;", [](T a, T b) { return wrap<T>((wide(a) * wide(b)) >> bits); }));
    list.push_back(
        form("mad.lo." + n + " d, a, b, c;", [](T a, T b, T c) { return wrap<T>(wide(a) * wide(b) + wide(c)); }));
    list.push_back(form("mad.hi." + n + " d, a, b, c;",
                        [](T a, T b, T c) { return wrap<T>(((wide(a) * wide(b)) >> bits) + wide(c)); }));
  }));
}

TEST(Integer, MultiplyWide) {
  try_all({
      form("mul.wide.s16 d, a, b;", [](s16 a, s16 b) { return s32{a} * b; }),
      form("mul.wide.u16 d, a, b;", [](u16 a, u16 b) { return u32{a} * b; }),
      form("mul.wide.s32 d, a, b;", [](s32 a, s32 b) { return s64{a} * b; }),
      form("mul.wide.u32 d, a, b;", [](u32 a, u32 b) { return u64{a} * b; }),
      form("mad.wide.s16 d, a, b, c;", [](s16 a, s16 b, s32 c) { return wrap<s32>(wide(s32{a} * b) + wide(c)); }),
      form("mad.wide.u16 d, a, b, c;", [](u16 a, u16 b, u32 c) { return wrap<u32>(wide(u32{a} * b) + wide(c)); }),
      form("mad.wide.s32 d, a, b, c;", [](s32 a, s32 b, s64 c) { return wrap<s64>(wide(s64{a} * b) + wide(c)); }),
      form("mad.wide.u32 d, a, b, c;", [](u32 a, u32 b, u64 c) { return wrap<u64>(wide(u64{a} * b) + wide(c)); }),
      form("mad.hi.sat.s32 d, a, b, c;",
           [](s32 a, s32 b, s32 c) {
             return static_cast<s32>(std::clamp<s64>(((s64{a} * b) >> 32) + c, INT32_MIN, INT32_MAX));
           }),
      form("mad.lo.s32 d, a, 3, b;", [](s32 a, s32 b) { return wrap<s32>(wide(a) * 3 + wide(b)); }),
  });
}

TEST(Integer, Multiply24) {
  const auto low = [](u32 x) { return u64{x & 0xffffff}; };
  const auto low_signed = [](s32 x) { return static_cast<s64>(static_cast<s32>(static_cast<u32>(x) << 8) >> 8); };
  try_all({
      form("mul24.lo.u32 d, a, b;", [=](u32 a, u32 b) { return wrap<u32>(low(a) * low(b)); }),
      form("mul24.hi.u32 d, a, b;", [=](u32 a, u32 b) { return wrap<u32>((low(a) * low(b)) >> 16); }),
      form("mul24.lo.s32 d, a, b;", [=](s32 a, s32 b) { return wrap<s32>(wide(low_signed(a) * low_signed(b))); }),
      form("mul24.hi.s32 d, a, b;",
           [=](s32 a, s32 b) { return wrap<s32>(wide((low_signed(a) * low_signed(b)) >> 16)); }),
      form("mad24.lo.u32 d, a, b, c;", [=](u32 a, u32 b, u32 c) { return wrap<u32>(low(a) * low(b) + c); }),
      form("mad24.lo.s32 d, a, b, c;",
           [=](s32 a, s32 b, s32 c) { return wrap<s32>(wide(low_signed(a) * low_signed(b)) + wide(c)); }),
  });
}

TEST(Integer, Divide) {
  // Division by zero is unspecified, and so is the one quotient that does not fit.
  try_all(for_types([]<class T>(T, std::vector<Form>& list) {
    const auto fits = [](T a, T b) {
      return b != 0 &&
             !(std::numeric_limits<T>::is_signed && a == std::numeric_limits<T>::min() && b == static_cast<T>(-1));
    };
    list.push_back(form("div." + name<T>() + " d, a, b;", [](T a, T b) { return static_cast<T>(a / b); }).where(fits));
    list.push_back(form("rem." + name<T>() + " d, a, b;", [](T a, T b) { return static_cast<T>(a % b); }).where(fits));
  }));
}

TEST(Integer, MinMaxAbsNegSad) {
  try_all(for_types([]<class T>(T, std::vector<Form>& list) {
    const std::string n = name<T>();
    list.push_back(form("min." + n + " d, a, b;", [](T a, T b) { return std::min(a, b); }));
    list.push_back(form("max." + n + " d, a, b;", [](T a, T b) { return std::max(a, b); }));
    list.push_back(form("sad." + n + " d, a, b, c;", [](T a, T b, T c) {
      return wrap<T>(wide(c) + (a < b ? wide(b) - wide(a) : wide(a) - wide(b)));
    }));
    if (!std::numeric_limits<T>::is_signed) return;
    list.push_back(form("neg." + n + " d, a;", [](T a) { return wrap<T>(-wide(a)); }));
    list.push_back(form("abs." + n + " d, a;", [](T a) { return wrap<T>(a < 0 ? -wide(a) : wide(a)); }));
  }));
  try_all({
      form("min.relu.s32 d, a, b;", [](s32 a, s32 b) { return std::max(0, std::min(a, b)); }),
      form("max.relu.s32 d, a, b;", [](s32 a, s32 b) { return std::max(0, std::max(a, b)); }),
  });
}

// Applies F to two 16-bit values in 32 bits.
template <class T, class F>
auto halves(F f) {
  return [f](u32 a, u32 b) {
    u32 d = 0;
    for (const int shift : {0, 16})
      d |= u32{static_cast<u16>(f(static_cast<T>(a >> shift), static_cast<T>(b >> shift)))} << shift;
    return d;
  };
}
TEST(Integer, PairsOfSixteenBits) {
  try_all({
      form("add.s16x2 d, a, b;", halves<s16>([](s16 a, s16 b) { return a + b; })),
      form("add.u16x2 d, a, b;", halves<u16>([](u16 a, u16 b) { return a + b; })),
      form("min.s16x2 d, a, b;", halves<s16>([](s16 a, s16 b) { return std::min(a, b); })),
      form("max.s16x2 d, a, b;", halves<s16>([](s16 a, s16 b) { return std::max(a, b); })),
      form("min.u16x2 d, a, b;", halves<u16>([](u16 a, u16 b) { return std::min(a, b); })),
      form("max.u16x2 d, a, b;", halves<u16>([](u16 a, u16 b) { return std::max(a, b); })),
      form("max.relu.s16x2 d, a, b;", halves<s16>([](s16 a, s16 b) { return std::max<int>(0, std::max(a, b)); })),
      form("min.relu.s16x2 d, a, b;", halves<s16>([](s16 a, s16 b) { return std::max<int>(0, std::min(a, b)); })),
  });
}

TEST(Integer, DotProducts) {
  const auto byte = [](u32 x, int i, bool is_signed) -> s64 {
    const auto b = static_cast<uint8_t>(x >> (8 * i));
    return is_signed ? static_cast<int8_t>(b) : b;
  };
  const auto dot4 = [=](u32 a, bool a_signed, u32 b, bool b_signed, u32 c) {
    s64 sum = static_cast<s32>(c);
    for (int i = 0; i < 4; ++i) sum += byte(a, i, a_signed) * byte(b, i, b_signed);
    return static_cast<u32>(sum);
  };
  const auto dot2 = [=](u32 a, bool a_signed, u32 b, bool b_signed, u32 c, int half) {
    s64 sum = static_cast<s32>(c);
    for (int i = 0; i < 2; ++i) {
      const auto h = static_cast<u16>(a >> (16 * i));
      sum += (a_signed ? s64{static_cast<s16>(h)} : s64{h}) * byte(b, 2 * half + i, b_signed);
    }
    return static_cast<u32>(sum);
  };
  std::vector<Form> forms;
  for (const bool a : {false, true})
    for (const bool b : {false, true}) {
      const std::string types = std::string(a ? ".s32" : ".u32") + (b ? ".s32" : ".u32");
      forms.push_back(form("dp4a" + types + " d, a, b, c;", [=](u32 x, u32 y, u32 z) { return dot4(x, a, y, b, z); }));
      for (const int half : {0, 1})
        forms.push_back(form(std::string("dp2a") + (half == 0 ? ".lo" : ".hi") + types + " d, a, b, c;",
                             [=](u32 x, u32 y, u32 z) { return dot2(x, a, y, b, z, half); }));
    }
  try_all(forms);
}

// A carry is visible only in the result of the next instruction.
TEST(Integer, ExtendedPrecision) {
  try_all({
      form("add.cc.u32 d, a, b;\naddc.u32 e, c, g;",
           [](u32 a, u32 b, u32 c, u32 g) {
             const u32 low = a + b;
             return std::pair(low, c + g + (low < a));
           }),
      form("add.cc.s32 d, a, b;\naddc.cc.s32 e, c, g;\naddc.s32 d, d, 0;",
           [](u32 a, u32 b, u32 c, u32 g) {
             const u64 low = u64{a} + b, high = u64{c} + g + (low >> 32);
             return std::pair(static_cast<u32>(low) + static_cast<u32>(high >> 32), static_cast<u32>(high));
           }),
      form("sub.cc.u32 d, a, b;\nsubc.u32 e, c, g;",
           [](u32 a, u32 b, u32 c, u32 g) { return std::pair(a - b, c - g - (a < b)); }),
      form("sub.cc.u32 d, a, b;\nsubc.cc.u32 e, c, g;\nsubc.u32 d, d, 0;",
           [](u32 a, u32 b, u32 c, u32 g) {
             const u64 low = u64{a} - b, high = u64{c} - g - (low >> 63);
             return std::pair(static_cast<u32>(low) - static_cast<u32>(high >> 63), static_cast<u32>(high));
           }),
      form("mad.lo.cc.u32 d, a, b, c;\nmadc.hi.u32 e, a, b, g;",
           [](u32 a, u32 b, u32 c, u32 g) {
             const u64 product = u64{a} * b, low = (product & 0xffffffff) + c;
             return std::pair(static_cast<u32>(low), static_cast<u32>((product >> 32) + g + (low >> 32)));
           }),
      form("add.cc.u64 d, a, b;\naddc.u64 e, c, g;",
           [](u64 a, u64 b, u64 c, u64 g) {
             const u64 low = a + b;
             return std::pair(low, c + g + (low < a));
           }),
      form("sub.cc.s64 d, a, b;\nsubc.s64 e, c, g;",
           [](u64 a, u64 b, u64 c, u64 g) { return std::pair(a - b, c - g - (a < b)); }),
      form("mad.lo.cc.u64 d, a, b, c;\nmadc.hi.u64 e, a, b, g;",
           [](u64 a, u64 b, u64 c, u64 g) {
             const u128 product = u128{a} * b, low = (product & ~u64{0}) + c;
             return std::pair(static_cast<u64>(low), static_cast<u64>((product >> 64) + g + (low >> 64)));
           }),
  });
}

}  // namespace
}  // namespace tandem::test
