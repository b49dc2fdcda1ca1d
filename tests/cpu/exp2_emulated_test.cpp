// exp2 on Highway's portable target with vectors of 128 bits. Newer compilers choose this target for the generic
// kernels of x86-64, and older ones choose the scalar target.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu/simd.h"

namespace tandem {
namespace {

template <int degree>
float exp2_of(float x) {
  float in[cpu::emulated::kLanes], out[cpu::emulated::kLanes];
  for (float& lane : in) lane = x;
  cpu::emulated::store(cpu::emulated::exp2<degree>(cpu::emulated::load(in)), out);
  return out[cpu::emulated::kLanes - 1];
}

template <int degree>
void expect_special_values() {
  EXPECT_EQ(exp2_of<degree>(0.0f), 1.0f);
  EXPECT_EQ(exp2_of<degree>(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(exp2_of<degree>(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(exp2_of<degree>(std::numeric_limits<float>::quiet_NaN()))) << degree;
}

TEST(Exp2, SpecialValuesWithoutIntrinsics) {
  expect_special_values<3>();
  expect_special_values<4>();
  expect_special_values<6>();
}

TEST(Exp2, TanhOfNanWithoutIntrinsics) {
  float in[cpu::emulated::kLanes], out[cpu::emulated::kLanes];
  for (float& lane : in) lane = std::numeric_limits<float>::quiet_NaN();
  cpu::emulated::store(cpu::emulated::tanh(cpu::emulated::load(in)), out);
  EXPECT_TRUE(std::isnan(out[0]));
}

}  // namespace
}  // namespace tandem
