#include "base/fixed_vector.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tandem::test {
namespace {

TEST(FixedVector, HoldsItsValues) {
  FixedVector<int, 3> list;
  EXPECT_TRUE(list.empty());
  for (const int value : {3, 1, 2}) EXPECT_EQ(list.push_back(value), value);
  EXPECT_EQ(list.size(), 3u);
  EXPECT_EQ(list[1], 1);
  EXPECT_EQ(std::accumulate(list.begin(), list.end(), 0), 6);
  list.back() = 7;
  const FixedVector<int, 3> copy = list;
  list[0] = 0;
  EXPECT_EQ(copy[0], 3);
  EXPECT_EQ(copy.back(), 7);
}

TEST(FixedVector, RefusesMoreThanItHasRoomFor) {
  FixedVector<int, 2> list;
  list.push_back(1);
  list.push_back(2);
  EXPECT_THROW(list.push_back(3), std::length_error);
  EXPECT_EQ(list.size(), 2u);
}

}  // namespace
}  // namespace tandem::test
