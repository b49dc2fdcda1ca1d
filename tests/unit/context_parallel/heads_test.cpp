// Checks the heads of each rank for all-to-all.
#include "context_parallel/heads.h"

#include <gtest/gtest.h>

#include <vector>

namespace tandem::test {
namespace {

using namespace context_parallel;

TEST(HeadRuns, GiveEachQueryHeadToOneRankWithItsKeyHead) {
  for (int64_t heads_k = 1; heads_k <= 9; ++heads_k) {
    for (int64_t group = 1; group <= 8; ++group) {
      for (int32_t ranks = 1; ranks <= 20; ++ranks) {
        const int64_t heads_q = heads_k * group;
        std::vector<int> owners(static_cast<size_t>(heads_q), 0);
        for (int32_t rank = 0; rank < ranks; ++rank) {
          int64_t heads = 0;
          for (const HeadRun& run : head_runs(heads_q, heads_k, ranks, rank)) {
            const int64_t queries = run.q_end - run.q_begin, keys = run.k_end - run.k_begin;
            ASSERT_GT(queries, 0);
            ASSERT_EQ(queries % keys, 0) << "a run must be a call with grouped heads";
            for (int64_t h = 0; h < queries; ++h, ++heads) {
              ++owners[static_cast<size_t>(run.q_begin + h)];
              ASSERT_EQ(run.k_begin + h / (queries / keys), (run.q_begin + h) / group);
            }
          }
          ASSERT_TRUE(heads == heads_q / ranks || heads == heads_q / ranks + 1);
        }
        for (const int count : owners) ASSERT_EQ(count, 1);
      }
    }
  }
}

TEST(HeadRuns, AreOneCallIfHeadsDivide) {
  for (int32_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(head_runs(64, 8, 8, rank).size(), 1u);
    EXPECT_EQ(head_runs(64, 8, 4, rank / 2).size(), 1u);
    EXPECT_EQ(head_runs(32, 32, 8, rank).size(), 1u);
  }
}

}  // namespace
}  // namespace tandem::test
