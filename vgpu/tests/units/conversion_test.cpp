// Tests of conversions with a table of all values of the format and comparisons in double.
#include <algorithm>
#include <map>

#include "vgpu/tests/units/on_targets.h"

namespace tandem::vgpu::units {
namespace {

struct Kind {
  Format format;
  int exponent, mantissa, bias;
  bool infinity;   // the format has infinity and NaN, with an exponent of ones
  uint32_t nan;    // result of NaN
  bool saturates;  // always
};
const Kind kKinds[] = {
    {Format::f16, 5, 10, 15, true, 0x7fff, false}, {Format::bf16, 8, 7, 127, true, 0x7fff, false},
    {Format::e4m3, 4, 3, 7, false, 0x7f, true},    {Format::e5m2, 5, 2, 15, true, 0x7f, true},
    {Format::e2m3, 2, 3, 1, false, 0x1f, true},    {Format::e3m2, 3, 2, 3, false, 0x1f, true},
    {Format::e2m1, 2, 1, 1, false, 0x7, true},     {Format::tf32, 8, 10, 127, true, 0, false},
};

double magnitude_of(const Kind& kind, uint32_t code) {
  const int e = static_cast<int>(code >> kind.mantissa);
  const double fraction = std::ldexp(code & ((1u << kind.mantissa) - 1), -kind.mantissa);
  return e == 0 ? std::ldexp(fraction, 1 - kind.bias) : std::ldexp(1 + fraction, e - kind.bias);
}

// All finite magnitudes; the code of each is its index.
std::vector<double> magnitudes(const Kind& kind) {
  uint32_t count = 1u << (kind.exponent + kind.mantissa);
  if (kind.infinity) count -= 1u << kind.mantissa;
  if (kind.format == Format::e4m3) --count;
  std::vector<double> list;
  for (uint32_t code = 0; code < count; ++code) list.push_back(magnitude_of(kind, code));
  return list;
}

uint32_t expected(const Kind& kind, const std::vector<double>& table, float x, Fit fit) {
  const uint32_t place = kind.format == Format::tf32 ? 13 : 0;
  const uint32_t sign_bit = kind.format == Format::tf32 ? 0x80000000u : 1u << (kind.exponent + kind.mantissa);
  if (std::isnan(x) && kind.format != Format::tf32) return kind.nan;
  if (std::isnan(x) && fit.rounding != Rounding::rna) return 0x7fffe000;
  if (std::isnan(x)) return (as_bits(x) & 0xffffe000) - (fit.saturate_finite ? 0x2000 : 0);
  const bool negative = std::signbit(x);
  if (negative && fit.relu) return 0;
  const uint32_t sign = negative ? sign_bit : 0;
  if (fit.ftz && std::fabs(x) < std::ldexp(1.0, -126)) return sign;
  const auto last = static_cast<uint32_t>(table.size() - 1);
  const bool saturates = kind.saturates || fit.saturate_finite;
  const double m = std::fabs(static_cast<double>(x));
  if (std::isinf(x)) return sign | (saturates ? last : last + 1) << place;
  // The largest value not above m; its successor may be one step beyond the table.
  const auto below = static_cast<uint32_t>(std::upper_bound(table.begin(), table.end(), m) - table.begin() - 1);
  const double low = table[below], high = below == last ? 2 * table[last] - table[last - 1] : table[below + 1];
  bool up = false;
  switch (fit.rounding) {
    case Rounding::rn: up = m - low > high - m || (m - low == high - m && below % 2 == 1); break;
    case Rounding::rna: up = m - low >= high - m; break;
    case Rounding::rz: break;
    case Rounding::rm: up = negative && m > low; break;
    case Rounding::rp: up = !negative && m > low; break;
  }
  uint32_t code = below + up;
  if (code > last) code = saturates ? last : last + 1;
  return sign | code << place;
}

// Returns every value of the format, the middle between neighbours and the values next to it, with both signs.
std::vector<float> around(const std::vector<double>& table) {
  std::vector<float> list = hostile_floats(7, 2000);
  for (size_t i = 0; i < table.size(); ++i) {
    const double next = i + 1 < table.size() ? table[i + 1] : 2 * table[i] - table[i - 1];
    for (const double x : {table[i], (table[i] + next) / 2}) {
      const auto f = static_cast<float>(x);
      for (const float y : {f, std::nextafterf(f, 0), std::nextafterf(f, INFINITY)}) {
        list.push_back(y);
        list.push_back(-y);
      }
    }
  }
  return list;
}

class Conversion : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Formats, Conversion, testing::ValuesIn(kKinds),
                         [](const auto& parameter) { return name_of(parameter.param.format); });

TEST_P(Conversion, EncodesEveryValueAndEveryTie) {
  const Kind& kind = GetParam();
  std::vector<double> table = magnitudes(kind);
  const std::vector<float> list = around(table);
  for (const Rounding rounding : {Rounding::rn, Rounding::rz, Rounding::rm, Rounding::rp, Rounding::rna})
    for (const bool saturate : {false, true})
      for (const bool other : {false, true}) {  // relu and ftz
        const Fit fit = {rounding, saturate, other, other};
        std::vector<uint32_t> want;
        for (const float x : list) want.push_back(expected(kind, table, x, fit));
        for (const Rows* rows : all_rows()) {
          const auto got =
              on_rows<uint32_t>([&](const float* a, uint32_t* d) { rows->encode(kind.format, fit, a, d); }, list);
          for (size_t i = 0; i < list.size(); ++i)
            ASSERT_EQ(got[i], want[i]) << rows->target << " " << hex(as_bits(list[i])) << " rounding "
                                       << static_cast<int>(rounding) << " saturate " << saturate << " relu, ftz "
                                       << other;
        }
        for (size_t i = 0; i < list.size(); i += 7) ASSERT_EQ(encode(list[i], kind.format, fit), want[i]);
      }
}

TEST_P(Conversion, DecodesEveryCode) {
  const Kind& kind = GetParam();
  if (kind.format == Format::tf32) return;  // float32 without its low bits: TensorFloat below
  const uint32_t sign = 1u << (kind.exponent + kind.mantissa);
  const std::vector<double> table = magnitudes(kind);
  std::vector<uint32_t> codes;
  for (uint32_t code = 0; code < 2 * sign; ++code) codes.push_back(code);
  for (const Rows* rows : all_rows()) {
    const auto got = on_rows<float>([&](const uint32_t* a, float* d) { rows->decode(kind.format, a, d); }, codes);
    for (const uint32_t code : codes) {
      const uint32_t magnitude = code & (sign - 1);
      const float x = got[code];
      ASSERT_EQ(as_bits(x), as_bits(decode(code, kind.format)));
      ASSERT_EQ(std::signbit(x), (code & sign) != 0);
      if (magnitude < table.size()) {
        ASSERT_EQ(std::fabs(x), table[magnitude]) << code;
      } else if (kind.infinity && magnitude == table.size()) {
        ASSERT_TRUE(std::isinf(x));
      } else {
        ASSERT_TRUE(std::isnan(x)) << code;
      }
    }
  }
}

TEST(Pairs, PutTheFirstOperandHigh) {
  const std::vector<float> high = hostile_floats(1, 500), low = [&] {
    auto list = high;
    std::reverse(list.begin(), list.end());
    return list;
  }();
  const std::map<Format, int> pitches = {{Format::f16, 16}, {Format::bf16, 16}, {Format::e4m3, 8}, {Format::e5m2, 8},
                                         {Format::e2m3, 8}, {Format::e3m2, 8},  {Format::e2m1, 4}, {Format::ue8m0, 8}};
  for (const Rows* rows : all_rows())
    for (const auto& [format, pitch] : pitches) {
      const Fit fit = {format == Format::ue8m0 ? Rounding::rp : Rounding::rn, true, false, false};
      const auto got = on_rows<uint32_t>(
          [&, f = format](const float* a, const float* b, uint32_t* d) { rows->encode_pair(f, fit, a, b, d); }, high,
          low);
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], encode(high[i], format, fit) << pitch | encode(low[i], format, fit));
        uint32_t row[kLanes] = {got[i]};
        float h[kLanes], l[kLanes];
        rows->decode_pair(format, row, h, l);
        ASSERT_EQ(as_bits(h[0]), as_bits(decode(encode(high[i], format, fit), format)));
        ASSERT_EQ(as_bits(l[0]), as_bits(decode(encode(low[i], format, fit), format)));
      }
    }
}

