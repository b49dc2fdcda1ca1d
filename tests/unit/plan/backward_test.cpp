// The launches of a backward plan, and the workspace regions that connect them.
#include "plan/backward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "plan/tuning.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

TEST(BackwardPlan, Launches) {
  const Problem p = backward(dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 300, .heads_q = 3, .heads_k = 3}));
  const plan::Plan plan = plan::make_plan(p, hopper());
  const plan::BackwardSchedule& t = plan.backward;
  EXPECT_EQ(t.m_splits, 1);
  ASSERT_EQ(plan.kernels.size(), 2u);
  EXPECT_EQ(plan.kernels[0].id, plan::id_of(t.tile));
  EXPECT_NE(plan.kernels[plan::kPrepostKernel].id, plan.kernels[0].id);
  ASSERT_EQ(plan.launches.size(), 3u);
  EXPECT_TRUE(plan.fills.empty());
  EXPECT_EQ(plan.launches[0].kernel, plan::kPrepostKernel);
  EXPECT_EQ(plan.launches[0].entry, plan::EntryId::preprocess);
  EXPECT_EQ(plan.launches[0].grid, 2u * 3 * 2 * 2);  // m_blocks of 64 queries, 32 per CTA
  EXPECT_FALSE(plan.launches[0].overlap_previous);
  EXPECT_EQ(plan.launches[1].kernel, 0);
  EXPECT_EQ(plan.launches[1].entry, plan::EntryId::main);
  EXPECT_EQ(plan.launches[1].grid, 2u * 3 * 3);  // n_blocks of 128 keys
  EXPECT_EQ(plan.launches[1].block, static_cast<uint32_t>(t.tile.threads));
  EXPECT_EQ(plan.launches[1].shared_bytes, static_cast<uint32_t>(t.tile.smem_bytes));
  EXPECT_EQ(plan.launches[2].kernel, plan::kPrepostKernel);
  EXPECT_EQ(plan.launches[2].entry, plan::EntryId::postprocess);
  EXPECT_EQ(plan.launches[2].grid, plan.launches[0].grid);  // two CTAs for each m_block, which has several sums

  // With a limit, a launch must not begin early, because it would wait on multiprocessors reserved for other work.
  Problem limited = p;
  limited.sm_limit = 100;
  EXPECT_TRUE(plan.launches[2].overlap_previous);
  EXPECT_FALSE(plan::make_plan(limited, hopper()).launches[2].overlap_previous);

  // Regions follow each other within the workspace, and a launch writes each one before others read it.
  size_t end = 0;
  for (const plan::Region& region : plan.regions) {
    EXPECT_GE(region.offset, end) << region.name;
    EXPECT_EQ(region.offset % 128, 0u) << region.name;
    end = region.offset + region.bytes;
  }
  EXPECT_LE(end + plan::kWorkspaceAlignment - 1, plan.workspace_bytes);
  EXPECT_EQ(plan.regions.back().first_writer, 1);
  // The sizes are a float32 dq for each of its sums and 16 bytes per row, rounded up to whole tiles.
  const size_t rows = size_t{2} * 3 * 128, dq = plan.backward.dq_splits * 128 * sizeof(float);
  EXPECT_LE(plan.workspace_bytes, rows * (dq + 16) + 4 * 128 + plan::kWorkspaceAlignment);
}

