// Tests of approximate functions against long double: within the bounds of the PTX ISA, exact for special values, equal
// on every instruction set.
#include <functional>

#include "vgpu/tests/units/on_targets.h"

namespace tandem::vgpu::units {
namespace {

using Real = long double;

// Distance in units of the last place of the correctly rounded result.
double ulps(float got, Real exact) {
  const auto want = static_cast<float>(exact);
  if (got == want) return 0;
  const int exponent = std::max(want == 0 ? -126 : std::ilogb(want), -126);
  return static_cast<double>(std::fabs(static_cast<Real>(got) - exact) / std::ldexp(1.0L, exponent - 23));
}

std::vector<float> arguments(float low, float high, int count, uint64_t seed) {
  test::Random random(seed);
  std::vector<float> list;
  for (int i = 0; i < count; ++i) list.push_back(static_cast<float>(low + (high - low) * random.uniform()));
  return list;
}

struct Function {
  const char* name;
  std::function<Rows::Unary(const Rows&, bool)> of;
  Real (*exact)(Real);
};
const Function kFunctions[] = {
    {"ex2", [](const Rows& r, bool ftz) { return r.ex2_approx[ftz]; }, [](Real x) { return std::exp2(x); }},
    {"lg2", [](const Rows& r, bool ftz) { return r.lg2_approx[ftz]; }, [](Real x) { return std::log2(x); }},
    {"rcp", [](const Rows& r, bool ftz) { return r.rcp_approx[ftz]; }, [](Real x) { return 1 / x; }},
    {"rsqrt", [](const Rows& r, bool ftz) { return r.rsqrt_approx[ftz]; }, [](Real x) { return 1 / std::sqrt(x); }},
    {"sqrt", [](const Rows& r, bool ftz) { return r.sqrt_approx[ftz]; }, [](Real x) { return std::sqrt(x); }},
    {"sin", [](const Rows& r, bool ftz) { return r.sin_approx[ftz]; }, [](Real x) { return std::sin(x); }},
    {"cos", [](const Rows& r, bool ftz) { return r.cos_approx[ftz]; }, [](Real x) { return std::cos(x); }},
    {"tanh", [](const Rows& r, bool) { return r.tanh_approx; }, [](Real x) { return std::tanh(x); }},
};

class Approximate : public testing::TestWithParam<Function> {};
INSTANTIATE_TEST_SUITE_P(Functions, Approximate, testing::ValuesIn(kFunctions),
                         [](const auto& parameter) { return parameter.param.name; });

// An error of one unit in the last place is within every bound of the ISA. Beyond 100 pi the ISA has no bound for sin
// and cos.
TEST_P(Approximate, IsWithinOneUlp) {
  const Function& f = GetParam();
  std::vector<float> list = hostile_floats(31, 20000);
  for (const auto& part :
       {arguments(-150, 130, 20000, 1), arguments(-1, 1, 20000, 2), arguments(-0.001f, 0.001f, 5000, 3),
        arguments(-314, 314, 5000, 4), arguments(0.5f, 2, 20000, 5)})
    list.insert(list.end(), part.begin(), part.end());
  const bool circular = f.name == std::string("sin") || f.name == std::string("cos");
  const auto reference = on_rows<float>(f.of(*all_rows().back(), false), list);
  for (const Rows* rows : all_rows())
    for (const bool ftz : {false, true}) {
      const auto got = on_rows<float>(f.of(*rows, ftz), list);
      for (size_t i = 0; i < list.size(); ++i) {
        const bool flushes = ftz && f.name != std::string("tanh");
        const float x = flushes && std::fabs(list[i]) < 0x1p-126f ? std::copysign(0.0f, list[i]) : list[i];
        const Real exact = f.exact(x);
        if (!flushes) {
          ASSERT_EQ(hex(as_bits(got[i])), hex(as_bits(reference[i]))) << rows->target << " " << x;
        }
        if (std::isnan(exact)) {
          ASSERT_EQ(hex(as_bits(got[i])), hex(0x7fffffff)) << x;
        } else if (flushes && std::fabs(static_cast<float>(exact)) < 0x1p-126f) {
          ASSERT_EQ(as_bits(got[i]), as_bits(std::copysign(0.0f, static_cast<float>(exact)))) << x;
        } else if (circular && std::fabs(x) > 314) {
          ASSERT_LE(std::fabs(got[i]), 1) << x;
        } else if (circular) {
          ASSERT_LE(std::fabs(got[i] - exact), 0x1p-23 * std::fabs(exact) + 0x1p-45) << x;
        } else {
          ASSERT_LE(ulps(got[i], exact), 1) << f.name << " " << x << " = " << got[i];
          ASSERT_EQ(std::signbit(got[i]), std::signbit(static_cast<float>(exact))) << x;
        }
      }
    }
}

TEST(ApproximateRows, SpecialValues) {
  const float inf = INFINITY;
  struct Case {
    const char* name;
    Rows::Unary f;
    float x, want;
  };
  for (const Rows* rows : all_rows())
    for (const Case& c : {Case{"ex2", rows->ex2_approx[1], -inf, 0.0f},
                          Case{"ex2", rows->ex2_approx[1], inf, inf},
                          Case{"ex2", rows->ex2_approx[1], -0.0f, 1},
                          Case{"ex2", rows->ex2_approx[1], -127, 0},
                          Case{"ex2", rows->ex2_approx[0], -149, 0x1p-149f},
                          Case{"ex2", rows->ex2_approx[0], -151, 0},
                          Case{"ex2", rows->ex2_approx[0], 128, inf},
                          Case{"ex2", rows->ex2_approx[0], 10, 1024},
                          Case{"lg2", rows->lg2_approx[0], -0.0f, -inf},
                          Case{"lg2", rows->lg2_approx[0], inf, inf},
                          Case{"lg2", rows->lg2_approx[0], 0x1p-149f, -149},
                          Case{"lg2", rows->lg2_approx[1], 0x1p-149f, -inf},
                          Case{"lg2", rows->lg2_approx[0], 1, 0},
                          Case{"rcp", rows->rcp_approx[0], -inf, -0.0f},
                          Case{"rcp", rows->rcp_approx[0], -0.0f, -inf},
                          Case{"rcp", rows->rcp_approx[1], 0x1p-127f, inf},
                          Case{"rcp", rows->rcp_approx[1], -0x1p127f, -0.0f},
                          Case{"rsqrt", rows->rsqrt_approx[0], -0.0f, -inf},
                          Case{"rsqrt", rows->rsqrt_approx[0], inf, 0},
                          Case{"sqrt", rows->sqrt_approx[0], -0.0f, -0.0f},
                          Case{"sin", rows->sin_approx[0], -0.0f, -0.0f},
                          Case{"cos", rows->cos_approx[0], -0.0f, 1},
                          Case{"tanh", rows->tanh_approx, -inf, -1},
                          Case{"tanh", rows->tanh_approx, -0.0f, -0.0f}}) {
      const float got = on_rows<float>(c.f, std::vector<float>{c.x})[0];
      EXPECT_EQ(hex(as_bits(got)), hex(as_bits(c.want))) << rows->target << " " << c.name << " " << c.x;
    }
}

TEST(ApproximateRows, Division) {
  std::vector<float> a, b;
  for (const float x : hostile_floats(6, 60))
    for (const float y : hostile_floats(8, 60)) a.push_back(x), b.push_back(y);
  for (const Rows* rows : all_rows())
    for (const bool ftz : {false, true}) {
      const auto approx = on_rows<float>(rows->div_approx[ftz], a, b), full = on_rows<float>(rows->div_full[ftz], a, b);
      for (size_t i = 0; i < a.size(); ++i) {
        const auto flush = [&](float x) { return ftz && std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
        const float x = flush(a[i]), y = flush(b[i]), want = flush(x / y);
        const std::string where = hex(as_bits(x)) + " / " + hex(as_bits(y));
        ASSERT_EQ(hex(as_bits(full[i])), hex(std::isnan(want) ? 0x7fffffff : as_bits(want))) << where;
        if (std::fabs(y) > 0x1p126f && !std::isinf(y) && !std::isnan(y)) {
          const float zero = std::copysign(0.0f, std::signbit(x) != std::signbit(y) ? -1.0f : 1.0f);
          ASSERT_EQ(hex(as_bits(approx[i])), hex(std::isnan(x) || std::isinf(x) ? 0x7fffffff : as_bits(zero))) << where;
        } else {
          ASSERT_EQ(as_bits(approx[i]), as_bits(full[i])) << where;
        }
      }
    }
}

TEST(ApproximateRows, Pairs) {
  for (const Format format : {Format::f16, Format::bf16}) {
    std::vector<uint32_t> list;
    for (uint32_t h = 0; h < 0x10000; ++h) list.push_back(h << 16 | (h ^ 0x8000));
    for (const Rows* rows : all_rows()) {
      const Rows::Half half = {format, format == Format::bf16, false, false};
      const auto ex2 = on_rows<uint32_t>([&](const uint32_t* a, uint32_t* d) { rows->ex2_pair(half, a, d); }, list);
      const auto tanh =
          on_rows<uint32_t>([&](const uint32_t* a, uint32_t* d) { rows->tanh_pair({format}, a, d); }, list);
      for (uint32_t h = 0; h < 0x10000; ++h) {
        const Real x = decode(h, format);
        ASSERT_EQ(ex2[h] >> 16, ex2[h ^ 0x8000] & 0xffff);
        const uint32_t e = ex2[h] >> 16, t = tanh[h] >> 16;
        if (std::isnan(x)) {
          ASSERT_EQ(e, 0x7fffu);
          ASSERT_EQ(t, 0x7fffu);
          continue;
        }
        const Fit fit = {Rounding::rn, false, false, format == Format::bf16};
        ASSERT_EQ(e, encode(static_cast<float>(std::exp2(x)), format, fit)) << h;
        ASSERT_EQ(t, encode(static_cast<float>(std::tanh(x)), format)) << h;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::vgpu::units
