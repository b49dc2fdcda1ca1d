// Compares the ranges of visible keys and of seeing queries with a check of every pair.
#include "config/visible_range.h"

#include <gtest/gtest.h>

namespace tandem::test {
namespace {

struct Mask {
  int diagonal, left, right, q_len, k_len;
  bool bounded_left, bounded_right;

  bool visible(int i, int j) const {
    return j >= 0 && j < k_len && i >= 0 && i < q_len && (!bounded_left || j >= i + diagonal - left) &&
           (!bounded_right || j <= i + diagonal + right);
  }
};

template <bool bounded_left, bool bounded_right>
void compare(const Mask& m) {
  const Band<bounded_left, bounded_right> band{m.diagonal, m.left, m.right, m.q_len, m.k_len};
  const auto in = [](const auto& range, int n) { return range.begin <= n && n < range.end; };
  for (int first = 0; first < m.q_len; ++first) {
    for (int last = first; last < m.q_len; ++last) {
      for (int j = 0; j < m.k_len; ++j) {
        bool some = false, all = true;
        for (int i = first; i <= last; ++i) (m.visible(i, j) ? some : all) = m.visible(i, j);
        if (some) {
          EXPECT_TRUE(in(band.visible_keys(first, last), j)) << first << " " << last << " " << j;
        }
        EXPECT_EQ(in(band.unmasked_keys(first, last), j), all) << first << " " << last << " " << j;
        if (first == last) {
          EXPECT_EQ(in(band.visible_keys(first, last), j), some) << first << " " << j;
        }
      }
    }
  }
  for (int first = 0; first < m.k_len; ++first) {
    for (int last = first; last < m.k_len; ++last) {
      for (int i = 0; i < m.q_len; ++i) {
        bool some = false, all = true;
        for (int j = first; j <= last; ++j) (m.visible(i, j) ? some : all) = m.visible(i, j);
        if (some) {
          EXPECT_TRUE(in(band.visible_queries(first, last), i)) << first << " " << last << " " << i;
        }
        EXPECT_EQ(in(band.unmasked_queries(first, last), i), all) << first << " " << last << " " << i;
        if (first == last) {
          EXPECT_EQ(in(band.visible_queries(first, last), i), some) << first << " " << i;
        }
      }
    }
  }
}

TEST(VisibleRange, AgainstEveryPair) {
  for (int sq = 1; sq <= 5; ++sq) {
    for (int sk = 0; sk <= 5; ++sk) {
      for (int diagonal = -4; diagonal <= 4; ++diagonal) {
        for (int left = -2; left <= 4; left += 2) {
          for (int right = -2; right <= 4; right += 2) {
            if (left + right < 0) continue;
            const Mask m{diagonal, left, right, sq, sk, true, true};
            compare<true, true>(m);
            compare<true, false>({diagonal, left, right, sq, sk, true, false});
            compare<false, true>({diagonal, left, right, sq, sk, false, true});
            compare<false, false>({diagonal, left, right, sq, sk, false, false});
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