// If n_blocks are few, their m_blocks are split over a whole GPU, whatever the call's limit. dk and dv then have at
// most one part per multiprocessor.
TEST(BackwardPlan, FewKeysSplitTheirQueries) {
  Problem p = backward(dense({.batch = 2, .seqlen_q = 4096, .seqlen_k = 77, .heads_q = 8, .heads_k = 8}));
  const plan::Plan plan = plan::make_plan(p, hopper());
  const plan::BackwardSchedule& t = plan.backward;
  EXPECT_GT(t.m_splits, 1);
  EXPECT_LE(t.m_splits, plan::kTuning.sm90.backward.max_m_splits);
  EXPECT_EQ(t.tiles, 2 * 8 * t.m_splits);
  EXPECT_LE(t.tiles, hopper().sm_count);
  EXPECT_EQ(plan.launches[1].grid, static_cast<uint32_t>(t.tiles));
  // A thread of postprocess converts 16 of 64 floats of dk or dv, and with several n_blocks also dq of an m_block.
  EXPECT_TRUE(t.tile.single_n_block);
  EXPECT_EQ(plan.launches[2].grid, 2u * 8 * (4 + 4));
  p.seqlen_k = 200;
  const plan::Plan two = plan::make_plan(p, hopper());
  EXPECT_FALSE(two.backward.tile.single_n_block);
  EXPECT_EQ(two.launches[2].grid, two.launches[0].grid / 2 + 2 * 2 * 8 * (4 + 4));
  p.seqlen_k = 77;
  EXPECT_EQ(plan.regions.back().bytes, static_cast<size_t>(t.tiles) * 128 * (128 + 128) * sizeof(float));
  p.sm_limit = 3;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.m_splits, t.m_splits);
  p.dk = p.dv = {};
  EXPECT_EQ(plan::make_plan(p, hopper()).launches.size(), 2u);
  p.batch_invariant = true;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.m_splits, 1);
}

// dq of a query without keys must be written too, so that some CTA must visit its m_block.
TEST(BackwardPlan, OneNBlockStoresDqWhereItSeesEveryQuery) {
  const auto single_n_block = [](const auto& change) {
    Problem p = backward(dense({.seqlen_q = 100, .seqlen_k = 128}));
    change(p);
    return plan::make_plan(p, hopper()).backward.tile.single_n_block;
  };
  EXPECT_TRUE(single_n_block([](Problem&) {}));
  EXPECT_TRUE(single_n_block([](Problem& p) { p.window_right = 0; }));
  EXPECT_TRUE(
      single_n_block([](Problem& p) { p.window_right = 0, p.seqlen_q = p.total_q = 300, p.bottom_right = false; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.window_right = 0, p.seqlen_q = p.total_q = 300; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.window_right = 0, p.bottom_right = false, p.diagonal_offset = -80; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.window_right = -3; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.window_left = 3; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.seqlen_k = p.total_k = 129; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.head_dim = p.head_dim_v = 256; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.accumulate = true; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.dq.dtype = DType::f32; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.batch_invariant = true; }));
  EXPECT_FALSE(single_n_block([](Problem& p) { p.seqused_k.present = true; }));
}

TEST(BackwardPlan, NoConversionWithoutDq) {
  Problem p = backward(dense({.seqlen_q = 100, .seqlen_k = 300}));
  p.dq = {};
  EXPECT_EQ(plan::make_plan(p, hopper()).launches.size(), 2u);
}

// Each part of dbias that is no sum of other parts has a block. A call that needs only dbias launches no other kernel.
TEST(BackwardPlan, BiasGradient) {
  Problem p = backward(dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 300, .heads_q = 6, .heads_k = 3}));
  p.dq = p.dk = p.dv = {};
  p.bias.present = true;
  p.bias.dtype = DType::f32;
  const struct {
    int64_t shape[4];
    uint32_t blocks;
  } cases[] = {{{2, 6, 100, 300}, 2 * 6 * 2 * 3},
               {{1, 6, 100, 300}, 6 * 2 * 3},
               {{2, 1, 1, 300}, 2 * 3},
               {{1, 1, 100, 1}, 2},
               {{1, 1, 1, 1}, 1}};
  for (const auto& [shape, blocks] : cases) {
    std::ranges::copy(shape, p.bias.shape);
    p.dbias = p.bias;
    const plan::Plan plan = plan::make_plan(p, hopper());
    ASSERT_EQ(plan.launches.size(), 2u);
    ASSERT_EQ(plan.kernels.size(), 3u);
    EXPECT_EQ(std::set({plan.kernels[0].id, plan.kernels[1].id, plan.kernels[2].id}).size(), 3u);
    EXPECT_EQ(plan.launches[1].kernel, plan::kDbiasKernel);
    EXPECT_EQ(plan.launches[1].entry, plan::EntryId::dbias);
    EXPECT_EQ(plan.launches[1].grid, blocks);
    EXPECT_LE(plan.launches[1].shared_bytes, static_cast<uint32_t>(Sm90BackwardConfig::kMaxSmemBytes));
  }
}

