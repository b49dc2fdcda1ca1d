// Rotations of n_blocks: the order in which they add to dq, and the plans that have rotations.
#include <gtest/gtest.h>

#include <vector>

#include "config/backward_tiles.h"
#include "plan/plan.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

// At each iteration the order is a permutation. n_blocks add in the order in which they reach the iteration,
// so that no order of waits is a cycle.
TEST(Rotation, OrderFollowsTime) {
  for (int n_blocks = 2; n_blocks <= 16; ++n_blocks) {
    for (int iterations = 1; iterations <= 40; ++iterations) {
      for (int iteration = 0; iteration < iterations; ++iteration) {
        std::vector<int> times(static_cast<size_t>(n_blocks), -1);
        for (int index = 0; index < n_blocks; ++index) {
          const NBlockRotation rotation{n_blocks, index};
          const int before = rotation.before(iteration, iterations);
          ASSERT_GE(before, 0);
          ASSERT_LT(before, n_blocks);
          int& time = times[static_cast<size_t>(before)];
          ASSERT_EQ(time, -1) << "two n_blocks have one place";
          time = (iteration - rotation.first(iterations) + iterations) % iterations;
        }
        for (size_t n = 1; n < times.size(); ++n)
          ASSERT_LE(times[n - 1], times[n]) << n_blocks << " n_blocks, " << iterations << " iterations";
      }
    }
  }
}

Problem few_heads(int64_t seqlen, int64_t heads) {
  return backward(dense(
      {.seqlen_q = seqlen, .seqlen_k = seqlen, .heads_q = heads, .heads_k = heads, .head_dim = 80, .head_dim_v = 80}));
}

// Neither a limit of SMs nor the present SMs may change bits. All tiles are one wave.
TEST(Rotation, PlansOfFewHeads) {
  Problem p = few_heads(2007, 3);
  const plan::BackwardSchedule t = plan::make_plan(p, hopper()).backward;
  EXPECT_EQ(t.rotated_n_blocks, 16);
  EXPECT_LE(t.tiles, hopper().sm_count);
  p.sm_limit = 3;
  const plan::BackwardSchedule limited = plan::make_plan(p, hopper()).backward;
  EXPECT_EQ(limited.rotated_n_blocks, t.rotated_n_blocks);
  EXPECT_EQ(limited.m_splits, t.m_splits);
  EXPECT_EQ(limited.grid, t.rotated_n_blocks);
  p.batch_invariant = true;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.rotated_n_blocks, 0);
  p.batch_invariant = false, p.window_right = 0;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.rotated_n_blocks, 0);
  EXPECT_EQ(plan::make_plan(few_heads(2007, 64), hopper()).backward.rotated_n_blocks, 0);
  // Longer heads have several sums of dq.
  const plan::BackwardSchedule longer = plan::make_plan(few_heads(3000, 2), hopper()).backward;
  EXPECT_EQ(longer.rotated_n_blocks, longer.dq_split_n_blocks);
  EXPECT_LE(longer.rotated_n_blocks, 16);
}

TEST(Rotation, FewMultiprocessorsAreRefused) {
  gpu::Properties part = hopper();
  part.sm_count = 16;
  EXPECT_TRUE(plan::check(few_heads(2007, 3), part).ok());
  part.sm_count = 8;
  EXPECT_EQ(plan::check(few_heads(2007, 3), part).message.rfind("device (8 multiprocessors) must have at least 16", 0),
            0u);
}

}  // namespace
}  // namespace tandem::test
