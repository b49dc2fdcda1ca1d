#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cli/plain/rows.h"
#include "problem/convert.h"

namespace tandem::plain {
namespace {

// Returns true for equal numbers, and for two NaN.
bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

TEST(PlainRowsTest, WidensEvery16BitNumber) {
  for (const DType type : {DType::f16, DType::bf16}) {
    int wrong = 0;
    for (uint32_t half = 0; half < 65536; ++half) {
      const uint64_t bits = half;  // the buffer also holds the other types of load()
      float got = 0;
      load_row(type, reinterpret_cast<const std::byte*>(&bits), 1, &got);
      wrong += !same(got, load(type, reinterpret_cast<const std::byte*>(&bits)));
    }
    EXPECT_EQ(wrong, 0) << name_of(type);
  }
}

TEST(PlainRowsTest, RoundsAsTheObviousConversionDoes) {
  std::mt19937 random(1);
  std::vector<float> values = {0.f, -0.f, 65504.f, 65519.99f, 65520.f, 1e30f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 0x1p-14f};
  for (const float special : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()})
    values.insert(values.end(), {special, -special});
  for (int i = 0; i < 200'000; ++i) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  for (int i = 0; i < 200'000; ++i)
    values.push_back(std::ldexp(static_cast<float>(random()) * 0x1p-32f, static_cast<int>(random() % 50) - 30));
  const auto n = static_cast<int64_t>(values.size());
  for (const DType type : {DType::f16, DType::bf16}) {
    std::vector<float> rounded = values;
    round_row(type, rounded.data(), n);
    std::vector<uint16_t> stored(values.size());
    store_row(type, values.data(), n, reinterpret_cast<std::byte*>(stored.data()));
    int wrong = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      uint64_t expected = 0;  // the buffer also holds the other types of store()
      store(type, reinterpret_cast<std::byte*>(&expected), values[i]);
      const double number = load(type, reinterpret_cast<const std::byte*>(&expected));
      wrong += !same(rounded[i], number) || !same(load(type, reinterpret_cast<const std::byte*>(&stored[i])), number);
    }
    EXPECT_EQ(wrong, 0) << name_of(type);
  }
}

TEST(PlainRowsTest, ExponentialIsExactToFourUnits) {
  for (const int n : {0, 1, 15, 16, 17, 1000}) {
    std::vector<float> row;
    for (int j = 0; j < n; ++j) row.push_back(3.f - 86.f * static_cast<float>(j) / static_cast<float>(n));
    if (n > 2) row[1] = -std::numeric_limits<float>::infinity();
    const std::vector<float> before = row;
    const float shift = row_max(row.data(), n);
    EXPECT_EQ(shift, n > 0 ? 3.f : -std::numeric_limits<float>::infinity());
    const float sum = exp_row(row.data(), n, shift);
    double expected_sum = 0;
    for (size_t j = 0; j < row.size(); ++j) {
      const double expected = std::exp(static_cast<double>(before[j]) - shift);
      expected_sum += expected;
      ASSERT_NEAR(row[j], expected, 4 * 0x1p-23 * expected) << "at " << before[j] - shift;
    }
    EXPECT_NEAR(sum, expected_sum, 1e-5 * expected_sum);
  }
}

}  // namespace
}  // namespace tandem::plain
