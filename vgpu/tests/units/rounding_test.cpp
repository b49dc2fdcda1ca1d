// Tests of arithmetic with directed rounding against the CPU's rounding modes, of minimum and maximum, and of pairs of
// 16-bit numbers.
#include <cfenv>
#include <tuple>

#include "vgpu/tests/units/on_targets.h"

namespace tandem::vgpu::units {
namespace {

// Computes f() on the CPU in this mode.
template <class F>
float rounded(Rounding rounding, F&& f) {
  const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  std::fesetround(modes[static_cast<int>(rounding)]);
  const float result = f();
  std::fesetround(FE_TONEAREST);
  return result;
}

float flush(float x, bool ftz) { return ftz && std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
uint32_t result_bits(float x) { return std::isnan(x) ? 0x7fffffffu : as_bits(x); }

// Computes f(lift), which is linear in lift. A value is flushed if it is tiny after rounding to 24 bits with any
// exponent, which the lifted value shows.
template <class F>
uint32_t wanted(Rounding rounding, bool ftz, F&& f) {
  const float x = rounded(rounding, [&] { return f(1.0f); });
  const bool doubtful = ftz && std::fabs(x) <= 0x1p-126f;
  if (doubtful && std::fabs(rounded(rounding, [&] { return f(0x1p64f); })) < 0x1p-62f)
    return as_bits(std::copysign(0.0f, x));
  return result_bits(x);
}

// Operands whose results are near ties, cancel, over- and underflow: all pairs of adversarial numbers, and random
// numbers of similar exponents.
struct Operands {
  std::vector<float> a, b, c;
};
Operands operands() {
  Operands o;
  const std::vector<float> special = hostile_floats(0, 0);
  test::Random random(11);
  for (const float a : special)
    for (const float b : special) {
      o.a.push_back(a), o.b.push_back(b);
      o.c.push_back(special[random.next() % special.size()]);
    }
  for (int i = 0; i < 40000; ++i) {
    const auto pick = [&](uint32_t centre, uint32_t spread) {
      const uint32_t exponent = (centre + random.next() % (2 * spread + 1) - spread) & 0xff;
      return as_float((static_cast<uint32_t>(random.next()) & 0x807fffffu) | exponent << 23);
    };
    const uint32_t centre = i % 3 == 0 ? 127 : i % 3 == 1 ? 20 : 230;
    o.a.push_back(pick(centre, 15));
    o.b.push_back(pick(i % 5 == 0 ? 254 - centre : 127, 12));
    // Every second sum nearly cancels.
    const float product = o.a.back() * o.b.back();
    o.c.push_back(i % 2 == 0 ? as_float(as_bits(-product) + static_cast<uint32_t>(random.next() % 5) - 2)
                             : pick(centre, 30));
  }
  return o;
}

class Arithmetic : public testing::TestWithParam<std::tuple<Rounding, bool>> {};
std::string mode_name(const testing::TestParamInfo<std::tuple<Rounding, bool>>& info) {
  constexpr const char* names[] = {"rn", "rz", "rm", "rp"};
  return std::string(names[static_cast<int>(std::get<0>(info.param))]) + (std::get<1>(info.param) ? "_ftz" : "");
}
INSTANTIATE_TEST_SUITE_P(Modes, Arithmetic,
                         testing::Combine(testing::Values(Rounding::rn, Rounding::rz, Rounding::rm, Rounding::rp),
                                          testing::Bool()),
                         mode_name);

TEST_P(Arithmetic, IsRoundedExactly) {
  const auto [rounding, ftz] = GetParam();
  const int mode = static_cast<int>(rounding);
  const Operands o = operands();
  for (const Rows* rows : all_rows()) {
    const auto add = on_rows<float>(rows->add[mode][ftz], o.a, o.b),
               mul = on_rows<float>(rows->mul[mode][ftz], o.a, o.b),
               div = on_rows<float>(rows->div[mode][ftz], o.a, o.b),
               fma = on_rows<float>(rows->fma[mode][ftz], o.a, o.b, o.c),
               rcp = on_rows<float>(rows->rcp[mode][ftz], o.a), sqrt = on_rows<float>(rows->sqrt[mode][ftz], o.a);
    for (size_t i = 0; i < o.a.size(); ++i) {
      // The variable is volatile, so that the value is computed in this rounding mode.
      volatile float a = flush(o.a[i], ftz), b = flush(o.b[i], ftz), c = flush(o.c[i], ftz), one = 1;
      const auto want = [&, f = ftz, r = rounding](auto&& g) { return wanted(r, f, g); };
      const std::string where =
          std::string(rows->target) + " " + hex(as_bits(a)) + " " + hex(as_bits(b)) + " " + hex(as_bits(c));
      ASSERT_EQ(hex(as_bits(add[i])), hex(want([&](float lift) { return a * lift + b * lift; }))) << "add " << where;
      ASSERT_EQ(hex(as_bits(mul[i])), hex(want([&](float lift) { return a * lift * b; }))) << "mul " << where;
      ASSERT_EQ(hex(as_bits(div[i])), hex(want([&](float lift) { return a * lift / b; }))) << "div " << where;
      ASSERT_EQ(hex(as_bits(fma[i])), hex(want([&](float lift) { return std::fma(a * lift, b, c * lift); })))
          << "fma " << where;
      ASSERT_EQ(hex(as_bits(rcp[i])), hex(want([&](float lift) { return one * lift / a; }))) << "rcp " << where;
      ASSERT_EQ(hex(as_bits(sqrt[i])), hex(want([&](float) { return std::sqrt(a); }))) << "sqrt " << where;
    }
  }
}

TEST(MinimumMaximum, OrdersZerosAndLosesNaN) {
  const std::vector<float> special = hostile_floats(4, 30);
  std::vector<float> a, b;
  for (const float x : special)
    for (const float y : special) a.push_back(x), b.push_back(y);
  for (const Rows* rows : all_rows())
    for (const bool propagate : {false, true})
      for (const bool ftz : {false, true}) {
        const auto low = on_rows<float>(rows->min[propagate][ftz], a, b),
                   high = on_rows<float>(rows->max[propagate][ftz], a, b);
        for (size_t i = 0; i < a.size(); ++i) {
          const float x = flush(a[i], ftz), y = flush(b[i], ftz);
          float want_low = NAN, want_high = NAN;
          if (!std::isnan(x) && !std::isnan(y)) {
            const bool x_first = x < y || (x == y && std::signbit(x));
            want_low = x_first ? x : y, want_high = x_first ? y : x;
          } else if (!propagate && !(std::isnan(x) && std::isnan(y))) {
            want_low = want_high = std::isnan(x) ? y : x;
          }
          ASSERT_EQ(hex(as_bits(low[i])), hex(result_bits(want_low))) << hex(as_bits(x)) << " " << hex(as_bits(y));
          ASSERT_EQ(hex(as_bits(high[i])), hex(result_bits(want_high))) << hex(as_bits(x)) << " " << hex(as_bits(y));
        }
      }
}

TEST(Saturate, ClampsToOneAndTurnsNaNToZero) {
  const std::vector<float> list = hostile_floats(9, 1000);
  for (const Rows* rows : all_rows()) {
    const auto got = on_rows<float>(rows->saturate, list);
    for (size_t i = 0; i < list.size(); ++i)
      ASSERT_EQ(as_bits(got[i]), as_bits(list[i] > 0 ? std::min(list[i], 1.0f) : 0.0f)) << hex(as_bits(list[i]));
  }
}

TEST(Rows, MayBeTheirOwnDestination) {
  for (const Rows* rows : all_rows()) {
    float a[kLanes], b[kLanes], c[kLanes];
    for (int i = 0; i < kLanes; ++i) a[i] = static_cast<float>(i), b[i] = 2, c[i] = 1;
    rows->fma[2][1](a, b, c, b);
    for (int i = 0; i < kLanes; ++i) ASSERT_EQ(b[i], static_cast<float>(2 * i + 1));
  }
}

// ---- Pairs ----

uint32_t half_flush(uint32_t h, Format format, bool ftz) {
  const uint32_t exponent = format == Format::f16 ? 0x7c00 : 0x7f80;
  return ftz && (h & exponent) == 0 ? h & 0x8000 : h;
}

// Returns the exact result of 16-bit values, rounded once. long double holds sums and products of bf16 only if they are
// near each other, so that a far term becomes a small offset.
long double exact_sum(long double x, long double y) {
  if (x == 0 || y == 0 || std::isinf(x) || std::isinf(y) || std::isnan(x) || std::isnan(y)) return x + y;
  const int apart = std::ilogb(x) - std::ilogb(y);
  if (apart > 40) y = std::copysign(std::ldexp(1.0L, std::ilogb(x) - 40), y);
  if (apart < -40) x = std::copysign(std::ldexp(1.0L, std::ilogb(y) - 40), x);
  return x + y;
}

// Converts long double to f16 or bf16, to nearest even, by comparing neighbours.
uint32_t nearest_half(long double x, Format format) {
  if (std::isnan(x)) return 0x7fff;
  const uint32_t sign = std::signbit(x) ? 0x8000 : 0, infinity = format == Format::f16 ? 0x7c00 : 0x7f80;
  const long double m = std::fabs(x);
  uint32_t low = 0, high = infinity;
  while (low + 1 < high) {
    const uint32_t middle = (low + high) / 2;
    (static_cast<long double>(decode(middle, format)) <= m ? low : high) = middle;
  }
  const long double below = decode(low, format);
  const long double above =
      high == infinity ? 2 * below - decode(low - 1, format) : static_cast<long double>(decode(high, format));
  if (std::isinf(m) || m - below > above - m || (m - below == above - m && low % 2 == 1)) ++low;
  return sign | low;
}

int half_exponent(uint32_t h, Format format) {  // bits of a normal number, or fewer
  return format == Format::f16 ? static_cast<int>(h >> 10 & 31) - 15 : static_cast<int>(h >> 7 & 255) - 127;
}

struct PairCase {
  Rows::Half half;
  std::vector<uint32_t> a, b, c;
};
std::vector<PairCase> pair_cases() {
  std::vector<PairCase> cases;
  test::Random random(21);
  for (const Format format : {Format::f16, Format::bf16})
    for (int flags = 0; flags < 8; ++flags) {
      PairCase pair;
      pair.half = {format, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
      const uint32_t special[] = {0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x007f, 0x0080, 0x3c00, 0x3f80, 0xbf80,
                                  0x7bff, 0x7c00, 0x7f7f, 0x7f80, 0xff80, 0xfc00, 0x7fff, 0x7e01, 0x3c01, 0x3f81};
      for (const uint32_t x : special)
        for (const uint32_t y : special) {
          pair.a.push_back(x << 16 | y), pair.b.push_back(y << 16 | x);
          pair.c.push_back(special[random.next() % 20] << 16 | special[random.next() % 20]);
        }
      for (int i = 0; i < 4000; ++i) {
        pair.a.push_back(static_cast<uint32_t>(random.next()));
        pair.b.push_back(static_cast<uint32_t>(random.next()));
        pair.c.push_back(static_cast<uint32_t>(random.next()));
      }
      cases.push_back(std::move(pair));
    }
  return cases;
}

template <class F>
uint32_t expected_pair(const Rows::Half& half, uint32_t a, uint32_t b, uint32_t c, F&& exact) {
  uint32_t result = 0;
  for (const int shift : {0, 16}) {
    const auto in = [&](uint32_t x) {
      return static_cast<long double>(decode(half_flush(x >> shift & 0xffff, half.format, half.ftz), half.format));
    };
    const long double x = exact(in(a), in(b), in(c));
    uint32_t h = nearest_half(x, half.format);
    // Rounds like nearest_half a number of another exponent. A result that is tiny then is flushed.
    const long double smallest = half.format == Format::f16 ? 0x1p-14L : 0x1p-126L;
    if (half.ftz && std::fabs(x) < smallest && half_exponent(nearest_half(x / smallest, half.format), half.format) < 0)
      h &= 0x8000;
    if (half.relu && std::signbit(x) && !std::isnan(x)) h = 0;
    const uint32_t one = half.format == Format::f16 ? 0x3c00 : 0x3f80;
    if (half.saturate) h = !(x > 0) ? 0 : std::min(h, one);
    result |= h << shift;
  }
  return result;
}

TEST(HalfPairs, ArithmeticIsRoundedOnce) {
  for (const PairCase& pair : pair_cases())
    for (const Rows* rows : all_rows()) {
      const Rows::Half half = pair.half;
      const auto two = [&](auto f) {
        return on_rows<uint32_t>([&](const uint32_t* a, const uint32_t* b, uint32_t* d) { f(half, a, b, d); }, pair.a,
                                 pair.b);
      };
      const auto add = two(rows->add_pair), sub = two(rows->sub_pair), mul = two(rows->mul_pair);
      const auto fma = on_rows<uint32_t>([&](const uint32_t* a, const uint32_t* b, const uint32_t* c,
                                             uint32_t* d) { rows->fma_pair(half, a, b, c, d); },
                                         pair.a, pair.b, pair.c);
      for (size_t i = 0; i < pair.a.size(); ++i) {
        const uint32_t a = pair.a[i], b = pair.b[i], c = pair.c[i];
        const std::string where =
            std::string(rows->target) + " " + name_of(half.format) + " " + hex(a) + " " + hex(b) + " " + hex(c);
        using L = long double;
        ASSERT_EQ(hex(add[i]), hex(expected_pair(half, a, b, c, [](L x, L y, L) { return exact_sum(x, y); }))) << where;
        ASSERT_EQ(hex(sub[i]), hex(expected_pair(half, a, b, c, [](L x, L y, L) { return exact_sum(x, -y); })))
            << where;
        ASSERT_EQ(hex(mul[i]), hex(expected_pair(half, a, b, c, [](L x, L y, L) { return x * y; }))) << where;
        ASSERT_EQ(hex(fma[i]), hex(expected_pair(half, a, b, c, [](L x, L y, L z) { return exact_sum(x * y, z); })))
            << where;
      }
    }
}

TEST(HalfPairs, MinimumAndMaximum) {
  for (const PairCase& pair : pair_cases()) {
    if (pair.half.saturate || pair.half.relu) continue;
    for (const Rows* rows : all_rows())
      for (const bool propagate : {false, true})
        for (const bool max : {false, true}) {
          const auto f = max ? rows->max_pair : rows->min_pair;
          const auto got = on_rows<uint32_t>(
              [&](const uint32_t* a, const uint32_t* b, uint32_t* d) { f(pair.half, propagate, a, b, d); }, pair.a,
              pair.b);
          for (size_t i = 0; i < pair.a.size(); ++i) {
            const uint32_t want =
                expected_pair(pair.half, pair.a[i], pair.b[i], 0, [&](long double x, long double y, long double) {
                  if (std::isnan(x) || std::isnan(y))
                    return propagate || (std::isnan(x) && std::isnan(y)) ? NAN : std::isnan(x) ? y : x;
                  const bool x_first = x < y || (x == y && std::signbit(x));
                  return x_first == max ? y : x;
                });
            ASSERT_EQ(hex(got[i]), hex(want)) << hex(pair.a[i]) << " " << hex(pair.b[i]);
          }
        }
  }
}

}  // namespace
}  // namespace tandem::vgpu::units
