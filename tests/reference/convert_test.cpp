#include "problem/convert.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

// Every 16-bit number, the points halfway to its neighbour, and the doubles next to these points.
template <int kFractionBits>
void check_all() {
  constexpr int infinity = (0xff >> (kFractionBits - 7)) << kFractionBits;
  for (int bits = 0; bits <= infinity; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    const double x = widen<kFractionBits>(code);
    ASSERT_EQ(narrow<kFractionBits>(x), code) << x;
    ASSERT_EQ(narrow<kFractionBits>(-x), code | 0x8000) << -x;
    if (bits + 1 >= infinity) continue;
    const double next = widen<kFractionBits>(static_cast<uint16_t>(bits + 1));
    ASSERT_LT(x, next);
    const double half = (x + next) / 2;  // exact
    const auto even = static_cast<uint16_t>(bits + (bits & 1));
    ASSERT_EQ(narrow<kFractionBits>(half), even) << half;
    ASSERT_EQ(narrow<kFractionBits>(std::nextafter(half, 0.0)), code) << half;
    ASSERT_EQ(narrow<kFractionBits>(std::nextafter(half, INFINITY)), code + 1) << half;
  }
}

TEST(Convert, Float16RoundsToNearestEven) { check_all<10>(); }
TEST(Convert, Bfloat16RoundsToNearestEven) { check_all<7>(); }

TEST(Convert, SpecialValues) {
  EXPECT_EQ(narrow<10>(65504), 0x7bff);
  EXPECT_EQ(narrow<10>(65519.9999), 0x7bff);
  EXPECT_EQ(narrow<10>(65520), 0x7c00);  // halfway to 65536: ties to even, which is infinity
  EXPECT_EQ(narrow<10>(1e300), 0x7c00);
  EXPECT_EQ(narrow<10>(0x1p-25), 0);  // halfway to the least subnormal
  EXPECT_EQ(narrow<10>(0x1.8p-25), 1);
  EXPECT_EQ(narrow<10>(1e-300), 0);
  EXPECT_EQ(narrow<10>(-0.0), 0x8000);
  EXPECT_TRUE(std::isnan(widen<10>(narrow<10>(NAN))));
  EXPECT_TRUE(std::isnan(widen<7>(narrow<7>(NAN))));
  EXPECT_EQ(narrow<7>(-INFINITY), 0xff80);
  // A second rounding, through float32, would round in the wrong direction.
  EXPECT_EQ(narrow<7>(1 + 0x1p-8 + 0x1p-40), 0x3f81);
}

TEST(Convert, LoadsWhatItStores) {
  const struct {
    DType type;
    double in, out;
  } all[] = {{DType::f64, 0.1, 0.1},
             {DType::f32, 0.1, 0.1f},
             {DType::bf16, 0.1, 0.10009765625},
             {DType::f16, 0.1, 0.0999755859375},
             {DType::boolean, 3, 1},
             {DType::i32, -7, -7}};
  for (const auto& one : all) {
    std::byte bytes[8];
    store(one.type, bytes, one.in);
    EXPECT_EQ(load(one.type, bytes), one.out) << name_of(one.type);
  }
}

}  // namespace
}  // namespace tandem
