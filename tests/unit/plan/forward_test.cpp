// The choices of a forward plan, and its bounds against a count.
#include "plan/forward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <set>
#include <tuple>

#include "config/forward.h"
#include "plan/sm100/tuning.h"
#include "plan/sm90/tuning.h"
#include "support/random.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

using plan::ForwardSchedule;

ForwardSchedule plan_of(const Problem& p, const gpu::Properties& device = hopper()) {
  return plan::make_plan(p, device).forward;
}
size_t workspace_of(const Problem& p, const gpu::Properties& device = hopper()) {
  return plan::make_plan(p, device).workspace_bytes;
}
Sm100ForwardConfig blackwell_tile_of(const Problem& p, const gpu::Properties& device = blackwell()) {
  return plan_of(p, device).tile.for_blackwell();
}

// A row of the table matches a problem by size, mask and scores. The rows themselves are tuned.
TEST(TuningTable, RowsMatchTheirSizes) {
  const auto matches = [](const plan::Sm90TuningRow& c, int dim, int dim_v, int64_t rows, int64_t keys) {
    return c.matches({dim, dim_v, rows, keys, false, false, plan::Scores::plain});
  };
  const plan::Sm90TuningRow sizes{128, 64, 10, 20, plan::Mask::any, plan::Scores::any, 2, 64, 2, true};
  EXPECT_TRUE(matches(sizes, 128, 64, 10, 20));
  EXPECT_FALSE(matches(sizes, 144, 64, 10, 20));
  EXPECT_FALSE(matches(sizes, 128, 80, 10, 20));
  EXPECT_FALSE(matches(sizes, 128, 64, 9, 20));
  EXPECT_FALSE(matches(sizes, 128, 64, 10, 19));
  const auto with = [&](plan::Mask mask, bool left, bool right) {
    plan::Sm90TuningRow row_of_table = sizes;
    row_of_table.mask = mask;
    return row_of_table.matches({64, 64, 100, 100, left, right, plan::Scores::plain});
  };
  for (const bool left : {false, true}) {
    for (const bool right : {false, true}) {
      EXPECT_TRUE(with(plan::Mask::any, left, right));
      EXPECT_EQ(with(plan::Mask::full, left, right), !left && !right);
      EXPECT_EQ(with(plan::Mask::bounded, left, right), left || right);
      EXPECT_EQ(with(plan::Mask::left, left, right), left);
    }
  }
  plan::Sm90TuningRow plain = sizes;
  plain.scores = plan::Scores::plain;
  EXPECT_TRUE(plain.matches({64, 64, 100, 100, false, false, plan::Scores::plain}));
  EXPECT_FALSE(plain.matches({64, 64, 100, 100, false, false, plan::Scores::light}));
}

// The plan uses the first matching row, and every problem has one. Another tile of plain scores must be faster by the
// predicted time.
TEST(ForwardPlan, FirstMatchingRow) {
  for (const int64_t dim : {8, 40, 64, 72, 128, 160, 192, 200, 256}) {
    for (const int64_t dim_v : {8, 64, 128, 256}) {
      for (const int64_t seqlen : {1, 100, 192, 1000, 3000, 8192, 20000}) {
        for (int options = 0; options < 8; ++options) {
          Problem p = dense({.seqlen_q = seqlen, .seqlen_k = seqlen, .head_dim = dim, .head_dim_v = dim_v});
          if (options & 1) p.window_right = 0;
          if (options & 2) p.window_left = 10;
          if (options & 4) p.softcap = 30;
          const Sm90ForwardConfig t = plan_of(p).tile.for_hopper();
          EXPECT_EQ(t.head_dim, (dim + 15) / 16 * 16);
          EXPECT_EQ(t.head_dim_v, (dim_v + 15) / 16 * 16);
          const auto* entry = std::find_if(
              std::begin(plan::kSm90TuningRows), std::end(plan::kSm90TuningRows), [&](const plan::Sm90TuningRow& c) {
                const bool plain =
                    (options & 4) == 0 || t.head_dim > 64 || !t.options.bounded_left;  // a softcap takes few registers
                return c.matches({t.head_dim, t.head_dim_v, seqlen, seqlen, t.options.bounded_left,
                                  t.options.bounded_right,
                                  !plain          ? plan::Scores::any
                                  : (options & 4) ? plan::Scores::capped
                                                  : plan::Scores::plain});
              });
          ASSERT_NE(entry, std::end(plan::kSm90TuningRows)) << plan::name_of(t);
          EXPECT_EQ(t.pingpong, entry->pingpong);
          const bool is_other = std::any_of(
              std::begin(plan::kSm90OtherTiles), std::end(plan::kSm90OtherTiles), [&](const plan::Sm90OtherTile& o) {
                return std::tie(t.warpgroups, t.tile_n, t.stages) == std::tie(o.warpgroups, o.tile_n, o.stages);
              });
          if (is_other && !t.options.bounded_left && (options & 4) == 0) continue;
          EXPECT_EQ(t.warpgroups, entry->warpgroups);
          EXPECT_EQ(t.tile_n, entry->tile_n);
          EXPECT_EQ(t.stages, entry->stages);
        }
      }
    }
  }
}

