// What a plan makes of a backward: which kernels are launched, and the memory between them.
#include "plan/backward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

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
  EXPECT_EQ(plan.launches[0].entry, plan::kPreprocessEntry);
  EXPECT_EQ(plan.launches[0].grid, 2u * 3 * 2);  // m_blocks of 64 queries
  EXPECT_FALSE(plan.launches[0].overlap_previous);
  EXPECT_EQ(plan.launches[1].kernel, 0);
  EXPECT_EQ(plan.launches[1].entry, plan::kMainEntry);
  EXPECT_EQ(plan.launches[1].grid, 2u * 3 * 3);  // n_blocks of 128 keys
  EXPECT_EQ(plan.launches[1].block, static_cast<uint32_t>(t.tile.threads));
  EXPECT_EQ(plan.launches[1].shared_bytes, static_cast<uint32_t>(t.tile.smem_bytes));
  EXPECT_EQ(plan.launches[2].kernel, plan::kPrepostKernel);
  EXPECT_EQ(plan.launches[2].entry, plan::kPostprocessEntry);
  EXPECT_EQ(plan.launches[2].grid, plan.launches[0].grid);

  // What may begin before main has ended would wait on multiprocessors that a limit leaves to others.
  Problem limited = p;
  limited.sm_limit = 100;
  EXPECT_TRUE(plan.launches[2].overlap_previous);
  EXPECT_FALSE(plan::make_plan(limited, hopper()).launches[2].overlap_previous);

  // Regions lie one behind the other within the workspace, each written by the launch before those that read it.
  size_t end = 0;
  for (const plan::Region& region : plan.regions) {
    EXPECT_GE(region.offset, end) << region.name;
    EXPECT_EQ(region.offset % 128, 0u) << region.name;
    end = region.offset + region.bytes;
  }
  EXPECT_LE(end + plan::kWorkspaceAlignment - 1, plan.workspace_bytes);
  EXPECT_EQ(plan.regions.back().first_writer, 1);
  // Float32 dq, 16 bytes a row, and what rounding up to whole tiles needs.
  const size_t rows = size_t{2} * 3 * 128;
  EXPECT_LE(plan.workspace_bytes, rows * (128 * sizeof(float) + 16) + 4 * 128 + plan::kWorkspaceAlignment);
}

// Few n_blocks have their steps split over a whole device, whatever part of it a call may take; parts of dk and dv are
// at most those of a device's blocks.
TEST(BackwardPlan, FewKeysSplitTheirQueries) {
  Problem p = backward(dense({.batch = 2, .seqlen_q = 4096, .seqlen_k = 77, .heads_q = 8, .heads_k = 8}));
  const plan::Plan plan = plan::make_plan(p, hopper());
  const plan::BackwardSchedule& t = plan.backward;
  EXPECT_EQ(t.m_splits, 8);
  EXPECT_EQ(t.tiles, 2 * 8 * 8);
  EXPECT_EQ(plan.launches[1].grid, 128u);
  // convert: 16 of a thread's 64 floats of dk, or of dv; of more than one n_block an m_block's dq, too.
  EXPECT_TRUE(t.tile.single_n_block);
  EXPECT_EQ(plan.launches[2].grid, 2u * 8 * (4 + 4));
  p.seqlen_k = 200;
  const plan::Plan two = plan::make_plan(p, hopper());
  EXPECT_FALSE(two.backward.tile.single_n_block);
  EXPECT_EQ(two.launches[2].grid, two.launches[0].grid + 2 * 2 * 8 * (4 + 4));
  p.seqlen_k = 77;
  EXPECT_EQ(plan.regions.back().bytes, size_t{2} * 8 * 8 * 128 * (128 + 128) * sizeof(float));
  p.sm_limit = 3;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.m_splits, 8);
  p.dk = p.dv = {};
  EXPECT_EQ(plan::make_plan(p, hopper()).launches.size(), 2u);
  p.batch_invariant = true;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.m_splits, 1);
}

// Queries that no key is visible to would be left as they are: no CTA goes over their m_block.
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

// Each part of dbias that is no sum of others has a block; whoever wants it alone gets nothing else.
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
    EXPECT_EQ(plan.launches[1].entry, plan::kDbiasEntry);
    EXPECT_EQ(plan.launches[1].grid, blocks);
    EXPECT_LE(plan.launches[1].shared_bytes, static_cast<uint32_t>(Sm90BackwardConfig::kMaxSmemBytes));
  }
}

