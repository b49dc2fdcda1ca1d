// 2^x on the FMA units: the error table of docs/numerics.md, and the values that must be exact.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels.h"

namespace tandem {
namespace {

struct Bound {
  DType dtype;
  double relative;  // the polynomial's maximal error and one rounding of float32
};

constexpr Bound kBounds[] = {
    {DType::f32, 2.1e-9 + 1.2e-7}, {DType::f16, 2.9e-6 + 1.2e-7}, {DType::bf16, 8.6e-5 + 1.2e-7}};

float exp2_of(DType dtype, float x) {
  float y = 0;
  cpu::kernels().exp2(dtype, &x, 1, &y);
  return y;
}

TEST(Exp2, ErrorStaysWithinTheTable) {
  std::vector<float> x, y;
  for (double v = -125.99; v < 9; v += 1.0 / 4099) x.push_back(static_cast<float>(v));
  y.resize(x.size());
  for (const Bound& bound : kBounds) {
    cpu::kernels().exp2(bound.dtype, x.data(), static_cast<int64_t>(x.size()), y.data());
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp2(static_cast<double>(x[i]));
      worst = std::max(worst, std::fabs(y[i] - exact) / exact);
    }
    std::printf("  %-8s %s: largest relative error %.2e\n", name_of(bound.dtype), cpu::kernels().name, worst);
    EXPECT_LE(worst, bound.relative) << name_of(bound.dtype);
    EXPECT_GT(worst, 0);
  }
}

TEST(Exp2, SpecialValues) {
  for (const Bound& bound : kBounds) {
    EXPECT_EQ(exp2_of(bound.dtype, 0.0f), 1.0f);
    EXPECT_EQ(exp2_of(bound.dtype, -std::numeric_limits<float>::infinity()), 0.0f);
    EXPECT_EQ(exp2_of(bound.dtype, -1e30f), 0.0f);
    EXPECT_LE(exp2_of(bound.dtype, -127.5f), std::numeric_limits<float>::min());
    EXPECT_TRUE(std::isnan(exp2_of(bound.dtype, std::numeric_limits<float>::quiet_NaN())));
  }
}

}  // namespace
}  // namespace tandem