// One query of 128 heads has short n_blocks, unless a batch_invariant call may have more queries.
TEST(ForwardPlan, TileOfOneQuery) {
  const auto tile_n = [](int64_t seqlen_q, int64_t heads_q, bool batch_invariant) {
    Problem p = dense({.seqlen_q = seqlen_q, .seqlen_k = 32768, .heads_q = heads_q});
    p.batch_invariant = batch_invariant;
    return plan_of(p).tile.tile_n;
  };
  EXPECT_EQ(tile_n(1, 128, false), 64);
  EXPECT_EQ(tile_n(1, 256, false), 64);
  EXPECT_EQ(tile_n(2, 128, false), 128);
  EXPECT_EQ(tile_n(1, 64, false), 128);
  EXPECT_EQ(tile_n(1, 128, true), 128);
}

// Every head_dim has a tile that fits, with every option.
TEST(ForwardPlan, EveryTileFits) {
  for (int64_t d = 8; d <= 256; d += 8) {
    for (int64_t dv = 8; dv <= 256; dv += 8) {
      for (const int64_t seqlen : {1, 130, 1000, 10000}) {
        const Problem p = dense({.seqlen_q = seqlen, .seqlen_k = seqlen, .head_dim = d, .head_dim_v = dv});
        for (const Problem& each : {p, causal(p)}) {
          const Sm90ForwardConfig t = plan_of(each).tile.for_hopper();
          EXPECT_TRUE(plan::fits(t)) << plan::name_of(t);
          EXPECT_GE(t.head_dim, d);
          EXPECT_GE(t.head_dim_v, dv);
        }
      }
    }
  }
}

TEST(ForwardPlan, EveryBlackwellTileFits) {
  for (int64_t d = 8; d <= 256; d += 8) {
    for (int64_t dv = 8; dv <= 256; dv += 8) {
      for (const int64_t seqlen : {9, 1024}) {
        const Problem p = dense({.seqlen_q = seqlen, .seqlen_k = seqlen, .head_dim = d, .head_dim_v = dv});
        const Sm100ForwardConfig t = blackwell_tile_of(p);
        EXPECT_TRUE(t.fits()) << plan::name_of(t);
        EXPECT_EQ(t.head_dim, (d + 15) / 16 * 16);
        EXPECT_EQ(t.head_dim_v, (dv + 15) / 16 * 16);
      }
    }
  }
}

