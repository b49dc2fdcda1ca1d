// Compares the lower bound of a plan, and its reasons, with a count.
#include "plan/explain.h"

#include <gtest/gtest.h>

#include "plan/forward.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

using plan::Floor;

Floor floor_of(const Problem& p) { return plan::forward_floor(p, plan::make_plan(p, hopper()), hopper()); }

std::string reasons_of(const Problem& p) {
  std::string text;
  for (const std::string& line : plan::reasons(p, plan::make_plan(p, hopper()), hopper())) text += line + "\n";
  return text;
}

TEST(PlanReasons, TextsThatAreOptions) {
  Problem p = dense({.seqlen_q = 256, .seqlen_k = 256});
  EXPECT_EQ(reasons_of(p).find("texts:"), std::string::npos);
  p.taken.alibi = p.taken.window = true;
  EXPECT_NE(reasons_of(p).find("texts: score_mod is ALiBi, mask_mod is a window"), std::string::npos);
}

// No plan reads deterministic, as tandem.h states, and the backward does not read num_splits.
TEST(PlanReasons, OptionsThatChangeNothing) {
  for (const Problem& base :
       {dense({.seqlen_q = 1, .seqlen_k = 5000}), causal(dense({.seqlen_q = 900, .seqlen_k = 900})),
        backward(dense({.batch = 2, .seqlen_q = 900, .seqlen_k = 900}))}) {
    for (const gpu::Properties& device : {hopper(), blackwell()}) {
      Problem p = base;
      if (p.pass == TANDEM_BACKWARD) p.num_splits = 2;
      p.deterministic = true;
      const plan::Plan before = plan::make_plan(base, device), after = plan::make_plan(p, device);
      EXPECT_EQ(plan::reasons(p, after, device), plan::reasons(base, before, device));
      EXPECT_EQ(plan::launches(after), plan::launches(before));
      EXPECT_EQ(after.workspace_bytes, before.workspace_bytes);
    }
  }
}

TEST(PlanFloor, VisiblePairsAgainstCounting) {
  const int64_t far = TANDEM_UNBOUNDED;
  for (int64_t sq = 0; sq <= 6; ++sq) {
    for (int64_t sk = 0; sk <= 6; ++sk) {
      for (const int64_t left : {int64_t{-3}, int64_t{0}, int64_t{2}, int64_t{9}, far}) {
        for (const int64_t right : {int64_t{-2}, int64_t{0}, int64_t{3}, int64_t{9}, far}) {
          if (left != far && right != far && left + right < 0) continue;
          for (const bool bottom_right : {false, true}) {
            Problem p = dense({.seqlen_q = sq, .seqlen_k = sk});
            p.bottom_right = bottom_right;
            p.window_left = left;
            p.window_right = right;
            const Sequence s = sequence_of(p, 0);
            int64_t count = 0;
            for (int64_t i = 0; i < sq; ++i) count += visible_keys(p, s, i).end - visible_keys(p, s, i).begin;
            EXPECT_EQ(plan::visible_pairs(sq, sk, bottom_right ? sk - sq : 0, left, right), static_cast<double>(count))
                << sq << " " << sk << " " << left << " " << right << " " << bottom_right;
          }
        }
      }
    }
  }
}

// Sizes for mental arithmetic: 132 heads of 128 queries and 128 keys give each SM one tile of 128 x 128.
TEST(PlanFloor, OneTilePerSm) {
  plan::Plan plan;
  plan.forward.tile = Sm90ForwardConfig{.warpgroups = 2, .tile_n = 128};
  const Problem p = dense({.seqlen_q = 128, .seqlen_k = 128, .heads_q = 132, .heads_k = 132});
  const Floor f = plan::forward_floor(p, plan, hopper());
  EXPECT_EQ(f.flops, 132.0 * 4 * 128 * 128 * 128);
  EXPECT_EQ(f.mma_clocks, 2048);
  EXPECT_EQ(f.exp_clocks, 1024);
  // Both warpgroups read 64 KB of keys and values, which TMA writes once; queries are in registers.
  EXPECT_EQ(f.shared_clocks, 3 * 65536 / 128);
  EXPECT_EQ(f.hbm_bytes, 132.0 * 4 * 128 * 128 * 2);
  EXPECT_EQ(f.l2_bytes, f.hbm_bytes);
  EXPECT_STREQ(f.binds, "tensor core");
}