// What a score_mod reads: a block for each of a head's blocks of keys, and sums that begin as zeros.
TEST(BackwardPlan, CapturedGradients) {
  for (const gpu::Properties& device : {hopper(), blackwell()}) {
    for (const int64_t dim : {8, 64, 72, 128, 192, 256}) {
      Problem p = backward(
          modified(dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 300, .heads_q = 6, .heads_k = 3, .head_dim = dim}),
                   "score * score * t0", 1, 1000));
      const auto expect_last = [&](size_t launches) {
        const plan::Plan plan = plan::make_plan(p, device);
        const plan::BackwardSchedule& t = plan.backward;
        launches += t.tile.ds_gmem;  // and that which makes dq
        ASSERT_EQ(plan.launches.size(), launches);
        EXPECT_EQ(plan.launches[launches - 2].entry, plan::kCapturedEntry);
        EXPECT_EQ(plan.launches[launches - 2].grid, static_cast<uint32_t>(2 * 6 * t.tile.ctas * t.n_blocks));
        EXPECT_LE(plan.launches[launches - 2].shared_bytes, static_cast<uint32_t>(Sm90BackwardConfig::kMaxSmemBytes));
        EXPECT_EQ(plan.launches[launches - 1].entry, plan::kCapturedEntry + 1);
        EXPECT_EQ(plan.launches[launches - 1].grid, 4u);  // of 256 elements each
        const auto entries = plan::entries_of(plan.kernels[0].configuration);
        EXPECT_STREQ(entries[plan::kCapturedEntry].name, "captured");
        EXPECT_STREQ(entries[plan::kCapturedEntry + size_t{1}].name, "postprocess_captured");
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
      p.seqlen_q = p.total_q = 0;  // zeros, or what was there
      const plan::Plan plan = plan::make_plan(p, device);
      EXPECT_EQ(plan.launches.back().entry, plan::kCapturedEntry + 1);
      EXPECT_EQ(plan.backward.captured_blocks, 0);
    }
  }
}

