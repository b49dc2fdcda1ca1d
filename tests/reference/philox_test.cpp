#include "problem/philox.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

void expect_words(const Philox4& got, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  EXPECT_EQ(got.word[0], a);
  EXPECT_EQ(got.word[1], b);
  EXPECT_EQ(got.word[2], c);
  EXPECT_EQ(got.word[3], d);
}

// The known answers of Random123 (kat_vectors, philox4x32 7 and 10).
TEST(Philox, KnownAnswers) {
  constexpr uint32_t ones = 0xffffffff;
  constexpr Philox4 pi = {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}};
  expect_words(philox4x32({{0, 0, 0, 0}}, 0, 0, 7), 0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48);
  expect_words(philox4x32({{ones, ones, ones, ones}}, ones, ones, 7), 0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662);
  expect_words(philox4x32(pi, 0xa4093822, 0x299f31d0, 7), 0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a);
  expect_words(philox4x32({{0, 0, 0, 0}}, 0, 0, 10), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  expect_words(philox4x32({{ones, ones, ones, ones}}, ones, ones, 10), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  expect_words(philox4x32(pi, 0xa4093822, 0x299f31d0, 10), 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1);
}

TEST(Philox, CounterAndKeyOfDropout) {
  const uint64_t seed = 0x1122334455667788, offset = 0x0000000a0000000b;
  const Philox4 got = dropout_words(seed, offset, 3, 5, 7);
  const Philox4 expected = philox4x32({{7, 5, 3, 0x0b}}, 0x55667788, 0x11223344 + 0x0a, 7);
  for (int n = 0; n < 4; ++n) EXPECT_EQ(got.word[n], expected.word[n]);
}

// Columns 8 h + 2 b + w of a group: byte b of word 2 h + w.
TEST(Philox, AByteForEachColumn) {
  const Philox4 words = {{0x06040200, 0x07050301, 0x0e0c0a08, 0x0f0d0b09}};
  for (uint32_t column = 0; column < 16; ++column) {
    EXPECT_TRUE(is_dropped(words, 32 + column, column + 1));
    EXPECT_FALSE(is_dropped(words, 32 + column, column));
  }
}

TEST(Philox, ProbabilitiesOfBytes) {
  EXPECT_EQ(rounded_dropout(0), 0);
  EXPECT_EQ(rounded_dropout(0.25), 0.25);
  EXPECT_EQ(rounded_dropout(0.1), 26.0 / 256);
  EXPECT_EQ(rounded_dropout(0x1p-1074), 1.0 / 256);
  EXPECT_EQ(rounded_dropout(1 - 0x1p-53), 255.0 / 256);
  for (uint32_t threshold = 1; threshold < 256; ++threshold) {
    EXPECT_EQ(rounded_dropout(threshold / 256.0), threshold / 256.0);
    EXPECT_EQ(dropout_threshold(threshold / 256.0), threshold);
  }
}

// Each byte must be below a threshold as often as its probability: of a million entries, within five deviations.
TEST(Philox, DropsTheRequestedShare) {
  for (const uint32_t threshold : {1u, 26u, 128u, 255u}) {
    int64_t dropped = 0;
    for (uint64_t row = 0; row < 1 << 10; ++row) {
      for (uint64_t group = 0; group < 1 << 6; ++group) {
        const Philox4 words = dropout_words(1234, 0, 0, row, group);
        for (int64_t column = 0; column < 16; ++column) dropped += is_dropped(words, column, threshold);
      }
    }
    const double p = threshold / 256.0, entries = 1 << 20;
    EXPECT_NEAR(static_cast<double>(dropped), entries * p, 5 * std::sqrt(entries * p * (1 - p))) << threshold;
  }
}

}  // namespace
}  // namespace tandem
