// Waits between the blocks of a backward: small grids whose clocks are easy to count, and measured orders.
#include "sass/cli/backward_grid.h"

#include <gtest/gtest.h>

#include "unit/plan/problems.h"

namespace tandem::tool {
namespace {

using test::blackwell;
using test::causal;
using test::dense;
using test::hopper;

constexpr HandOver kHandOver{.adds = 300, .busy = 300, .visible = 50, .tile = 1000};
constexpr double kStep = 400;

Problem heads(int64_t batch, int64_t heads, int64_t seqlen, int64_t head_dim) {
  return test::backward(dense({.batch = batch,
                               .seqlen_q = seqlen,
                               .seqlen_k = seqlen,
                               .heads_q = heads,
                               .heads_k = heads,
                               .head_dim = head_dim,
                               .head_dim_v = head_dim}));
}
Waiting waiting(const Problem& p, const plan::BackwardSchedule& tiling) {
  return waiting_of(p, tiling, kStep, kHandOver).value();
}
plan::BackwardSchedule tiling_of(const Problem& p, const gpu::Properties& device) {
  return plan::make_plan(p, device).backward;
}

// Synthetic kernels on an H100 gave these figures. At (192, 128), 24 KB a step and CTA, additions from registers took
// 680 clocks and bulk copies 440. At head_dim 128, 32 KB by bulk copies took 420.
TEST(BackwardGrid, AdditionsMakeAHopperStepLonger) {
  const auto adds = [](int64_t head_dim, const gpu::Properties& device) {
    return adding_clocks(tiling_of(heads(1, 16, 16384, head_dim), device).tile);
  };
  EXPECT_NEAR(adds(128, hopper()), 420, 10);
  EXPECT_NEAR(adds(64, hopper()), 680.0 * 32 / 24, 20);
  EXPECT_EQ(adds(256, hopper()), 0);  // a separate kernel computes dq
  EXPECT_EQ(adds(64, blackwell()), 0);
}

// Four m_blocks and n_blocks of one head.
TEST(BackwardGrid, OneBlockDoesNotWait) {
  const Problem p = heads(1, 1, 512, 64);
  plan::BackwardSchedule tiling = tiling_of(p, blackwell());
  tiling.grid = 1;
  const Waiting w = waiting(p, tiling);
  EXPECT_EQ(w.steps, 16);
  EXPECT_EQ(w.clocks, 4 * (1000 + 4 * kStep));
  EXPECT_EQ(w.share(), 0);
}

// If the thread that adds dq is busy for longer than an iteration, its time binds a block. When the added dq is visible
// does not matter to one block.
TEST(BackwardGrid, ABusyAdderBindsOneBlock) {
  const Problem p = heads(1, 1, 512, 64);
  plan::BackwardSchedule tiling = tiling_of(p, blackwell());
  tiling.grid = 1;
  HandOver busy = kHandOver;
  busy.busy = 3 * kStep;
  const Waiting w = waiting_of(p, tiling, kStep, busy).value();
  EXPECT_GT(w.clocks, waiting(p, tiling).clocks + 8 * kStep);
  busy.adds *= 10;
  EXPECT_EQ(waiting_of(p, tiling, kStep, busy).value().clocks, w.clocks);
}

// All n_blocks start with the same m_block, so that each is one hand-over later than the preceding n_block: three
// hand-overs in all.
TEST(BackwardGrid, NBlocksFollowEachOther) {
  const Problem p = heads(1, 1, 512, 64);
  const plan::BackwardSchedule tiling = tiling_of(p, blackwell());
  ASSERT_EQ(tiling.grid, 4);
  const Waiting w = waiting(p, tiling);
  EXPECT_EQ(w.without_turns, 1000 + 4 * kStep);
  // Registers hold dq of one iteration before its turn. The last block computes its third iteration when dq of the
  // first has been added.
  EXPECT_EQ(w.clocks, 1000 + kStep + 3 * 350 + 300 + kStep);
}

// From the diagonal on n_block n + 1 is a step ahead of n.
TEST(BackwardGrid, FromTheDiagonalNoBlockWaits) {
  const Problem p = causal(heads(1, 64, 1024, 64));
  plan::BackwardSchedule tiling = tiling_of(p, blackwell());
  ASSERT_TRUE(tiling.tile.spt);
  tiling.spt_heads = 64;
  EXPECT_EQ(waiting(p, tiling).share(), 0);
  EXPECT_EQ(waiting(p, tiling).steps, 64 * 36);
  tiling.tile.spt = false;
  EXPECT_GT(waiting(p, tiling).share(), 0.015);
}

// One H100 gave these figures: causal, d64, with a step of 3,900 clocks. From the first n_block 4k reached 432 TFLOP/s,
// 16k 526 and 32k 558. From the diagonal, head by head, they reached 479, 560 and 578.
TEST(BackwardGrid, AsOrdersWereTimed) {
  const struct {
    int64_t batch, seqlen;
    double gained;
  } timed[] = {{4, 4096, 479.0 / 432 - 1}, {1, 16384, 560.0 / 526 - 1}, {1, 32768, 578.0 / 558 - 1}};
  for (const auto& [batch, seqlen, gained] : timed) {
    SCOPED_TRACE(seqlen);
    const Problem p = causal(heads(batch, 32, seqlen, 64));
    plan::BackwardSchedule tiling = tiling_of(p, hopper());
    ASSERT_TRUE(tiling.tile.spt);
    EXPECT_LT(waiting_of(p, tiling, 3900)->share(), 0.01);
    tiling.tile.spt = false;
    tiling.l2_heads = 8;
    EXPECT_GT(waiting_of(p, tiling, 3900)->share(), gained / 3);
    EXPECT_LT(waiting_of(p, tiling, 3900)->share(), gained * 1.5);
  }
}

// Waits are under 3 % of a step of `tandem explain --clocks`. The exception is unmasked d64 where one or two heads fill
// the device, because their n_blocks start together.
TEST(BackwardGrid, PlansOfBlackwellWaitLittle) {
  constexpr double kD64 = 2555, kPair = 3077;
  for (const int64_t seqlen : {1024, 2048, 4096, 8192, 16384, 32768}) {
    SCOPED_TRACE(seqlen);
    const int64_t batch = std::max<int64_t>(16384 / seqlen, 1);
    for (const bool masks : {false, true}) {
      const Problem wide = masks ? causal(heads(batch, 16, seqlen, 128)) : heads(batch, 16, seqlen, 128);
      EXPECT_LT(waiting_of(wide, tiling_of(wide, blackwell()), kPair)->share(), 0.03);
      const Problem narrow = masks ? causal(heads(batch, 32, seqlen, 64)) : heads(batch, 32, seqlen, 64);
      EXPECT_LT(waiting_of(narrow, tiling_of(narrow, blackwell()), kD64)->share(), 0.03);
    }
  }
}

// Lengths on the device, block masks and two-pass tiles of dk and dv have no such model.
TEST(BackwardGrid, OtherProblemsHaveNoModel) {
  Problem p = heads(1, 4, 512, 64);
  p.seqused_k.present = true;
  EXPECT_FALSE(waiting_of(p, tiling_of(p, blackwell()), kStep));
  const Problem apart = heads(1, 4, 512, 256);
  EXPECT_FALSE(waiting_of(apart, tiling_of(apart, blackwell()), kStep));
}

}  // namespace
}  // namespace tandem::tool
