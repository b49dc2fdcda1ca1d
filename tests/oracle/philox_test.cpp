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

// The known answers of Random123 (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  expect_words(philox4x32_10({{0, 0, 0, 0}}, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  constexpr uint32_t ones = 0xffffffff;
  expect_words(philox4x32_10({{ones, ones, ones, ones}}, ones, ones), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  expect_words(philox4x32_10({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0), 0xd16cfe09,
               0x94fdcceb, 0x5001e420, 0x24126ea1);
}

TEST(Philox, CounterAndKeyOfDropout) {
  const uint64_t seed = 0x1122334455667788, offset = 0x0000000a0000000b;
  const Philox4 got = dropout_words(seed, offset, 3, 5, 7);
  const Philox4 expected = philox4x32_10({{7, 5, 3, 0x0b}}, 0x55667788, 0x11223344 + 0x0a);
  for (int n = 0; n < 4; ++n) EXPECT_EQ(got.word[n], expected.word[n]);
}

TEST(Philox, Threshold) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.25), uint64_t{1} << 30);
  EXPECT_LT(dropout_threshold(1 - 0x1p-53), uint64_t{1} << 32);
}

}  // namespace
}  // namespace tandem
