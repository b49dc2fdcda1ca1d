// Compares the closed formulas with counts of every pair.
#include "context_parallel/visible_pairs.h"
#include "unit/context_parallel/problems.h"

namespace tandem::test {
namespace {

using namespace context_parallel;

TEST(VisiblePairs, ClampedSumsEqualLoops) {
  for (int64_t first = -12; first <= 12; ++first) {
    for (int64_t step = 1; step <= 4; ++step) {
      for (int64_t n = 0; n <= 8; ++n) {
        for (int64_t most = 0; most <= 9; ++most) {
          int64_t sum = 0;
          for (int64_t i = 0; i < n; ++i) sum += std::clamp(first + i * step, int64_t{0}, most);
          ASSERT_EQ(clamped_sum(first, step, n, most), sum) << first << " " << step << " " << n << " " << most;
        }
      }
    }
  }
}

TEST(VisiblePairs, RectanglesEqualLoops) {
  for (uint64_t seed = 1; seed <= 20000; ++seed) {
    Random r(seed);
    ContextCase c;
    c.documents = {{40, 40, 0}};
    if (r.chance(0.5)) c.add_blocks(r, r.between(1, 9), r.between(1, 9), 0.4);
    const auto stride = static_cast<int32_t>(r.between(1, 4));
    TokenRange q{0, stride, r.between(0, 10), r.between(1, 10)}, k{0, stride, r.between(0, 10), r.between(1, 10)};
    while (q.end() > 40) --q.count;
    while (k.end() > 40) --k.count;
    KeyBand band;
    if (r.chance(0.7)) band.low = r.between(-30, 20);
    if (r.chance(0.7)) band.high = r.between(-20, 30);
    const BlockMask blocks = c.problem().block_mask;
    const VisibleRect rect = visible_rect({band, blocks ? &blocks : nullptr, 0}, q, k);
    VisibleRect all{q.count, 0, k.count, 0, 0};
    for (int64_t i = 0; i < q.count; ++i) {
      for (int64_t j = 0; j < k.count; ++j) {
        const int64_t distance = k.position(j) - q.position(i);
        if (distance < band.low || distance > band.high || !c.in_blocks(0, q.position(i), k.position(j))) continue;
        all = {std::min(all.q_begin, i), std::max(all.q_end, i + 1), std::min(all.k_begin, j),
               std::max(all.k_end, j + 1), all.pairs + 1};
      }
    }
    ASSERT_EQ(rect.pairs, all.pairs) << "seed " << seed;
    if (all.pairs == 0) continue;
    ASSERT_EQ(std::tie(rect.q_begin, rect.q_end, rect.k_begin, rect.k_end),
              std::tie(all.q_begin, all.q_end, all.k_begin, all.k_end))
        << "seed " << seed;
    if (!blocks) {
      int64_t keys = 0;
      for (int64_t i = 0; i < q.count; ++i) {
        for (int64_t j = 0; j < 40; ++j) {
          const int64_t distance = j - q.position(i);
          if (distance >= band.low && distance <= band.high) ++keys;
        }
      }
      ASSERT_EQ(count_pairs(band, q, 40), keys) << "seed " << seed;
    }
  }
}

TEST(VisiblePairs, LargestSumsFit) {
  constexpr int64_t n = kMaxTokens;
  EXPECT_EQ(count_pairs({}, {0, 1, 0, n}, n), n * n);
  EXPECT_EQ(count_pairs({-kFar, 0}, {0, 1, 0, n}, n), n / 2 * (n + 1));
  EXPECT_EQ(visible_rect({{-kFar, 0}, nullptr, 0}, {0, 1, 0, n}, {0, 1, 0, n}).pairs, n / 2 * (n + 1));
  EXPECT_EQ(visible_rect({{0, kFar}, nullptr, 0}, {0, 1, 0, n}, {0, 1, 0, n}).pairs, n / 2 * (n + 1));
}

}  // namespace
}  // namespace tandem::test
