// Plans the problems of reports about other implementations of context parallelism. Each test names the report.
#include "context_parallel/heads.h"
#include "unit/context_parallel/problems.h"

namespace tandem::test {
namespace {

using namespace context_parallel;

ContextCase packed(const std::vector<int64_t>& lengths, int32_t ranks) {
  ContextCase c;
  for (const int64_t length : lengths) c.documents.push_back({length, length, 0});
  c.right = 0;
  c.ranks = ranks;
  return c;
}

void expect_covered_in_all_layouts(ContextCase c) {
  for (const LayoutKind layout : kLayouts) {
    c.layout = layout;
    SCOPED_TRACE(testing::Message() << c);
    expect_covered_once(c, c.plan());
  }
}

// Lengths were rounded to twice the ranks: keys were dropped and rows were zero, silently.
TEST(Complaints, TransformerEngine3331And1930TailPaddingDropsKeys) {
  expect_covered_in_all_layouts(packed({17, 3, 1, 0, 30, 29}, 2));
  expect_covered_in_all_layouts(packed({17, 3, 1, 0, 30, 29}, 4));
}

// 15 ranks with lengths that they do not divide.
TEST(Complaints, TransformerEngine3489FifteenRanks) { expect_covered_in_all_layouts(packed({61, 1, 44, 29}, 15)); }

// A missing size disabled context parallelism: each rank saw only its own keys.
TEST(Complaints, MegatronBridge2667RanksSeeOnlyTheirOwnKeys) {
  ContextCase c = packed({64}, 0);
  ContextPlan plan;
  EXPECT_FALSE(make_context_plan(c.problem(), &plan).ok());
  c.ranks = 8;
  for (const LayoutKind layout : kLayouts) {
    c.layout = layout;
    plan = c.plan();
    int64_t pairs = 0;
    for (int32_t rank = 0; rank < 8; ++rank) pairs += plan.pairs(rank);
    EXPECT_EQ(pairs, 64 * 65 / 2);
  }
}

// A sink enters a row's sum once. The row's only owner adds it, and no part of the row has another owner.
TEST(Complaints, TransformerEngine2541RowsHaveOneOwnerForTheirSink) {
  ContextCase c = packed({33, 1, 20}, 4);
  for (const LayoutKind layout : kLayouts) {
    c.layout = layout;
    const ContextPlan plan = c.plan();
    for (int32_t rank = 0; rank < 4; ++rank) {
      for (const ContextStep& s : plan.steps(rank)) {
        for (int64_t i = 0; i < s.q.count; ++i) {
          EXPECT_EQ(plan.queries().place(s.q.document, s.q.position(i)).rank, rank);
        }
      }
    }
  }
}

// All-to-all was limited to as many ranks as key heads.
TEST(Complaints, PrimeRl3042MoreRanksThanKeyHeads) {
  for (int32_t rank = 0; rank < 8; ++rank) {
    const auto runs = head_runs(32, 2, 8, rank);
    ASSERT_EQ(runs.size(), 1u);
    EXPECT_EQ(runs[0].q_end - runs[0].q_begin, 4);
    EXPECT_EQ(runs[0].k_begin, rank / 4);
    EXPECT_EQ(runs[0].k_end, rank / 4 + 1);
  }
}

// One device could not reproduce the bits of several. With chunks, its plan has the same parts in the same order.
TEST(Complaints, CudnnFrontend752And1142OneDeviceReproducesTheParts) {
  ContextCase c = packed({100, 37}, 1);
  c.chunk = 16;
  const auto parts = [&] {
    std::set<std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t, int64_t>> all;
    const ContextPlan plan = c.plan();
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      for (const ContextStep& s : plan.steps(rank)) {
        all.emplace(s.q.document, s.query_order, s.key_order, s.q.begin, s.k.begin, s.diagonal);
      }
    }
    return all;
  };
  const auto one = parts();
  for (const LayoutKind layout : kLayouts) {
    for (c.ranks = 2; c.ranks <= 8; ++c.ranks) {
      c.layout = layout;
      EXPECT_EQ(parts(), one);
    }
  }
}

// Each document had to divide by twice the ranks.
TEST(Complaints, Torchtitan2536And2543DocumentsNeedNotDivide) {
  for (int32_t ranks = 1; ranks <= 16; ++ranks) expect_covered_in_all_layouts(packed({7, 13, 1, 0, 31}, ranks));
}

// Packed documents attended to each other, silently.
TEST(Complaints, Maxtext4476DocumentsDoNotSeeEachOther) {
  ContextCase c = packed({9, 20, 1, 14}, 3);
  c.right = TANDEM_UNBOUNDED;
  for (const LayoutKind layout : kLayouts) {
    c.layout = layout;
    const ContextPlan plan = c.plan();
    int64_t pairs = 0;
    for (int32_t rank = 0; rank < 3; ++rank) {
      for (const ContextStep& s : plan.steps(rank)) {
        EXPECT_EQ(s.q.document, s.k.document);
        pairs += s.pairs;
      }
    }
    EXPECT_EQ(pairs, 9 * 9 + 20 * 20 + 1 + 14 * 14);
  }
}

// Elsewhere a shard of another plan gives wrong numbers without a message.
TEST(Complaints, AShardOfAnotherPlanIsRefused) {
  const ContextPlan plan = packed({10}, 3).plan();
  int32_t largest = 0;
  while (plan.queries().tokens(largest) != 4) ++largest;
  EXPECT_TRUE(plan.check_shard(largest, 4, 4).ok());
  EXPECT_EQ(plan.check_shard(3, 4, 4).message, "rank (3) must be below 3: pass the rank in the plan's group");
  EXPECT_EQ(plan.check_shard(2, 5, 4).message, "q rows (5) must be the " + std::to_string(plan.queries().tokens(2)) +
                                                   " of rank 2 in this plan: shard the batch by the plan's layout");
  EXPECT_FALSE(plan.check_shard(largest, 4, 3).ok());
}

}  // namespace
}  // namespace tandem::test
