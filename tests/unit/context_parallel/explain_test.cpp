#include "context_parallel/explain.h"

#include "unit/context_parallel/problems.h"

namespace tandem::test {
namespace {

using namespace context_parallel;

TEST(ExplainContext, ShowsWhichRankComputesWhatInEachRound) {
  ContextCase c = causal(6000, 4, LayoutKind::zigzag);
  c.documents.push_back({2192, 2192, 0});
  EXPECT_EQ(explain(c.plan()),
            "context parallel: 4 ranks, layout zigzag, 2 documents\n"
            "work: 2.041e+07 visible pairs, largest / mean 1.644\n"
            "\n"
            " rank     queries        keys    work   steps  received keys  from ranks\n"
            "    0        2048        2048   0.440       4           1168           2\n"
            "    1        2048        2048   0.440       4           1168           2\n"
            "    2        2048        2048   1.475       9           4096           3\n"
            "    3        2048        2048   1.644       4           3072           3\n"
            "\n"
            "share of a rank's work in each round, as peer:share\n"
            " rank        0       1       2       3\n"
            "    0    0:47%       -    2:7%   1:47%\n"
            "    1    1:47%   0:47%       -    2:7%\n"
            "    2    2:24%   1:26%   0:26%   3:24%\n"
            "    3    3:25%   2:25%   1:25%   0:25%\n");
  c.left = 1023;
  EXPECT_EQ(explain_rank(c.plan(), 1),
            "steps of rank 1\n"
            "round 0, document 0: queries [1024, 2048), order 1024\n"
            "    keys [1024, 2048) of rank 1, diagonal 0, right 0\n"
            "round 0, document 1: queries [144, 1168), order 144\n"
            "    keys [144, 1168) of rank 1, diagonal 0, right 0\n"
            "round 1, document 0: queries [1024, 2047), order 0\n"
            "    keys [1, 1024) of rank 0, diagonal 1023, left 1023\n"
            "round 3, document 1: queries [144, 1167), order 0\n"
            "    keys [0, 144) of rank 2, diagonal 144, left 1023\n");
}

TEST(ExplainContext, FitsEightyColumns) {
  for_random_contexts(200, [](const ContextCase& c, Random&) {
    const ContextPlan plan = c.plan();
    std::string text = explain(plan) + explain_rank(plan, c.ranks - 1);
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.find('\n', begin);
      ASSERT_LE(end - begin, 80u) << text.substr(begin, end - begin);
      begin = end + 1;
    }
  });
  const ContextPlan large = causal(kMaxTokens, 64, LayoutKind::striped).plan();
  std::string text = explain(large) + explain_rank(large, 63);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    ASSERT_LE(end - begin, 80u) << text.substr(begin, end - begin);
    begin = end + 1;
  }
}

}  // namespace
}  // namespace tandem::test