// Captured tensors: one block for each block of keys of a head, and sums that begin as zeros.
TEST(BackwardPlan, CapturedGradients) {
  for (const gpu::Properties& device : {hopper(), blackwell()}) {
    for (const int64_t dim : {8, 64, 72, 128, 192, 256}) {
      Problem p = backward(
          modified(dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 300, .heads_q = 6, .heads_k = 3, .head_dim = dim}),
                   "score * score * t0", 1, 1000));
      const auto expect_last = [&](size_t launches) {
        const plan::Plan plan = plan::make_plan(p, device);
        const plan::BackwardSchedule& t = plan.backward;
        launches += t.tile.ds_gmem && t.m_splits > 1;  // separate kernels for dq and for the sums of dk and dv
        ASSERT_EQ(plan.launches.size(), launches);
        EXPECT_EQ(plan.launches[launches - 2].entry, plan::EntryId::captured);
        EXPECT_EQ(plan.launches[launches - 2].grid, static_cast<uint32_t>(2 * 6 * t.tile.ctas * t.n_blocks));
        EXPECT_LE(plan.launches[launches - 2].shared_bytes, static_cast<uint32_t>(Sm90BackwardConfig::kMaxSmemBytes));
        EXPECT_EQ(plan.launches[launches - 1].entry, plan::EntryId::postprocess_captured);
        EXPECT_EQ(plan.launches[launches - 1].grid, 4u);  // 256 elements each
        const plan::Configuration& configuration = plan.kernels[0].configuration;
        const auto name = [&](plan::EntryId id) { return plan::find_entry(configuration, plan::Unit::main, id).name; };
        EXPECT_STREQ(name(plan::EntryId::captured), "captured");
        EXPECT_STREQ(name(plan::EntryId::postprocess_captured), "postprocess_captured");
        EXPECT_EQ(plan.fills.back().bytes, 1000 * 13 * sizeof(uint64_t));
        EXPECT_EQ(plan.regions.back().offset, plan.fills.back().offset);
        EXPECT_EQ(plan.regions.back().first_writer, plan::kMemset);
      };
      expect_last(5);
      p.bias.present = true;
      p.bias.dtype = DType::f32;
      p.dbias = p.bias;
      expect_last(6);
      p.bias = p.dbias = {};
      p.seqlen_q = p.total_q = 0;  // with accumulation the old values, else zeros
      const plan::Plan plan = plan::make_plan(p, device);
      EXPECT_EQ(plan.launches.back().entry, plan::EntryId::postprocess_captured);
      EXPECT_EQ(plan.backward.captured_blocks, 0);
    }
  }
}

// If a tile reads one element, Hopper's main kernel sums the gradients of its scores, so that no kernel computes them
// again.
TEST(BackwardPlan, CapturedScores) {
  const auto captured_per_score = [](const Problem& p, const gpu::Properties& device) {
    const plan::Plan plan = plan::make_plan(p, device);
    const auto captured_launches = std::ranges::count_if(plan.launches, [](const plan::PlannedLaunch& launch) {
      return launch.kernel == 0 && launch.entry == plan::EntryId::captured;
    });
    EXPECT_EQ(captured_launches, plan.backward.tile.captured_per_score ? 0 : 1);
    EXPECT_EQ(plan.backward.captured_blocks == 0, plan.backward.tile.captured_per_score);
    EXPECT_EQ(plan::name_of(plan.kernels[0]).find("_captured_per_score") != std::string::npos,
              plan.backward.tile.captured_per_score);
    return plan.backward.tile.captured_per_score;
  };
  const auto problem = [](const char* text, int64_t dim) {
    return backward(
        modified(dense({.seqlen_q = 100, .seqlen_k = 300, .head_dim = dim, .head_dim_v = dim}), text, 1, 9));
  };
  for (const int64_t dim : {64, 128}) {
    EXPECT_TRUE(captured_per_score(problem("score * t0", dim), hopper()));
    EXPECT_FALSE(captured_per_score(problem("score * t0", dim), blackwell()));
    EXPECT_FALSE(captured_per_score(problem("score * score * t0", dim), hopper()));
    Problem values = problem("score * t0", dim);  // dv alone needs no dS
    values.dq = values.dk = {};
    EXPECT_FALSE(captured_per_score(values, hopper()));
  }
  EXPECT_FALSE(captured_per_score(problem("score * t0", 256), hopper()));
}