// 148 heads of 256 queries and 128 keys give each SM of a Blackwell its two tiles of 128 x 128.
TEST(PlanFloor, TwoTilesPerSmOfBlackwell) {
  const Problem p = dense({.seqlen_q = 256, .seqlen_k = 128, .heads_q = 148, .heads_k = 148});
  const plan::Plan plan = plan::make_plan(p, blackwell());
  EXPECT_EQ(plan.forward.grid, 148);
  const Floor f = plan::forward_floor(p, plan, blackwell());
  EXPECT_EQ(f.mma_clocks, 2048);
  EXPECT_EQ(f.exp_clocks, 2048);
  gpu::Properties b300 = blackwell();
  b300.compute_minor = 3;
  EXPECT_EQ(plan::forward_floor(p, plan, b300).exp_clocks, 1024);
  // Each tile's products read 32 KB of queries and 64 KB of keys and values; TMA writes the latter once.
  EXPECT_EQ(f.shared_clocks, (2 * 3 + 2) * 32768 / 128);
  std::string text;
  for (const std::string& line : plan::reasons(p, plan, blackwell())) text += line + "\n";
  EXPECT_NE(text.find("tile: 2 x 128 rows x 128 keys, which alternate on the tensor core"), std::string::npos) << text;
}

// 132 heads of 128 queries and 128 keys: each SM of a Hopper has two iterations of 64 queries.
TEST(PlanFloor, BackwardOfOneTilePerSm) {
  const Problem p = backward(dense({.seqlen_q = 128, .seqlen_k = 128, .heads_q = 132, .heads_k = 132}));
  const Floor f = plan::floor_of(p, plan::make_plan(p, hopper()), hopper());
  EXPECT_EQ(f.flops, 132.0 * 10 * 128 * 128 * 128);
  EXPECT_EQ(f.mma_clocks, 5120);
  EXPECT_EQ(f.exp_clocks, 1024);
  // Per iteration, products read 256 KB; writes are 16 KB of dS and 32 KB of queries and dout.
  EXPECT_EQ(f.shared_clocks, 2 * (262144 + 16384 + 32768) / 128);
  // The bytes of q, k, v, out, dout and their gradients, once each, and the lse.
  EXPECT_EQ(f.hbm_bytes, 132.0 * 128 * (8 * 128 * 2 + 4));
  EXPECT_STREQ(f.binds, "tensor core");
  // With two n_blocks, 32 KB of dq are written and read too.
  const Problem two = backward(dense({.seqlen_q = 128, .seqlen_k = 256, .heads_q = 66, .heads_k = 66}));
  const Floor of_two = plan::floor_of(two, plan::make_plan(two, hopper()), hopper());
  EXPECT_EQ(of_two.shared_clocks, 2 * (262144 + 16384 + 32768 + 65536) / 128);
  EXPECT_STREQ(of_two.binds, "shared memory");
}

// One iteration of 128 queries on each SM of a Blackwell. docs/design/sm100_backward.md has the same count.
TEST(PlanFloor, BackwardOfOneTilePerSmOfBlackwell) {
  const Problem p = backward(dense({.seqlen_q = 128, .seqlen_k = 128, .heads_q = 148, .heads_k = 148}));
  const Floor f = plan::floor_of(p, plan::make_plan(p, blackwell()), blackwell());
  EXPECT_EQ(f.mma_clocks, 2560);
  EXPECT_EQ(f.shared_clocks, 3328 + 512);  // with the queries and dout that copies write
}

// Wide heads: the kernel computes scores twice, once for dk and once for dv.
TEST(PlanFloor, BackwardOfOneWideTilePerSmOfBlackwell) {
  const Problem p = backward(
      dense({.seqlen_q = 128, .seqlen_k = 128, .heads_q = 148, .heads_k = 148, .head_dim = 256, .head_dim_v = 256}));
  const Floor f = plan::floor_of(p, plan::make_plan(p, blackwell()), blackwell());
  EXPECT_EQ(f.mma_clocks, 6 * 1024);
  EXPECT_EQ(f.exp_clocks, 2 * 1024);
  EXPECT_EQ(f.shared_clocks, 3 * 1024 + 2 * 512 + 768 + 256 + 768 + 5 * 512);  // docs/design/sm100_backward.md
}