// Two CTAs share an MMA without a mask if their tiles are full. Two CTAs always share an MMA of wide heads.
TEST(ForwardPlan, PairsOfBlackwell) {
  const auto two_cta = [](const Sizes& sizes, bool is_causal = false) {
    const Problem p = dense(sizes);
    return blackwell_tile_of(is_causal ? causal(p) : p).two_cta;
  };
  EXPECT_TRUE(two_cta({.seqlen_q = 4096, .seqlen_k = 4096}));
  EXPECT_TRUE(two_cta({.seqlen_q = 400, .seqlen_k = 4096, .head_dim = 192}));
  EXPECT_FALSE(two_cta({.seqlen_q = 4096, .seqlen_k = 4096}, true));
  EXPECT_FALSE(two_cta({.seqlen_q = 4096, .seqlen_k = 4096, .head_dim = 64, .head_dim_v = 64}));
  EXPECT_FALSE(two_cta({.seqlen_q = 256, .seqlen_k = 4096}));  // one tile of one CTA
  EXPECT_FALSE(two_cta({.seqlen_q = 700, .seqlen_k = 4096}));  // three
  EXPECT_TRUE(two_cta({.seqlen_q = 1, .seqlen_k = 4096, .head_dim = 256, .head_dim_v = 256}, true));
  const Problem causal_256 =
      causal(dense({.batch = 100, .seqlen_q = 512, .seqlen_k = 512, .head_dim = 256, .head_dim_v = 256}));
  const ForwardSchedule unequal = plan_of(causal_256, blackwell());
  EXPECT_TRUE(unequal.tile.clc());
  EXPECT_EQ(unequal.tiles, 200);
  EXPECT_EQ(unequal.grid, 400);  // all tiles: running CTAs take over later tiles
  EXPECT_EQ(workspace_of(causal_256, blackwell()), 0u);
  const ForwardSchedule plan = plan_of(dense({.batch = 100, .seqlen_q = 512, .seqlen_k = 64}), blackwell());
  EXPECT_FALSE(plan.tile.clc());
  EXPECT_EQ(plan.tile.tile_m(), 512);
  EXPECT_EQ(plan.tiles, 100);
  EXPECT_EQ(plan.grid, 148);
  EXPECT_FALSE(plan.dynamic_scheduler);
}

// A short expression leaves registers for larger tiles than a long one.
TEST(ForwardPlan, TilesOfExpressions) {
  const auto elements_of_tile = [](const std::string& text, bool blocks) {
    Problem p = dense({.seqlen_q = 1000, .seqlen_k = 1000});
    p.head_dim = p.head_dim_v = 128;
    if (blocks) p = with_blocks(p, 128, 128);
    const Sm90ForwardConfig t = plan_of(modified(p, text, 1, 0)).tile.for_hopper();
    EXPECT_TRUE(plan::fits(t)) << text;
    EXPECT_TRUE(!blocks || 128 % t.tile_n == 0) << text;
    return t.tile_m() * t.tile_n;
  };
  std::string longer = "x = score";
  for (int n = 0; n < 30; ++n) longer += "; x = x * 1.5 + (k ^ " + std::to_string(n) + ")";
  longer += "; x";
  for (const bool blocks : {false, true})
    EXPECT_GT(elements_of_tile("score - abs(q - k)", blocks), elements_of_tile(longer, blocks));
}