TEST(Scales, AreThePowersOfTwoBelowOrAbove) {
  for (uint32_t code = 0; code < 255; ++code)
    ASSERT_EQ(decode(code, Format::ue8m0), std::ldexp(1.0, static_cast<int>(code) - 127));
  EXPECT_TRUE(std::isnan(decode(255, Format::ue8m0)));
  for (const float x : hostile_floats(3, 20000)) {
    const double m = std::fabs(static_cast<double>(x));
    for (const bool up : {false, true})
      for (const bool saturate : {false, true}) {
        uint32_t want = 255;
        if (!std::isnan(x)) {
          want = 0;
          while (want < 255 && (up ? std::ldexp(1.0, static_cast<int>(want) - 127) < m
                                   : std::ldexp(1.0, static_cast<int>(want) - 126) <= m))
            ++want;
          if (want == 255 && saturate) want = 254;
        }
        ASSERT_EQ(encode(x, Format::ue8m0, {up ? Rounding::rp : Rounding::rz, saturate, false, false}), want)
            << hex(as_bits(x)) << up << saturate;
      }
  }
}

TEST(Scales, UnsignedE4m3IgnoresTheTopBit) {
  for (uint32_t code = 0; code < 256; ++code)
    ASSERT_EQ(as_bits(decode(code, Format::ue4m3)), as_bits(decode(code & 0x7f, Format::e4m3)));
}