TEST(PlanFloor, WhatBinds) {
  const Sizes d64{
      .batch = 4, .seqlen_q = 4096, .seqlen_k = 4096, .heads_q = 32, .heads_k = 32, .head_dim = 64, .head_dim_v = 64};
  const Floor f = floor_of(dense(d64));
  EXPECT_DOUBLE_EQ(f.exp_clocks, f.mma_clocks);
  Sizes d32 = d64;
  d32.head_dim = d32.head_dim_v = 32;
  EXPECT_STREQ(floor_of(dense(d32)).binds, "exponential");
  EXPECT_NEAR(floor_of(causal(dense(d64))).flops / f.flops, 0.5, 1e-3);
}

TEST(PlanReasons, ReportTheChoice) {
  const Problem grouped = causal(dense({.batch = 64, .seqlen_q = 100, .seqlen_k = 4096, .heads_q = 64, .heads_k = 8}));
  const Sm90ForwardConfig tile = plan::make_plan(grouped, hopper()).forward.tile.for_hopper();
  const std::string gqa = reasons_of(grouped);
  EXPECT_NE(gqa.find("tile: " + std::to_string(tile.tile_m()) + " rows x " + std::to_string(tile.tile_n) + " keys, " +
                     std::to_string(tile.warpgroups) + " MMA warpgroups"),
            std::string::npos)
      << gqa;
  EXPECT_NE(gqa.find("heads: rows of 8 query heads"), std::string::npos) << gqa;
  EXPECT_NE(gqa.find("order: tiles differ in length"), std::string::npos) << gqa;
  EXPECT_NE(gqa.find("cache: "), std::string::npos) << gqa;
  EXPECT_NE(gqa.find("grid: 132 blocks on 132 SMs"), std::string::npos) << gqa;
  const std::string decode = reasons_of(causal(dense({.seqlen_q = 1, .seqlen_k = 4096, .heads_q = 8, .heads_k = 8})));
  EXPECT_NE(decode.find("mask: no bound hides a key"), std::string::npos) << decode;
  EXPECT_NE(decode.find("order: each block has one split of a tile"), std::string::npos) << decode;
  EXPECT_NE(decode.find("splits: "), std::string::npos) << decode;
  EXPECT_NE(decode.find(" n_blocks of keys, because tiles are few"), std::string::npos) << decode;
  const std::string documents = reasons_of(packed({.batch = 9, .seqlen_q = 500, .seqlen_k = 500}, 3000, 3000));
  EXPECT_NE(documents.find("the device sorts the tiles"), std::string::npos) << documents;
  EXPECT_NE(documents.find("for up to "), std::string::npos) << documents;
}

TEST(PlanReasons, ReportTheBackward) {
  const Problem p = backward(causal(dense({.seqlen_q = 300, .seqlen_k = 300, .heads_q = 8, .heads_k = 2})));
  const plan::Plan plan = plan::make_plan(p, hopper());
  const std::string text = reasons_of(p);
  for (const char* said :
       {"tile: 128 keys, which iterate over the queries that see them, 64 at a time",
        "heads: a block iterates over the 4 query heads", "every run gives the same bits",
        "split: a tile has the queries between the diagonals", "grid: 48 blocks on 132 SMs for 48 tiles"})
    EXPECT_NE(text.find(said), std::string::npos) << said << "\n" << text;
  const std::vector<std::string> launches = plan::launches(plan);
  ASSERT_EQ(launches.size(), 3u);
  EXPECT_EQ(launches[0], "bwd_preprocess: 80 blocks of 256 threads");
  EXPECT_EQ(launches[1].find("backward: 48 blocks of 384 threads, "), 0u);
  EXPECT_EQ(launches[2], "bwd_postprocess: 128 blocks of 256 threads, may begin before the previous launch has ended");
}

TEST(PlanReasons, SayThatWideGradientsAreApart) {
  const auto expect_said = [](int64_t head_dim_v, std::initializer_list<const char*> expected) {
    const Problem p = backward(dense({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 192, .head_dim_v = head_dim_v}));
    std::string text;
    for (const std::string& line : plan::reasons(p, plan::make_plan(p, blackwell()), blackwell())) text += line + "\n";
    for (const char* said : expected) EXPECT_NE(text.find(said), std::string::npos) << said << "\n" << text;
  };
  expect_said(192, {"in two passes, for dk with dS and for dv", "6 and 10 blocks of 64 columns",
                    "6 blocks on 148 SMs for 3 tiles each of dk and dv"});
  expect_said(128, {"4 blocks of 8192 bytes", "4 blocks on 148 SMs for 2 tiles"});
}

}  // namespace
}  // namespace tandem::test