// Kernels before the main one list each tile's n_blocks, into which the blocks of keys must divide.
TEST(ForwardPlan, BlockMasksAreListedFirst) {
  const Problem p = dense({.batch = 3, .seqlen_q = 1000, .seqlen_k = 500, .heads_q = 8, .heads_k = 2});
  const Problem all = with_blocks(p, 128, 128), each = with_blocks(p, 128, 32, 8);
  const plan::Plan plan = plan::make_plan(all, hopper());
  EXPECT_EQ(plan.forward.pack_gqa, 1);
  const auto m_blocks = static_cast<uint32_t>(plan.forward.m_blocks);
  const uint32_t n_blocks = (500 + 127) / 128 * (128 / static_cast<uint32_t>(plan.forward.tile.tile_n));
  ASSERT_EQ(plan.launches.size(), 3u);
  EXPECT_EQ(plan.launches[0].entry, plan::EntryId::list_n_blocks);
  EXPECT_EQ(plan.launches[0].grid, m_blocks);  // all heads share one list
  EXPECT_EQ(plan.launches[1].entry, plan::EntryId::order_tiles);
  EXPECT_EQ(plan.launches[1].grid, m_blocks);
  // Each launch may begin before the previous launch has ended, and the first launch sets the counter instead of a
  // fill.
  for (const plan::PlannedLaunch& launch : plan.launches) EXPECT_TRUE(launch.overlap_previous);
  EXPECT_TRUE(plan.forward.dynamic_scheduler && plan.fills.empty());
  EXPECT_EQ(plan.regions[0].first_writer, 0);
  const plan::Plan later = plan::make_plan(all, blackwell());
  for (const plan::PlannedLaunch& launch : later.launches) EXPECT_FALSE(launch.overlap_previous);
  EXPECT_EQ(later.fills.size(), 1u);
  Problem no_keys = with_blocks(dense({.batch = 3, .seqlen_q = 1000, .seqlen_k = 0}), 128, 128);
  EXPECT_EQ(plan::make_plan(no_keys, hopper()).fills.size(), 1u);  // the fill writes zeros that replace the keys
  for (const size_t launch : {0, 1})
    EXPECT_EQ(plan::make_plan(each, hopper()).launches[launch].grid, static_cast<uint32_t>(8 * plan_of(each).m_blocks));
  EXPECT_EQ(workspace_of(all), 15u + 32u + m_blocks * (n_blocks + n_blocks + 1) * 4u + m_blocks * 4u);
  Problem with_alibi = p, narrow = p;
  with_alibi.alibi_slopes.present = true;
  narrow.head_dim = narrow.head_dim_v = 64;
  for (const int64_t block_k : {32, 64, 96, 128, 501}) {
    for (const Problem& each_of : {p, with_alibi, narrow}) {
      const Sm90ForwardConfig t = plan_of(with_blocks(each_of, 128, block_k)).tile.for_hopper();
      EXPECT_TRUE(plan::fits(t)) << block_k;
      EXPECT_GE(t.tile_n, plan::kLeastBlockKeys) << block_k;
      EXPECT_TRUE(block_k > 500 || block_k % t.tile_n == 0) << block_k;  // a larger block contains all keys
    }
  }
}

// FMA units compute a share of the exponentials if the GPU's exponential unit is slow and scores are products alone.
TEST(ForwardPlan, ExponentialsOnFmaUnits) {
  const Problem p = dense({.seqlen_q = 100, .seqlen_k = 100});
  EXPECT_GT(blackwell_tile_of(p).ex2_emu_pairs, 0);
  Problem f16 = p, softcap = p;
  f16.dtype = DType::f16;
  EXPECT_GT(blackwell_tile_of(f16).ex2_emu_pairs, 0);
  softcap.softcap = 3;
  EXPECT_EQ(blackwell_tile_of(softcap).ex2_emu_pairs, 0);
  gpu::Properties b300 = blackwell();
  b300.compute_minor = 3;
  EXPECT_EQ(blackwell_tile_of(p, b300).ex2_emu_pairs, 0);
}

template <class Kernel>
void expect_options_to_reach(Kernel (*tile_of)(const Problem&)) {
  const auto tile_with = [&](void (*change)(Problem&)) {
    Problem p = dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 100});
    change(p);
    return tile_of(p);
  };
  const Kernel plain = tile_with([](Problem&) {});
  EXPECT_FALSE(plain.options.f16 || plain.options.bounded_left || plain.options.bounded_right || plain.options.varlen ||
               plain.has_score_mod());
  EXPECT_TRUE(tile_with([](Problem& p) { p.dtype = DType::f16; }).options.f16);
  EXPECT_TRUE(tile_with([](Problem& p) { p.window_left = 5; }).options.bounded_left);
  EXPECT_TRUE(tile_with([](Problem& p) { p.window_right = -3; }).options.bounded_right);
  EXPECT_TRUE(tile_with([](Problem& p) { p.seqused_q.present = true; }).options.varlen);
  EXPECT_TRUE(tile_with([](Problem& p) { p.seqused_k.present = true; }).options.varlen);
  EXPECT_TRUE(tile_with([](Problem& p) { p.cu_seqlens_q.present = p.cu_seqlens_k.present = true; }).options.varlen);
  EXPECT_TRUE(tile_with([](Problem& p) { p.softmax_scale = -1; }).options.scale_outside_exp2);
  EXPECT_TRUE(tile_with([](Problem& p) { p.softmax_scale = 1e-60; }).options.scale_outside_exp2);  // 0 in float32
  EXPECT_TRUE(tile_with([](Problem& p) { p.softcap = 1; }).options.softcap);
  EXPECT_TRUE(tile_with([](Problem& p) { p.alibi_slopes.present = true; }).options.alibi);
  const auto bias_of = [&](DType dtype) {
    Problem p = dense({});
    p.bias.present = true;
    p.bias.dtype = dtype;
    return tile_of(p).options.bias;
  };
  EXPECT_EQ(bias_of(DType::boolean), Bias::boolean);
  EXPECT_EQ(bias_of(DType::f32), Bias::f32);
  EXPECT_EQ(bias_of(DType::bf16), Bias::element);
}