// Hopper's main kernel sums what scores add to an element that a tile reads alone: nothing makes them anew.
TEST(BackwardPlan, CapturedScores) {
  const auto captured_per_score = [](const Problem& p, const gpu::Properties& device) {
    const plan::Plan plan = plan::make_plan(p, device);
    const auto walks = std::ranges::count_if(plan.launches, [](const plan::PlannedLaunch& launch) {
      return launch.kernel == 0 && launch.entry == plan::kCapturedEntry;
    });
    EXPECT_EQ(walks, plan.backward.tile.captured_per_score ? 0 : 1);
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

// Gradients that need float32 sums or places of their own leave through registers.
TEST(BackwardPlan, DirectOnlyWhereItMust) {
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
  // No keys: dq is zeros. No queries: dk and dv are.
  const plan::Plan no_keys = plan::make_plan(backward(dense({.seqlen_q = 100, .seqlen_k = 0})), hopper());
  ASSERT_EQ(no_keys.launches.size(), 2u);
  EXPECT_EQ(no_keys.launches[1].entry, plan::kPostprocessEntry);
  const plan::Plan queryless = plan::make_plan(backward(dense({.seqlen_q = 0, .seqlen_k = 100})), hopper());
  ASSERT_EQ(queryless.launches.size(), 1u);
  EXPECT_EQ(queryless.launches[0].entry, plan::kMainEntry);
  EXPECT_FALSE(queryless.launches[0].overlap_previous);
  EXPECT_EQ(queryless.fills.size(), 1u);
}

// Whatever there is none of, by whichever kernel.
TEST(BackwardPlan, NothingOfEverything) {
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

// A quarter of dq is added where a warp has all queries.
TEST(BackwardPlan, FewQueries) {
  const auto of = [](int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, bool packed = false) {
    Problem p =
        backward(dense({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .head_dim = head_dim, .head_dim_v = head_dim}));
    p.cu_seqlens_q.present = packed;
    return plan::make_plan(p, hopper()).backward.tile.for_hopper();
  };
  EXPECT_TRUE(of(1, 4096, 128).short_q);
  EXPECT_EQ(of(1, 4096, 128).dq_floats(), 16 * 128);
  EXPECT_EQ(of(1, 4096, 128).postprocess_threads(), 64);
  EXPECT_TRUE(of(16, 4096, 64).short_q);
  EXPECT_TRUE(of(16, 4096, 64).staged());
  EXPECT_EQ(of(16, 4096, 64).tile_m, 64);
  EXPECT_FALSE(of(17, 4096, 128).short_q);
  EXPECT_EQ(of(17, 4096, 64).tile_m, 128);
  EXPECT_FALSE(of(1, 4096, 256).short_q);
  EXPECT_FALSE(of(1, 128, 128).short_q);         // one n_block: nothing is added
  EXPECT_FALSE(of(1, 4096, 128, true).short_q);  // rows may be more
  // n_blocks of a head follow each other, and do not wait: with 132 blocks at work 128 heads are taken together.
  const auto tiling_of = [](int64_t seqlen_q, int64_t heads_k) {
    Problem p = backward(dense({.batch = 16,
                                .seqlen_q = seqlen_q,
                                .seqlen_k = 4096,
                                .heads_q = 16,
                                .heads_k = heads_k,
                                .head_dim = 128,
                                .head_dim_v = 128}));
    p.window_right = 0;
    p.bottom_right = true;
    return plan::make_plan(p, hopper()).backward;
  };
  EXPECT_EQ(tiling_of(1, 16).l2_heads, 128);
  EXPECT_EQ(tiling_of(16, 16).l2_heads, 256);  // under a mask rather more
  EXPECT_FALSE(tiling_of(16, 16).tile.spt);
  EXPECT_EQ(tiling_of(1, 8).l2_heads, 64);  // two steps each
  EXPECT_TRUE(tiling_of(17, 16).tile.spt);
}

TEST(BackwardPlan, TilesOfEveryHeadDimFit) {
  for (int64_t dim = 8; dim <= 256; dim += 8) {
    for (int64_t dim_v = 8; dim_v <= 256; dim_v += 8) {
      const Problem p = backward(dense({.seqlen_q = 100, .seqlen_k = 100, .head_dim = dim, .head_dim_v = dim_v}));
      const Sm90BackwardConfig t = plan::make_plan(p, hopper()).backward.tile.for_hopper();
      EXPECT_TRUE(t.fits()) << dim << " " << dim_v;
      EXPECT_LE(t.dbias_smem_bytes(), Sm90BackwardConfig::kMaxSmemBytes) << dim << " " << dim_v;
      EXPECT_GE(t.head_dim, dim);
      EXPECT_GE(t.head_dim_v, dim_v);
      EXPECT_EQ(t.registers(), t.warpgroup_roles() ? 160 : t.ds_gmem() ? 232 : 240);
    }
  }
}

TEST(BackwardPlan, TilesOfBlackwellFit) {
  for (int64_t dim = 8; dim <= 256; dim += 8) {
    for (int64_t dim_v = 8; dim_v <= 256; dim_v += 8) {
      const Problem p = backward(dense({.seqlen_q = 100, .seqlen_k = 300, .head_dim = dim, .head_dim_v = dim_v}));
      const plan::Plan plan = plan::make_plan(p, blackwell());
      const Sm100BackwardConfig t = plan.backward.tile.for_blackwell();
      EXPECT_TRUE(t.fits()) << dim << " " << dim_v;
      EXPECT_GE(t.head_dim, dim);
      EXPECT_GE(t.head_dim_v, dim_v);
      EXPECT_LT(t.head_dim, dim + (t.two_cta ? 64 : t.two_pass() ? 64 : 16));
      // Of heads of 80 and 96 one CTA moves less.
      const bool narrow = dim <= 128 && dim_v <= 128, more = 8 * ((dim + 15) / 16) + 3 * ((dim_v + 15) / 16) > 68;
      EXPECT_EQ(t.two_cta, narrow && dim > 64 && dim_v > 64 && more) << dim << " " << dim_v;
      EXPECT_FALSE(t.two_pass() && (narrow || (dim <= 64 && dim_v <= 192)));
      EXPECT_TRUE(t.two_pass() || t.head_dim + t.head_dim_v <= 256);
      EXPECT_EQ(plan.launches[0].grid, 1u);  // m_blocks of 128 queries
      if (t.two_cta) {
        EXPECT_EQ(plan.launches[1].grid, 4u);  // two n_blocks of 256 keys
        EXPECT_EQ(plan.launches[2].block, 256u);
        continue;
      }
      if (t.two_pass()) {
        EXPECT_TRUE(t.for_dv().fits());
        EXPECT_EQ(plan.launches[1].grid, 6u);  // three n_blocks, of dk and of dv
        EXPECT_EQ(plan.launches[2].block, dim > 128 ? 256u : 128u);
        continue;
      }
      EXPECT_GE(t.q_stages, 2);
      EXPECT_GE(t.dq_stages, 2);
      EXPECT_EQ(plan.launches[1].grid, 3u);  // n_blocks of 128 keys
      EXPECT_EQ(plan.launches[2].block, 128u);
    }
  }
}

// Two CTAs multiply together where that is less work for the last CTA: not with few keys, not where the second half of
// their keys is often nobody's, and never by a limit of multiprocessors.
TEST(BackwardPlan, PairsOfBlackwell) {
  const auto pairs = [](Problem p) {
    p = backward(p);
    const bool pair = plan::make_plan(p, blackwell()).backward.tile.for_blackwell().two_cta;
    p.sm_limit = 3;
    EXPECT_EQ(plan::make_plan(p, blackwell()).backward.tile.for_blackwell().two_cta, pair);
    return pair;
  };
  const auto dense128 = [](int64_t q, int64_t k, int64_t heads) {
    return dense(
        {.seqlen_q = q, .seqlen_k = k, .heads_q = heads, .heads_k = heads, .head_dim = 128, .head_dim_v = 128});
  };
  EXPECT_FALSE(pairs(dense128(100, 128, 1)));
  EXPECT_TRUE(pairs(dense128(100, 129, 1)));
  EXPECT_TRUE(pairs(dense128(8192, 8192, 16)));
  EXPECT_FALSE(pairs(dense128(8192, 300, 1024)));
  // Not where the answer may be that of other sequences.
  for (Problem invariant : {dense128(8192, 8192, 16), packed({.seqlen_q = 8192, .seqlen_k = 8192}, 9000, 9000)}) {
    EXPECT_TRUE(pairs(invariant));
    invariant.batch_invariant = true;
    EXPECT_FALSE(pairs(invariant));
  }
  Problem causal = dense128(300, 300, 1);
  causal.window_right = 0;
  EXPECT_FALSE(pairs(causal));
  causal = dense128(8192, 8192, 16);
  causal.window_right = 0;
  EXPECT_TRUE(pairs(causal));
}

// Two CTAs with keys of their own exchange dS where head_dim is over 128 and the device alone knows lengths: not with
// the keys of one, but always where a sequence's bits may not depend on others.
TEST(BackwardPlan, PairsOfHopper) {
  Problem p = backward(dense({.seqlen_q = 300, .seqlen_k = 300, .heads_q = 60, .heads_k = 60, .head_dim = 256}));
  EXPECT_FALSE(plan::make_plan(p, hopper()).backward.tile.for_hopper().cluster2());
  p.seqused_k.present = true;
  const plan::Plan plan = plan::make_plan(p, hopper());
  const Sm90BackwardConfig t = plan.backward.tile.for_hopper();
  EXPECT_TRUE(t.cluster2());
  EXPECT_EQ(t.tile_n(), 128);
  EXPECT_EQ(plan.backward.n_blocks, 3);
  EXPECT_EQ(plan.launches[1].grid, 132u);
  EXPECT_EQ(plan.launches[2].block, 512u);  // four parts of dq
  p.sm_limit = 1;
  EXPECT_EQ(plan::make_plan(p, hopper()).launches[1].grid, 2u);
  Problem few = backward(dense({.seqlen_q = 300, .seqlen_k = 64, .heads_q = 60, .heads_k = 60, .head_dim = 256}));
  EXPECT_FALSE(plan::make_plan(few, hopper()).backward.tile.for_hopper().cluster2());
  few.batch_invariant = true;
  EXPECT_TRUE(plan::make_plan(few, hopper()).backward.tile.for_hopper().cluster2());
  const Problem narrow = backward(dense({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 128, .head_dim_v = 256}));
  EXPECT_FALSE(plan::make_plan(narrow, hopper()).backward.tile.for_hopper().cluster2());
}

// dS of wide heads goes to memory in strips: whole heads, or without a bound n_blocks of one, a few hundred tiles; and
// it takes at most half more than float32 gradients would.
TEST(BackwardPlan, Strips) {
  const auto of = [](const Problem& p) { return plan::make_plan(p, hopper()); };
  const auto wide = [](int64_t batch, int64_t seqlen, int64_t heads_q, int64_t heads_k) {
    return backward(dense({.batch = batch,
                           .seqlen_q = seqlen,
                           .seqlen_k = seqlen,
                           .heads_q = heads_q,
                           .heads_k = heads_k,
                           .head_dim = 256,
                           .head_dim_v = 256}));
  };
  const auto bytes_of = [](const plan::Plan& plan, const char* name) -> size_t {
    for (const plan::Region& region : plan.regions) {
      if (std::string_view(region.name) == name) return region.bytes;
    }
    return 0;
  };
  const plan::Plan small = of(wide(4, 4096, 8, 8));
  EXPECT_TRUE(small.backward.tile.for_hopper().ds_gmem());
  EXPECT_FALSE(small.backward.tile.for_hopper().cluster2());
  EXPECT_EQ(small.backward.chunk_heads, 8);  // 64 n_blocks each
  EXPECT_EQ(small.backward.ds_chunks, 4);
  EXPECT_EQ(small.repeat.times, 4);
  ASSERT_EQ(small.launches.size(), 3u);
  EXPECT_EQ(small.repeat.begin, 1u);
  EXPECT_EQ(small.repeat.end, 3u);
  EXPECT_EQ(small.launches[1].grid, 132u);
  EXPECT_EQ(small.launches[2].entry, plan::dq_entry(small.backward.tile.for_hopper()));
  EXPECT_EQ(small.launches[2].grid, 8u * 32);
  EXPECT_EQ(bytes_of(small, "workspace.dq_accum"), 0u);
  // 16k: a head of 256 n_blocks, whose dq is two sums; under a causal mask two m_blocks share a row of the strip.
  Problem p = wide(1, 16384, 8, 8);
  EXPECT_EQ(of(p).backward.chunk_heads, 1);
  EXPECT_EQ(of(p).launches[2].grid, 128u * 2);
  EXPECT_EQ(bytes_of(of(p), "workspace.dq_accum"), size_t{4} * 8 * 16384 * 256);
  p.window_right = 0;
  EXPECT_EQ(of(p).backward.chunk_heads, 2);
  EXPECT_TRUE(of(p).backward.pack_triangle);
  EXPECT_EQ(of(p).backward.ds_row_stride, 258);
  // A head that does not fit is cut where tiles are of one length.
  p = wide(1, 32768, 4, 4);
  EXPECT_EQ(of(p).backward.chunk_n_blocks, 128);
  EXPECT_EQ(of(p).backward.ds_chunks, 4 * 4);
  EXPECT_LE(bytes_of(of(p), "workspace.ds"), size_t{6} * 4 * 32768 * 256 * 3);
  p.window_right = 0;
  EXPECT_FALSE(of(p).backward.tile.ds_gmem);
  EXPECT_TRUE(of(p).backward.tile.for_hopper().cluster2());
  p.window_left = 1000;  // rows of few n_blocks
  EXPECT_TRUE(of(p).backward.tile.ds_gmem);
  EXPECT_EQ(of(p).backward.ds_row_stride, 18);
  // Query heads of a group one by one, dk and dv added in their order.
  p = wide(1, 4096, 16, 2);
  EXPECT_TRUE(of(p).backward.tile.for_hopper().split_q_heads);
  EXPECT_EQ(of(p).backward.tiles, 16 * 64);
  // Under a causal mask two to a tile, where there are tiles enough, a strip has room for them, and they are short.
  p = wide(1, 4096, 32, 2);
  p.window_right = 0;
  EXPECT_EQ(of(p).backward.chunk_heads, 8);
  EXPECT_EQ(of(p).backward.m_splits, 8);
  EXPECT_EQ(of(p).backward.tiles, 16 * 64);
  p.dq = {};
  EXPECT_EQ(of(p).backward.m_splits, 8);  // dk and dv have the same bits
  EXPECT_EQ(of(p).backward.grid, 132);
  const auto of_tile = [&](int64_t seqlen, int64_t heads_q, int64_t heads_k, int64_t left) {
    Problem causal = wide(1, seqlen, heads_q, heads_k);
    causal.window_right = 0, causal.window_left = left;
    const plan::BackwardSchedule& t = of(causal).backward;
    EXPECT_TRUE(t.tile.for_hopper().split_q_heads);
    EXPECT_EQ(t.chunk_heads % (causal.group() / t.m_splits), 0);
    return causal.group() / t.m_splits;
  };
  constexpr int64_t kNoBound = TANDEM_UNBOUNDED;
  EXPECT_EQ(of_tile(4096, 32, 2, kNoBound), 2);
  EXPECT_EQ(of_tile(2560, 32, 2, kNoBound), 2);  // 13 heads would be half a thousand tiles: 14
  EXPECT_EQ(of_tile(4096, 32, 2, 1000), 1);
  EXPECT_EQ(of_tile(4096, 6, 2, kNoBound), 1);
  EXPECT_EQ(of_tile(1024, 8, 2, kNoBound), 1);
  EXPECT_EQ(of_tile(16384, 32, 2, kNoBound), 1);
  // Nobody wants dq: one strip of all, and nothing in memory.
  EXPECT_EQ(of(p).repeat.times, 1);
  EXPECT_EQ(bytes_of(of(p), "workspace.ds"), 0u);
  p = wide(1, 4096, 2, 2);
  p.batch_invariant = true;
  EXPECT_FALSE(of(p).backward.tile.ds_gmem);
  EXPECT_FALSE(of(wide(1, 64, 2, 2)).backward.tile.ds_gmem);  // one n_block
}

// Under a causal mask n_blocks are taken from the last to the first: of all heads but those that are worked on last,
// never by a limit of multiprocessors. Not where the L2 cache does not hold what they are spread over.
TEST(BackwardPlan, FromTheDiagonal) {
  const auto schedule = [](const Problem& p) { return plan::make_plan(backward(p), hopper()).backward; };
  const auto causal = [](int64_t seqlen, int64_t heads_q, int64_t heads_k) {
    Problem p = dense({.seqlen_q = seqlen,
                       .seqlen_k = seqlen,
                       .heads_q = heads_q,
                       .heads_k = heads_k,
                       .head_dim = 64,
                       .head_dim_v = 64});
    p.window_right = 0;
    return p;
  };
  Problem p = causal(4096, 128, 128);
  EXPECT_TRUE(schedule(p).tile.for_hopper().spt);
  EXPECT_EQ(schedule(p).spt_heads, 120);  // 8 heads have 528 steps each, and 132 multiprocessors 32 of them
  p.sm_limit = 3;
  EXPECT_EQ(schedule(p).spt_heads, 120);
  p.batch_invariant = true;
  EXPECT_EQ(schedule(p).spt_heads, 128);
  const auto begins = [&schedule](const Problem& of) { return schedule(of).tile.for_hopper().spt; };
  EXPECT_FALSE(begins(causal(2048, 128, 64)));
  EXPECT_TRUE(begins(causal(4096, 128, 64)));
  EXPECT_TRUE(begins(causal(65536, 4, 4)));
  EXPECT_FALSE(begins(causal(131072, 4, 4)));
  EXPECT_FALSE(begins(causal(1000, 4, 4)));  // its steps are split
  Problem window = causal(4096, 128, 128);
  window.window_left = 100;
  EXPECT_FALSE(begins(window));
  // Whatever the lengths, where that was asked for: one query sees all keys.
  Problem one = causal(300, 4, 4);
  one.batch_invariant = true;
  EXPECT_TRUE(begins(one));
  one = dense({.seqlen_q = 1, .seqlen_k = 300, .head_dim = 64});
  one.window_right = 0;
  one.batch_invariant = true;
  EXPECT_TRUE(begins(one));
}

// On Blackwell query heads that share keys are taken together; all of theirs must fit the cache.
TEST(BackwardPlan, FromTheDiagonalOnBlackwell) {
  const auto causal = [](int64_t seqlen, int64_t heads_q, int64_t heads_k, int64_t head_dim) {
    Problem p = dense({.seqlen_q = seqlen,
                       .seqlen_k = seqlen,
                       .heads_q = heads_q,
                       .heads_k = heads_k,
                       .head_dim = head_dim,
                       .head_dim_v = head_dim});
    p.window_right = 0;
    return backward(p);
  };
  const auto schedule = [](const Problem& p) { return plan::make_plan(p, blackwell()).backward; };
  Problem p = causal(4096, 128, 128, 64);
  EXPECT_TRUE(schedule(p).tile.spt);
  EXPECT_EQ(schedule(p).spt_heads, 128 - 9);  // 296 tiles of 33 a head
  p.sm_limit = 3;
  EXPECT_EQ(schedule(p).spt_heads, 128 - 9);
  p.batch_invariant = true;
  EXPECT_EQ(schedule(p).spt_heads, 128);
  p = causal(4096, 64, 64, 128);
  EXPECT_TRUE(schedule(p).tile.ctas == 2 && schedule(p).tile.spt);
  EXPECT_EQ(schedule(p).spt_heads, 64 - 9);  // 148 of 17
  EXPECT_TRUE(schedule(causal(4096, 64, 8, 128)).tile.spt);
  EXPECT_FALSE(schedule(causal(8192, 64, 8, 128)).tile.spt);
  EXPECT_TRUE(schedule(causal(8192, 64, 64, 256)).tile.spt);
  EXPECT_FALSE(schedule(causal(65536, 4, 4, 128)).tile.spt);
  p = causal(4096, 64, 64, 128);
  p.window_left = 100;
  EXPECT_FALSE(schedule(p).tile.spt);
  p = causal(300, 8, 2, 64);
  p.batch_invariant = true;
  EXPECT_FALSE(schedule(p).tile.spt);
}

// Grouped query heads are taken one by one then: workspace has dk and dv of a key head once.
TEST(BackwardPlan, FromTheDiagonalByHead) {
  Problem p = dense({.seqlen_q = 4096, .seqlen_k = 4096, .heads_q = 64, .heads_k = 8, .head_dim = 128});
  p.head_dim_v = 128;
  p.window_right = 0;
  const plan::BackwardSchedule t = plan::make_plan(backward(p), hopper()).backward;
  EXPECT_TRUE(t.tile.for_hopper().split_q_heads && t.tile.for_hopper().m_split);
  EXPECT_EQ(t.m_splits, 8);
  EXPECT_EQ(t.tiles, 32 * 64);
  EXPECT_EQ(t.spt_heads, 64 - 8);
  EXPECT_EQ(t.dkv_semaphore_count, 32 * 8 * 4);
  p.batch_invariant = true;
  EXPECT_FALSE(plan::make_plan(backward(p), hopper()).backward.tile.for_hopper().spt);
}

// Two query heads in one tile of a group of two: the tile stores dk and dv, and no sums of them are in the workspace.
TEST(BackwardPlan, ATileOfAWholeGroupStoresDkAndDv) {
  struct {
    int64_t batch, seqlen_q, seqlen_k, heads_q, heads_k;
  } const shapes[] = {{16, 768, 768, 6, 3}, {30, 128, 384, 32, 16}};
  for (const auto& s : shapes) {
    Problem p = dense({s.batch, s.seqlen_q, s.seqlen_k, s.heads_q, s.heads_k, 256});
    p.head_dim_v = 256;
    p.window_right = 0;
    const plan::Plan plan = plan::make_plan(backward(p), hopper());
    const Sm90BackwardConfig& config = plan.backward.tile.for_hopper();
    EXPECT_TRUE(config.ds_gmem() && config.split_q_heads);
    EXPECT_GT(plan.backward.ds_chunks, 1);
    EXPECT_EQ(plan.backward.m_splits, 1);
    EXPECT_FALSE(config.m_split);
    for (const plan::Region& region : plan.regions) EXPECT_STRNE(region.name, "workspace.dkv_accum");
  }
}

// Up to 320 columns of dk and dv warpgroups have keys of their own, where dS may go to memory.
TEST(BackwardPlan, HalvesOfHopper) {
  const auto config = [](const Problem& p) { return plan::make_plan(p, hopper()).backward.tile.for_hopper(); };
  const auto of = [](int64_t head_dim, int64_t head_dim_v) {
    return backward(dense({.seqlen_q = 300, .seqlen_k = 300, .head_dim = head_dim, .head_dim_v = head_dim_v}));
  };
  Problem p = of(136, 72);
  const Sm90BackwardConfig t = config(p);
  EXPECT_TRUE(t.q_subtiles() && t.ds_gmem() && !t.cluster2() && !t.shared_p() && t.fits());
  EXPECT_EQ(t.head_dim, 192);
  EXPECT_EQ(t.head_dim_v, 128);
  EXPECT_EQ(t.tile_n(), 128);
  EXPECT_EQ(t.score_queries(), 32);
  EXPECT_EQ(t.q_stages, 3);
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.tile.k_box, 64);
  // 32k: a head is 256 n_blocks, three quarters of which would fit, so half of them; under a causal mask one and the
  // last n_blocks' share of a row.
  p = backward(dense({.seqlen_q = 32768, .seqlen_k = 32768, .heads_q = 16, .heads_k = 16, .head_dim = 192}));
  p.head_dim_v = 128;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.chunk_n_blocks, 128);
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.ds_chunks, 32);
  p.window_right = 0;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.ds_row_stride, 258);
  // 11 of 16 heads of 4k fit, so there are two strips of 8.
  p.seqlen_q = p.seqlen_k = p.total_q = p.total_k = 4096;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.chunk_heads, 8);
  p = of(136, 72);
  for (const auto& [head_dim, head_dim_v] : {std::pair(256, 64), {64, 256}, {128, 192}, {8, 136}})
    EXPECT_TRUE(config(of(head_dim, head_dim_v)).q_subtiles());
  for (const auto& [head_dim, head_dim_v] : {std::pair(192, 192), {200, 72}, {128, 128}, {256, 256}})
    EXPECT_FALSE(config(of(head_dim, head_dim_v)).q_subtiles());
  p.softcap = 5;
  EXPECT_TRUE(config(p).q_subtiles());
  p.bias.present = true;
  p.bias.dtype = DType::f32;
  EXPECT_FALSE(config(p).q_subtiles());
  EXPECT_TRUE(config(p).ds_gmem());
  Problem dropped = of(136, 72);
  dropped.dropout.p = 0.5;
  EXPECT_FALSE(config(dropped).q_subtiles());
  EXPECT_FALSE(config(modified(of(136, 72), "score * 2", 0, 0)).q_subtiles());
  EXPECT_FALSE(config(backward(dense({.seqlen_q = 300, .seqlen_k = 128, .head_dim = 192}))).q_subtiles());  // one n_block
}

