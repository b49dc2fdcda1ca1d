// The loops of standard attention must return the result of one number after the other.
#include "support/plain_loops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "support/random.h"

namespace tandem::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> numbers(uint64_t seed, int64_t count) {
  Random random(seed);
  std::vector<double> all;
  for (int64_t n = 0; n < count; ++n) all.push_back(random.normal());
  return all;
}

TEST(PlainLoops, DotsOfEachRow) {
  for (const Loops& loops : all_loops()) {
    for (const int64_t rows : {1, 7, 8, 9, 30, 75}) {
      for (const int64_t length : {1, 8, 37, 128}) {
        std::vector<std::vector<double>> b;
        for (int64_t j = 0; j < rows; ++j) b.push_back(numbers(static_cast<uint64_t>(j) + 2, length));
        const std::vector<double> a = numbers(1, length);
        Interleaved interleaved;
        interleaved.set(b, length);
        for (const Rounding rounding : {Rounding::none, Rounding::f32}) {
          std::vector<Dot> dots(static_cast<size_t>(rows + kLanes));
          loops.dots(a.data(), interleaved, rows / 3, rows, rounding, dots.data());
          for (auto j = static_cast<size_t>(rows / 3); j < b.size(); ++j) {
            double sum = 0, squares = 0;
            for (size_t c = 0; c < a.size(); ++c) {
              const double product = a[c] * b[j][c];
              sum += product;
              if (rounding == Rounding::f32) sum = static_cast<float>(sum);
              squares += product * product + sum * sum;
            }
            EXPECT_EQ(dots[j].sum, sum) << j << " of " << rows;
            if (rounding == Rounding::none) {
              EXPECT_EQ(dots[j].squares, squares) << j << " of " << rows;
            }
          }
        }
      }
    }
  }
}

TEST(PlainLoops, RoundedSums) {
  for (const Loops& loops : all_loops()) {
    for (const int64_t n : {1, 7, 8, 9, 40, 129}) {
      std::vector<double> to = numbers(3, n + 1), expected = to;
      const std::vector<double> from = numbers(4, n + 1);
      loops.add_rounded(to.data(), 0.7, from.data(), n);
      for (size_t c = 0; c < static_cast<size_t>(n); ++c) expected[c] = static_cast<float>(expected[c] + 0.7 * from[c]);
      EXPECT_EQ(to, expected) << n << " numbers";
    }
  }
}

// The caller handles exempt numbers, anywhere in a row, and the rest of their chunk.
TEST(PlainLoops, DisturbedSums) {
  const Disturbance by{0x1p-8, 0x1p-134, 65504};
  for (const Loops& loops : all_loops()) {
    for (const int64_t n : {1, 8, 40, 64, 65, 72, 200, 256}) {
      for (const double special : {1.0, 0.0, -0.0, 70'000.0, -kInfinity, std::nan(""), 0x1p-140}) {
        for (int64_t at = 0; at < n; at += 23) {
          std::vector<double> to = numbers(3, n), from = numbers(4, n), expected = to;
          to[static_cast<size_t>(at)] = special;
          from[static_cast<size_t>(at)] = 0;
          expected = to;
          uint64_t state = 99, expected_state = 99;
          const int64_t done = loops.add_scaled(to.data(), 0.7, from.data(), n, by, &state);
          const bool exempt = !(std::fabs(special) < by.largest) || special == 0;
          EXPECT_LE(done, exempt ? at : n);
          EXPECT_GT(done, std::min(exempt ? at : n, n / kLanes * kLanes) - 64);
          for (size_t c = 0; c < static_cast<size_t>(done); ++c) {
            const double x = expected[c] + 0.7 * from[c];
            expected_state = expected_state * kFactor + kAddend;
            const double unit = 2 * std::bit_cast<double>(expected_state >> 12 | uint64_t{1023} << 52) - 3;
            expected[c] = x + std::max(std::ldexp(1, std::ilogb(x)) * by.half_unit, by.least) * unit;
          }
          EXPECT_EQ(state, expected_state);
          EXPECT_TRUE(
              std::equal(to.begin(), to.end(), expected.begin(),
                         [](double x, double y) { return std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y); }))
              << n << " numbers, " << special << " at " << at;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