TEST(ForwardPlan, OptionsReachTheTile) {
  expect_options_to_reach<Sm90ForwardConfig>([](const Problem& p) { return plan_of(p).tile.for_hopper(); });
  expect_options_to_reach<Sm100ForwardConfig>([](const Problem& p) { return blackwell_tile_of(p); });
}

// A bound is dropped exactly if it hides nothing: for dense lengths, and for all lengths up to them.
TEST(ForwardPlan, BoundsThatBindNothing) {
  const auto hides = [](const Problem& p, int64_t sq, int64_t sk, bool left) {
    const int64_t diagonal = p.bottom_right ? sk - sq : p.diagonal_offset;
    for (int64_t i = 0; i < sq; ++i) {
      for (int64_t j = 0; j < sk; ++j) {
        if (left ? j < i + diagonal - p.window_left : j > i + diagonal + p.window_right) return true;
      }
    }
    return false;
  };
  for (int64_t sq = 1; sq <= 5; ++sq) {
    for (int64_t sk = 1; sk <= 5; ++sk) {
      for (int64_t bound = -7; bound <= 7; ++bound) {
        for (const bool bottom_right : {false, true}) {
          Problem p = dense({.seqlen_q = sq, .seqlen_k = sk});
          p.bottom_right = bottom_right;
          p.window_right = bound;
          EXPECT_EQ(plan::needs_right_mask(p), hides(p, sq, sk, false)) << sq << " " << sk << " " << bound;
          p.window_right = TANDEM_UNBOUNDED;
          p.window_left = bound;
          EXPECT_EQ(plan::needs_left_mask(p), hides(p, sq, sk, true)) << sq << " " << sk << " " << bound;
          for (int64_t q = 0; q <= sq; ++q) {
            for (int64_t k = 0; k <= sk; ++k) {
              EXPECT_LE(hides(p, q, k, true), plan::needs_left_mask(p));
            }
          }
        }
        for (int64_t offset = -6; offset <= 6; ++offset) {
          Problem p = dense({.seqlen_q = sq, .seqlen_k = sk});
          p.bottom_right = false;
          p.diagonal_offset = offset;
          p.window_right = bound;
          EXPECT_EQ(plan::needs_right_mask(p), hides(p, sq, sk, false))
              << sq << " " << sk << " " << bound << " " << offset;
          p.window_left = bound;
          EXPECT_EQ(plan::needs_left_mask(p), hides(p, sq, sk, true))
              << sq << " " << sk << " " << bound << " " << offset;
          p.diagonal_offsets.present = true;  // for any position of the diagonal
          EXPECT_TRUE(plan::needs_left_mask(p) && plan::needs_right_mask(p));
        }
      }
    }
  }
}

// The limit reduces the grid, and changes no property that results depend on.
TEST(ForwardPlan, LimitOfMultiprocessors) {
  Problem p = causal(dense({.batch = 2, .seqlen_q = 4000, .seqlen_k = 4000, .heads_q = 16, .heads_k = 16}));
  const ForwardSchedule all = plan_of(p);
  p.sm_limit = 20;
  const ForwardSchedule few = plan_of(p);
  EXPECT_EQ(all.grid, 132);
  EXPECT_EQ(few.grid, 20);
  EXPECT_EQ(plan::id_of(few.tile), plan::id_of(all.tile));
  p.sm_limit = 100000;
  EXPECT_EQ(plan_of(p).grid, 132);
}