// Where it may not, a warpgroup makes scores for two that sum, if registers are left for them: not where scores are
// changed.
TEST(BackwardPlan, RolesOfHopper) {
  const auto config = [](const Problem& p) { return plan::make_plan(p, hopper()).backward.tile.for_hopper(); };
  Problem p = backward(dense({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 136, .head_dim_v = 72}));
  p.batch_invariant = true;
  const Sm90BackwardConfig t = config(p);
  EXPECT_TRUE(t.warpgroup_roles() && t.cluster2() && t.fits());
  EXPECT_EQ(t.threads(), 512);
  EXPECT_EQ(t.head_dim, 192);
  EXPECT_EQ(t.head_dim_v, 128);
  EXPECT_EQ(t.tile_n(), 128);
  EXPECT_EQ(plan::make_plan(p, hopper()).launches[2].block, 256u);  // two parts of dq
  const Problem wider = backward(dense({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 192, .head_dim_v = 200}));
  EXPECT_FALSE(config(wider).warpgroup_roles());
  p.softcap = 5;
  EXPECT_FALSE(config(p).warpgroup_roles());
  EXPECT_TRUE(config(p).cluster2());
}

// Under a causal mask n_blocks of grouped heads are long and of unequal lengths: where they are few, parts of the heads
// go to CTAs of their own. Never by a limit of multiprocessors, nor where other sequences might change the bits.
TEST(BackwardPlan, GroupedHeadsAreSplit) {
  const auto m_splits = [](int64_t seqlen, int64_t heads, int64_t heads_k, bool causal, int64_t left = -1) {
    Problem p = backward(dense({.seqlen_q = seqlen, .seqlen_k = seqlen, .heads_q = heads, .heads_k = heads_k}));
    if (causal) p.window_right = 0;
    if (left >= 0) p.window_left = left;
    const int found = plan::make_plan(p, hopper()).backward.m_splits;
    p.sm_limit = 5;
    EXPECT_EQ(plan::make_plan(p, hopper()).backward.m_splits, found);
    p.batch_invariant = true;
    EXPECT_EQ(plan::make_plan(p, hopper()).backward.m_splits, 1);
    return found;
  };
  EXPECT_EQ(m_splits(2048, 64, 8, true), 4);   // 128 tiles
  EXPECT_EQ(m_splits(2048, 64, 8, false), 1);  // all of one length
  EXPECT_EQ(m_splits(2048, 64, 8, true, 256), 1);
  EXPECT_EQ(m_splits(8192, 64, 8, true), 8);  // head by head, in an order
  EXPECT_EQ(m_splits(2048, 24, 8, true), 3);  // the whole group
  EXPECT_EQ(m_splits(2048, 8, 8, true), 1);   // no group
}

}  // namespace
}  // namespace tandem::test