// Registers store dk and dv that are accumulated or float32. TMA stores the rest.
TEST(BackwardPlan, RegistersStoreOnlyWhatTmaCannot) {
  const Problem p = backward(dense({.seqlen_q = 100, .seqlen_k = 300}));
  EXPECT_FALSE(plan::make_plan(p, hopper()).backward.tile.for_hopper().store_from_registers);
  Problem added = p;
  added.accumulate = true;
  EXPECT_TRUE(plan::make_plan(added, hopper()).backward.tile.for_hopper().store_from_registers);
  Problem wide = p;
  wide.dq.dtype = DType::f32;
  EXPECT_FALSE(plan::make_plan(wide, hopper()).backward.tile.for_hopper().store_from_registers);
  wide.dv.dtype = DType::f32;
  EXPECT_TRUE(plan::make_plan(wide, hopper()).backward.tile.for_hopper().store_from_registers);
}

TEST(BackwardPlan, Empty) {
  // Without keys, dq is zeros. Without queries, dk and dv are zeros.
  const plan::Plan no_keys = plan::make_plan(backward(dense({.seqlen_q = 100, .seqlen_k = 0})), hopper());
  ASSERT_EQ(no_keys.launches.size(), 2u);
  EXPECT_EQ(no_keys.launches[1].entry, plan::EntryId::postprocess);
  const plan::Plan no_queries = plan::make_plan(backward(dense({.seqlen_q = 0, .seqlen_k = 100})), hopper());
  ASSERT_EQ(no_queries.launches.size(), 1u);
  EXPECT_EQ(no_queries.launches[0].entry, plan::EntryId::main);
  EXPECT_FALSE(no_queries.launches[0].overlap_previous);
  EXPECT_EQ(no_queries.fills.size(), 1u);
}

// Any size may be 0, with every kernel.
TEST(BackwardPlan, EverySizeMayBeZero) {
  for (const gpu::Properties& device : {hopper(), blackwell()})
    for (const auto& [head_dim, head_dim_v] : {std::pair{64, 64}, {128, 128}, {192, 128}, {128, 256}, {256, 256}})
      for (const int64_t length : {1, 255, 4096})
        for (const int bound : {0, 1, 2}) {
          for (int64_t Sizes::*const none : {&Sizes::batch, &Sizes::heads_q, &Sizes::seqlen_q, &Sizes::seqlen_k}) {
            Sizes without = {2, length, length, 6, 3, head_dim, head_dim_v};
            without.*none = 0;
            if (none == &Sizes::heads_q) without.heads_k = 0;
            SCOPED_TRACE(testing::Message()
                         << device.name << ": batch " << without.batch << ", heads " << without.heads_q << ", lengths "
                         << without.seqlen_q << " and " << without.seqlen_k << ", head_dim " << head_dim << " and "
                         << head_dim_v << ", bounds " << bound);
            Problem p = backward(dense(without));
            if (bound > 0) p.window_right = 0;
            if (bound > 1) p.window_left = 100;
            p.dsink = {.dtype = DType::f32, .head = 1, .present = true};
            const plan::Plan plan = plan::make_plan(p, device);
            EXPECT_EQ(plan.launches.empty(), none == &Sizes::heads_q);
          }
        }
}

}  // namespace
}  // namespace tandem::test