TEST(ForwardPlan, WindowsAreClamped) {
  Problem p = dense({.seqlen_q = 9, .seqlen_k = 9});
  p.window_left = -(int64_t{1} << 61);
  p.window_right = int64_t{1} << 61;
  ForwardParams params{};
  plan::set_scores(p, &params);
  EXPECT_EQ(params.window_left, -plan::kFarWindow);
  EXPECT_EQ(params.window_right, plan::kFarWindow);
}

TEST(ForwardPlan, PackGqa) {
  const auto pack_gqa = [](int64_t seqlen_q, int64_t heads_q, int64_t heads_k) {
    return plan_of(dense({.seqlen_q = seqlen_q, .seqlen_k = 512, .heads_q = heads_q, .heads_k = heads_k})).pack_gqa;
  };
  EXPECT_EQ(pack_gqa(1, 64, 8), 8);
  EXPECT_EQ(pack_gqa(1, 256, 1), 128);  // at most 128
  EXPECT_EQ(pack_gqa(1, 48, 4), 4);     // a power of two that divides 12
  EXPECT_EQ(pack_gqa(1, 28, 4), 1);     // 7 is odd
  EXPECT_EQ(pack_gqa(1, 8, 8), 1);
  Problem p = dense({.seqlen_q = 128, .seqlen_k = 512, .heads_q = 64, .heads_k = 8});
  p.seqused_q.present = true;
  EXPECT_EQ(plan_of(p).pack_gqa, 8);  // unknown lengths: one partial tile instead of eight
  p.seqused_q.present = false;
  EXPECT_EQ(plan_of(p).pack_gqa, 1);
  EXPECT_EQ(plan_of(causal(p)).pack_gqa, 8);  // 16 queries see fewer keys than 128
  p.batch_invariant = true;
  EXPECT_EQ(plan_of(p).pack_gqa, 8);
}

// Tiles cover every row once, and packed heads never need more tiles than separate ones.
TEST(ForwardPlan, TilesCoverTheRows) {
  for (int64_t seqlen = 1; seqlen < 700; seqlen += 13) {
    for (const int64_t group : {1, 2, 6, 8}) {
      const ForwardSchedule plan =
          plan_of(dense({.batch = 3, .seqlen_q = seqlen, .seqlen_k = 100, .heads_q = 4 * group, .heads_k = 4}));
      const int64_t rows = plan.tile.tile_m();
      EXPECT_EQ(plan.packed_heads * plan.pack_gqa, 4 * group);
      EXPECT_GE(plan.m_blocks * rows, seqlen * plan.pack_gqa);
      EXPECT_LT((plan.m_blocks - 1) * rows, seqlen * plan.pack_gqa);
      EXPECT_EQ(plan.tiles, plan.m_blocks * plan.packed_heads * 3);
      EXPECT_LE(plan.tiles, (seqlen + rows - 1) / rows * 4 * group * 3);
      EXPECT_EQ(64 % plan.pack_gqa, 0);
    }
  }
}