TEST(TensorFloat, ReadsDropTheLowBits) {
  for (const float x : hostile_floats(5, 5000))
    ASSERT_EQ(as_bits(decode(as_bits(x), Format::tf32)), as_bits(x) & 0xffffe000u);
}

TEST(Integers, AreTheirValue) {
  for (uint32_t code = 0; code < 256; ++code) {
    ASSERT_EQ(decode(code, Format::u8), static_cast<float>(code));
    ASSERT_EQ(decode(code, Format::s8), static_cast<float>(static_cast<int8_t>(code)));
  }
}

// Over all random bits, a value rounds away as often as its discarded part requires.
TEST(Stochastic, RoundsInProportion) {
  struct Rounded {
    Format format;
    int bits;
    float x;
    uint32_t low;     // code below x
    double fraction;  // fraction of the distance to the next value
  };
  for (const Rounded& s :
       {Rounded{Format::bf16, 16, 1 + 0x1p-8f, 0x3f80, 0.5}, Rounded{Format::bf16, 16, -(1 + 0x1p-9f), 0xbf80, 0.25},
        Rounded{Format::f16, 13, 1 + 3 * 0x1p-12f, 0x3c00, 0.75}, Rounded{Format::e4m3, 16, 1.0625f, 0x38, 0.5},
        Rounded{Format::e2m1, 8, 1.125f, 0x2, 0.25}, Rounded{Format::bf16, 16, 1.5f, 0x3fc0, 0}}) {
    uint32_t up = 0;
    for (uint32_t random = 0; random < 1u << s.bits; ++random) {
      const uint32_t code = encode_stochastic(s.x, s.format, random, s.bits);
      ASSERT_TRUE(code == s.low || code == s.low + 1) << name_of(s.format) << " " << code;
      up += code != s.low;
    }
    EXPECT_EQ(up, static_cast<uint32_t>(s.fraction * (1u << s.bits))) << name_of(s.format);
  }
  EXPECT_EQ(encode_stochastic(INFINITY, Format::f16, 0x1fff, 13), 0x7c00u);
  EXPECT_EQ(encode_stochastic(65535.0f, Format::f16, 0x1fff, 13, {Rounding::rn, true, false, false}), 0x7bffu);
  EXPECT_EQ(encode_stochastic(NAN, Format::e4m3, 5, 16), 0x7fu);
}

}  // namespace
}  // namespace tandem::vgpu::units
