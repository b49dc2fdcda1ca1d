#include "support/pairwise.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tandem::test {
namespace {

TEST(Pairwise, HasEveryPair) {
  constexpr int choices[] = {12, 2, 4, 2, 1, 4};
  const std::vector<std::vector<int>> list = pairwise(choices);
  EXPECT_LT(list.size(), 60u) << "12 x 4 are needed for one pair alone";
  for (size_t b = 1; b < std::size(choices); ++b) {
    for (size_t a = 0; a < b; ++a) {
      for (int pair = 0; pair < choices[a] * choices[b]; ++pair) {
        EXPECT_TRUE(std::ranges::any_of(list, [&](const auto& c) { return c[a] + choices[a] * c[b] == pair; }));
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