// The work list holds the tiles of any lengths within the caller's bounds.
TEST(ForwardPlan, VarlenBoundHoldsForAllLengths) {
  Random random(11);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random.next() % static_cast<uint64_t>(n)); };
  int tight = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int64_t batch = 1 + below(9), group = int64_t{1} << below(4);
    std::vector<int64_t> lengths;
    int64_t total = 0, longest = 0;
    for (int64_t b = 0; b < batch; ++b) {
      lengths.push_back(below(2) != 0 ? below(1000) : below(3) * 64 + below(3) - 1);
      lengths.back() = std::max<int64_t>(lengths.back(), 0);
      total += lengths.back();
      longest = std::max(longest, lengths.back());
    }
    if (total == 0) continue;
    const Sizes sizes{.batch = batch, .seqlen_q = longest, .seqlen_k = 100, .heads_q = 2 * group, .heads_k = 2};
    const ForwardSchedule by_packing = plan_of(packed(sizes, total, 100));
    Problem padded = dense(sizes);
    padded.seqused_q.present = true;
    const ForwardSchedule by_padding = plan_of(padded);
    int64_t needed = 0, needed_padded = 0;
    for (const int64_t length : lengths) {
      needed += (length * by_packing.pack_gqa + by_packing.tile.tile_m() - 1) / by_packing.tile.tile_m();
      needed_padded += (longest * by_padding.pack_gqa + by_padding.tile.tile_m() - 1) / by_padding.tile.tile_m();
    }
    EXPECT_GE(by_packing.m_blocks, needed);
    EXPECT_LT(by_packing.m_blocks, needed + batch);  // without much more space
    EXPECT_EQ(by_padding.m_blocks, needed_padded);
    tight += by_packing.m_blocks == needed;
    for (const Problem& p : {packed(sizes, total, 100), padded}) {
      const ForwardSchedule plan = plan_of(p);
      EXPECT_EQ(plan.tiles, plan.m_blocks * plan.packed_heads);
      EXPECT_EQ(plan.dynamic_scheduler, plan.lists_tiles);
      if (!plan.lists_tiles) continue;
      EXPECT_GE(workspace_of(p), plan::kWorkspaceAlignment - 1 + plan::kTileListOffset +
                                     static_cast<size_t>(plan.m_blocks) * sizeof(ListedTile));
    }
  }
  EXPECT_GT(tight, 100);
}

TEST(ForwardPlan, GridAndCounter) {
  // With one tile per SM, or equal tiles, a plan has no counter and no workspace.
  for (const int64_t batch : {1, 132}) {
    const Problem p = causal(dense({.batch = batch, .seqlen_q = 100, .seqlen_k = 100}));
    EXPECT_EQ(plan_of(p).grid, batch);
    EXPECT_FALSE(plan_of(p).dynamic_scheduler);
    EXPECT_EQ(workspace_of(p), 0u);
  }
  const Problem many = dense({.batch = 133, .seqlen_q = 100, .seqlen_k = 100});
  EXPECT_FALSE(plan_of(many).dynamic_scheduler);
  EXPECT_EQ(plan_of(many).grid, 132);
  EXPECT_TRUE(plan_of(causal(many)).dynamic_scheduler);
  EXPECT_EQ(workspace_of(causal(many)), 47u);
  const ForwardSchedule decode = plan_of(causal(dense({.batch = 500, .seqlen_q = 1, .seqlen_k = 100})));
  EXPECT_FALSE(decode.dynamic_scheduler);  // one query that sees all keys: no mask
}

TEST(ForwardPlan, NoKeysAtAll) {
  const Problem p = dense({.batch = 2, .seqlen_q = 5, .seqlen_k = 0});
  EXPECT_TRUE(plan_of(p).no_keys);
  EXPECT_GE(workspace_of(p), plan::kWorkspaceAlignment - 1 + plan::kTileListOffset);
  EXPECT_FALSE(plan_of(dense({})).no_keys);
  EXPECT_TRUE(plan_of(packed({.batch = 2, .seqlen_q = 5, .seqlen_k = 0}, 8, 0)).no_keys);
}

// Under a mask heads run in groups, which shrink as keys grow. Without a mask heads run one by one.
TEST(ForwardPlan, GroupsOfHeads) {
  for (const int64_t heads : {1, 3, 5, 16, 31, 64}) {
    for (const int64_t batch : {1, 7}) {
      int before = INT_MAX;
      for (const int64_t seqlen : {2, 100, 500, 3000, 9000, 40000, 1 << 20}) {
        const Problem p =
            dense({.batch = batch, .seqlen_q = seqlen, .seqlen_k = seqlen, .heads_q = heads, .heads_k = heads});
        EXPECT_EQ(plan_of(p).l2_heads, 1);
        const int group = plan_of(causal(p)).l2_heads;
        EXPECT_GE(group, 1);
        EXPECT_LE(group, batch * heads);
        EXPECT_LE(group, before);
        before = group;
      }
    }
  }
  const Problem documents =
      packed({.batch = 9, .seqlen_q = 500, .seqlen_k = 500, .heads_q = 6, .heads_k = 6}, 900, 900);
  EXPECT_LE(plan_of(documents).l2_heads, 6);  // all sequences are in one list, which counts heads
}

