// The order of DiagonalParts: every m_block of every n_block once, and every tile waits for earlier tiles only.
#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "config/backward_tiles.h"

namespace tandem::test {
namespace {

constexpr int kMost = 14;

TEST(DiagonalParts, HaveEveryPartOnce) {
  for (int n_blocks = 1; n_blocks <= kMost; ++n_blocks) {
    for (int length = 1; length <= n_blocks + 1; ++length) {
      const DiagonalParts parts{n_blocks, length};
      std::set<std::pair<int, int>> seen;
      int before = n_blocks;
      for (int tile = 0; tile < parts.tiles(); ++tile) {
        const DiagonalParts::Tile part = parts.at(tile);
        EXPECT_TRUE(seen.insert({part.n_block, part.index}).second);
        EXPECT_LT(part.index, parts.parts(part.n_block));
        EXPECT_EQ(part.diagonal, part.n_block + part.index * length);
        EXPECT_LE(part.diagonal, before);
        before = part.diagonal;
      }
      int all = 0;
      for (int n = 0; n < n_blocks; ++n) all += parts.parts(n);
      EXPECT_EQ(static_cast<int>(seen.size()), all);
    }
  }
}

// An m_block sees n_blocks up to `last`. Each adds to the sum of its part's index, in the order of tiles.
TEST(DiagonalParts, AddInTheOrderOfTiles) {
  for (int n_blocks = 1; n_blocks <= kMost; ++n_blocks) {
    for (int length = 1; length <= n_blocks; ++length) {
      const DiagonalParts parts{n_blocks, length};
      for (int last = 0; last < n_blocks; ++last) {
        std::vector<int> added(static_cast<size_t>(n_blocks), 0);
        for (int tile = 0; tile < parts.tiles(); ++tile) {
          const DiagonalParts::Tile part = parts.at(tile);
          if (last < part.diagonal || last >= part.diagonal + length) continue;
          EXPECT_EQ(added[static_cast<size_t>(part.index)]++, (last - part.n_block) % length);
        }
        for (int index = 0; index < n_blocks; ++index)
          EXPECT_EQ(added[static_cast<size_t>(index)], clamp(last + 1 - index * length, 0, length));
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