// The launches of a forward, their order, and the first writers of the workspace's regions.
TEST(ForwardPlan, Launches) {
  const Problem equal = dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 100});
  const plan::Plan one = plan::make_plan(equal, hopper());
  ASSERT_EQ(one.kernels.size(), 1u);
  EXPECT_EQ(one.kernels[0].id, plan::id_of(one.forward.tile));
  ASSERT_EQ(one.launches.size(), 1u);
  EXPECT_EQ(one.launches[0].entry, plan::EntryId::main);
  EXPECT_EQ(one.launches[0].grid, 2u);
  EXPECT_EQ(one.launches[0].block, static_cast<uint32_t>(one.forward.tile.threads()));
  EXPECT_EQ(one.launches[0].shared_bytes, static_cast<uint32_t>(one.forward.tile.smem_bytes()));
  EXPECT_TRUE(one.launches[0].overlap_previous);
  EXPECT_FALSE(plan::make_plan(equal, blackwell()).launches[0].overlap_previous);
  EXPECT_TRUE(one.fills.empty() && one.regions.empty());

  // Sequences of one tile need no list if all tiles run at once.
  const auto packed_plan = [](int64_t batch, int64_t seqlen_q) {
    return plan::make_plan(packed({.batch = batch, .seqlen_q = seqlen_q, .seqlen_k = 100}, 250, 250), hopper());
  };
  EXPECT_EQ(packed_plan(3, 100).launches.size(), 1u);
  EXPECT_TRUE(packed_plan(3, 100).regions.empty());
  EXPECT_EQ(packed_plan(133, 100).launches[0].entry, plan::EntryId::schedule);
  const plan::Plan two = packed_plan(3, 200);
  ASSERT_EQ(two.launches.size(), 2u);
  EXPECT_EQ(two.launches[0].entry, plan::EntryId::schedule);
  EXPECT_EQ(two.launches[0].grid, 1u);
  EXPECT_EQ(two.launches[0].block, plan::kScheduleThreads);
  EXPECT_TRUE(two.launches[0].overlap_previous);
  EXPECT_EQ(two.launches[1].entry, plan::EntryId::main);
  EXPECT_TRUE(two.fills.empty());  // the schedule writes the counter
}

// Regions of the workspace do not overlap, are aligned and inside it, and each has a first writer.
TEST(ForwardPlan, WorkspaceLayout) {
  const Sizes sizes{.batch = 200, .seqlen_q = 300, .seqlen_k = 300}, no_keys{.batch = 2, .seqlen_q = 5, .seqlen_k = 0};
  for (const Problem& p : {causal(dense(sizes)), packed(sizes, 6000, 6000), dense(no_keys), packed(no_keys, 9, 0),
                           with_blocks(dense(sizes), 128, 128)}) {
    for (const gpu::Properties& device : {hopper(), blackwell()}) {
      const plan::Plan plan = plan::make_plan(p, device);
      EXPECT_EQ(plan.workspace_bytes == 0, plan.regions.empty());
      size_t end = 0;
      for (const plan::Region& region : plan.regions) {
        EXPECT_GE(region.offset, end) << region.name;
        EXPECT_EQ(region.offset % alignof(ListedTile), 0u) << region.name;
        end = region.offset + region.bytes;
        const auto fills = [&](const plan::Fill& f) { return f.offset <= region.offset && end <= f.offset + f.bytes; };
        const bool filled = std::any_of(plan.fills.begin(), plan.fills.end(), fills);
        EXPECT_TRUE(filled || region.first_writer >= 0) << region.name;
        EXPECT_LT(region.first_writer, static_cast<int>(plan.launches.size()) - 1) << region.name;
      }
      EXPECT_LE(plan::kWorkspaceAlignment - 1 + end, plan.workspace_bytes + (end == 0 ? 15 : 0));
    }
  }
}

}  // namespace
}  // namespace tandem::test
