// The choices of a forward plan, and its bounds against counting.
#include "plan/forward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <set>

#include "plan/blackwell_tiles.h"
#include "plan/problems.h"
#include "plan/tiles.h"
#include "support/random.h"

namespace tandem::test {
namespace {

using plan::ForwardPlan;
using plan::plan_forward;

ForwardPlan plan_of(const Problem& p) { return plan_forward(p, hopper()); }
BlackwellTile blackwell_tile_of(const Problem& p, const gpu::Properties& device = blackwell()) {
  return plan_forward(p, device).tile.for_blackwell();
}

// Which problems an entry of the table serves; the entries themselves are measured and may be any.
TEST(TileTable, EntriesServeWhatTheySay) {
  const auto serves = [](const plan::TileChoice& c, int dim, int dim_v, int64_t rows, int64_t keys) {
    return c.serves(dim, dim_v, rows, keys, false, false, true);
  };
  const plan::TileChoice sizes{128, 64, 10, 20, plan::Mask::any, plan::Scores::any, 2, 64, 2, true};
  EXPECT_TRUE(serves(sizes, 128, 64, 10, 20));
  EXPECT_FALSE(serves(sizes, 144, 64, 10, 20));
  EXPECT_FALSE(serves(sizes, 128, 80, 10, 20));
  EXPECT_FALSE(serves(sizes, 128, 64, 9, 20));
  EXPECT_FALSE(serves(sizes, 128, 64, 10, 19));
  const auto with = [&](plan::Mask mask, bool left, bool right) {
    plan::TileChoice choice = sizes;
    choice.mask = mask;
    return choice.serves(64, 64, 100, 100, left, right, true);
  };
  for (const bool left : {false, true}) {
    for (const bool right : {false, true}) {
      EXPECT_TRUE(with(plan::Mask::any, left, right));
      EXPECT_EQ(with(plan::Mask::full, left, right), !left && !right);
      EXPECT_EQ(with(plan::Mask::bounded, left, right), left || right);
      EXPECT_EQ(with(plan::Mask::left, left, right), left);
    }
  }
  plan::TileChoice plain = sizes;
  plain.scores = plan::Scores::plain;
  EXPECT_TRUE(plain.serves(64, 64, 100, 100, false, false, true));
  EXPECT_FALSE(plain.serves(64, 64, 100, 100, false, false, false));
}

// The plan has the first entry that serves the problem, and there always is one.
TEST(ForwardPlan, FirstEntryThatServes) {
  for (const int64_t dim : {8, 40, 64, 72, 128, 160, 192, 200, 256}) {
    for (const int64_t dim_v : {8, 64, 128, 256}) {
      for (const int64_t seqlen : {1, 100, 192, 1000, 3000, 8192, 20000}) {
        for (int options = 0; options < 8; ++options) {
          Problem p = dense({.seqlen_q = seqlen, .seqlen_k = seqlen, .head_dim = dim, .head_dim_v = dim_v});
          if (options & 1) p.window_right = 0;
          if (options & 2) p.window_left = 10;
          if (options & 4) p.softcap = 30;
          const ForwardTile t = plan_of(p).tile.for_hopper();
          EXPECT_EQ(t.head_dim, (dim + 15) / 16 * 16);
          EXPECT_EQ(t.head_dim_v, (dim_v + 15) / 16 * 16);
          const auto* entry = std::find_if(
              std::begin(plan::kHopperTiles), std::end(plan::kHopperTiles), [&](const plan::TileChoice& c) {
                return c.serves(t.head_dim, t.head_dim_v, seqlen, seqlen, t.left, t.right, (options & 4) == 0);
              });
          ASSERT_NE(entry, std::end(plan::kHopperTiles)) << plan::name_of(t);
          EXPECT_EQ(t.warpgroups, entry->warpgroups);
          EXPECT_EQ(t.keys, entry->step);
          EXPECT_EQ(t.stages, entry->stages);
          EXPECT_EQ(t.turns, entry->turns);
        }
      }
    }
  }
}

// A sequence is computed alike whatever the lengths of others make of the batch's bounds.
TEST(ForwardPlan, BatchInvariantPlansIgnoreLengths) {
  for (const int64_t dim : {64, 128, 192, 256}) {
    std::set<uint64_t> ids;
    std::set<int> together;
    for (const int64_t longest : {50, 200, 3000, 9000, 50000}) {
      for (const int64_t batch : {1, 40}) {
        Problem p = causal(packed({.batch = batch,
                                   .seqlen_q = longest,
                                   .seqlen_k = longest,
                                   .heads_q = 16,
                                   .heads_k = 4,
                                   .head_dim = dim,
                                   .head_dim_v = dim},
                                  batch * longest, batch * longest));
        p.batch_invariant = true;
        ids.insert(plan::id_of(plan_of(p).tile));
        together.insert(plan_of(p).together);
      }
    }
    EXPECT_EQ(ids.size(), 1u);
    EXPECT_EQ(together.size(), 1u);
  }
}

// Every head_dim has a tile that fits, whatever else is asked.
TEST(ForwardPlan, EveryTileFits) {
  for (int64_t d = 8; d <= 256; d += 8) {
    for (int64_t dv = 8; dv <= 256; dv += 8) {
      for (const int64_t seqlen : {1, 130, 1000, 10000}) {
        const Problem p = dense({.seqlen_q = seqlen, .seqlen_k = seqlen, .head_dim = d, .head_dim_v = dv});
        for (const Problem& each : {p, causal(p)}) {
          const ForwardTile t = plan_of(each).tile.for_hopper();
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
        const BlackwellTile t = blackwell_tile_of(p);
        EXPECT_TRUE(t.fits()) << plan::name_of(t);
        EXPECT_EQ(t.head_dim, (d + 15) / 16 * 16);
        EXPECT_EQ(t.head_dim_v, (dv + 15) / 16 * 16);
      }
    }
  }
}

// Two CTAs multiply together where there is nothing to skip and they are full; wide heads always.
TEST(ForwardPlan, PairsOfBlackwell) {
  const auto pair = [](const Sizes& sizes, bool is_causal = false) {
    const Problem p = dense(sizes);
    return blackwell_tile_of(is_causal ? causal(p) : p).pair;
  };
  EXPECT_TRUE(pair({.seqlen_q = 4096, .seqlen_k = 4096}));
  EXPECT_TRUE(pair({.seqlen_q = 400, .seqlen_k = 4096, .head_dim = 192}));
  EXPECT_FALSE(pair({.seqlen_q = 4096, .seqlen_k = 4096}, true));
  EXPECT_FALSE(pair({.seqlen_q = 4096, .seqlen_k = 4096, .head_dim = 64, .head_dim_v = 64}));
  EXPECT_FALSE(pair({.seqlen_q = 256, .seqlen_k = 4096}));  // one tile of one CTA
  EXPECT_FALSE(pair({.seqlen_q = 700, .seqlen_k = 4096}));  // three
  EXPECT_TRUE(pair({.seqlen_q = 1, .seqlen_k = 4096, .head_dim = 256, .head_dim_v = 256}, true));
  const ForwardPlan unequal = plan_forward(
      causal(dense({.batch = 100, .seqlen_q = 512, .seqlen_k = 512, .head_dim = 256, .head_dim_v = 256})), blackwell());
  EXPECT_TRUE(unequal.tile.takes_over());
  EXPECT_EQ(unequal.tiles, 200);
  EXPECT_EQ(unequal.grid, 400);  // all of them, for those that run to take over
  EXPECT_EQ(unequal.workspace_bytes, 0u);
  const ForwardPlan plan = plan_forward(dense({.batch = 100, .seqlen_q = 512, .seqlen_k = 64}), blackwell());
  EXPECT_FALSE(plan.tile.takes_over());
  EXPECT_EQ(plan.tile.rows(), 512);
  EXPECT_EQ(plan.tiles, 100);
  EXPECT_EQ(plan.grid, 148);
  EXPECT_FALSE(plan.counted);
}

// The share of exponentials on the FMA units is for cards where the exponential unit is short, and for scores that are
// products alone.
TEST(ForwardPlan, ExponentialsOnFmaUnits) {
  const Problem p = dense({.seqlen_q = 100, .seqlen_k = 100});
  EXPECT_EQ(blackwell_tile_of(p).fma_pairs, 4);
  Problem f16 = p, softcap = p;
  f16.dtype = DType::f16;
  EXPECT_LT(blackwell_tile_of(f16).fma_pairs, 4);
  softcap.softcap = 3;
  EXPECT_EQ(blackwell_tile_of(softcap).fma_pairs, 0);
  gpu::Properties b300 = blackwell();
  b300.compute_minor = 3;
  EXPECT_EQ(blackwell_tile_of(p, b300).fma_pairs, 0);
}

template <class Kernel>
void expect_options_to_reach(Kernel (*tile_of)(const Problem&)) {
  const auto tile_with = [&](void (*change)(Problem&)) {
    Problem p = dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 100});
    change(p);
    return tile_of(p);
  };
  const Kernel plain = tile_with([](Problem&) {});
  EXPECT_FALSE(plain.f16 || plain.left || plain.right || plain.ragged || plain.changed());
  EXPECT_TRUE(tile_with([](Problem& p) { p.dtype = DType::f16; }).f16);
  EXPECT_TRUE(tile_with([](Problem& p) { p.window_left = 5; }).left);
  EXPECT_TRUE(tile_with([](Problem& p) { p.window_right = -3; }).right);
  EXPECT_TRUE(tile_with([](Problem& p) { p.seqused_q.present = true; }).ragged);
  EXPECT_TRUE(tile_with([](Problem& p) { p.seqused_k.present = true; }).ragged);
  EXPECT_TRUE(tile_with([](Problem& p) { p.cu_seqlens_q.present = p.cu_seqlens_k.present = true; }).ragged);
  EXPECT_TRUE(tile_with([](Problem& p) { p.softmax_scale = -1; }).unscaled);
  EXPECT_TRUE(tile_with([](Problem& p) { p.softmax_scale = 1e-60; }).unscaled);  // 0 in float32
  EXPECT_TRUE(tile_with([](Problem& p) { p.softcap = 1; }).softcap);
  EXPECT_TRUE(tile_with([](Problem& p) { p.alibi_slopes.present = true; }).alibi);
  const auto bias_of = [&](DType dtype) {
    Problem p = dense({});
    p.bias.present = true;
    p.bias.dtype = dtype;
    return tile_of(p).bias;
  };
  EXPECT_EQ(bias_of(DType::boolean), Bias::boolean);
  EXPECT_EQ(bias_of(DType::f32), Bias::f32);
  EXPECT_EQ(bias_of(DType::bf16), Bias::element);
}

TEST(ForwardPlan, OptionsReachTheTile) {
  expect_options_to_reach<ForwardTile>([](const Problem& p) { return plan_of(p).tile.for_hopper(); });
  expect_options_to_reach<BlackwellTile>([](const Problem& p) { return blackwell_tile_of(p); });
}

// A bound is dropped exactly when it hides nothing: for dense lengths, and for all lengths up to them.
TEST(ForwardPlan, BoundsThatBindNothing) {
  const auto hides = [](const Problem& p, int64_t sq, int64_t sk, bool left) {
    const int64_t diagonal = p.bottom_right ? sk - sq : 0;
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
          EXPECT_EQ(plan::binds_right(p), hides(p, sq, sk, false)) << sq << " " << sk << " " << bound;
          p.window_right = TANDEM_UNBOUNDED;
          p.window_left = bound;
          EXPECT_EQ(plan::binds_left(p), hides(p, sq, sk, true)) << sq << " " << sk << " " << bound;
          for (int64_t q = 0; q <= sq; ++q) {
            for (int64_t k = 0; k <= sk; ++k) {
              EXPECT_LE(hides(p, q, k, true), plan::binds_left(p));
            }
          }
        }
      }
    }
  }
}

TEST(ForwardPlan, WindowsAreClamped) {
  Problem p = dense({.seqlen_q = 9, .seqlen_k = 9});
  p.window_left = -(int64_t{1} << 61);
  p.window_right = int64_t{1} << 61;
  const ForwardPlan plan = plan_of(p);
  EXPECT_EQ(plan.window_left, -plan::kFarWindow);
  EXPECT_EQ(plan.window_right, plan::kFarWindow);
}

TEST(ForwardPlan, HeadsTogether) {
  const auto together = [](int64_t seqlen_q, int64_t heads_q, int64_t heads_k) {
    return plan_of(dense({.seqlen_q = seqlen_q, .seqlen_k = 512, .heads_q = heads_q, .heads_k = heads_k})).together;
  };
  EXPECT_EQ(together(1, 64, 8), 8);
  EXPECT_EQ(together(1, 128, 1), 64);  // at most 64
  EXPECT_EQ(together(1, 48, 4), 4);    // a power of two that divides 12
  EXPECT_EQ(together(1, 28, 4), 1);    // 7 are none
  EXPECT_EQ(together(1, 8, 8), 1);
  Problem p = dense({.seqlen_q = 128, .seqlen_k = 512, .heads_q = 64, .heads_k = 8});
  p.seqused_q.present = true;
  EXPECT_EQ(plan_of(p).together, 8);  // lengths are the device's: half a tile is lost once, not eight times
  p.seqused_q.present = false;
  EXPECT_EQ(plan_of(p).together, 1);
  EXPECT_EQ(plan_of(causal(p)).together, 8);  // 16 queries see fewer keys than 128
  p.batch_invariant = true;
  EXPECT_EQ(plan_of(p).together, 8);
}

// Tiles cover every row once, and never are more than they would be apart.
TEST(ForwardPlan, TilesCoverTheRows) {
  for (int64_t seqlen = 1; seqlen < 700; seqlen += 13) {
    for (const int64_t group : {1, 2, 6, 8}) {
      const ForwardPlan plan =
          plan_of(dense({.batch = 3, .seqlen_q = seqlen, .seqlen_k = 100, .heads_q = 4 * group, .heads_k = 4}));
      const int64_t rows = plan.tile.rows();
      EXPECT_EQ(plan.units * plan.together, 4 * group);
      EXPECT_GE(plan.tiles_m * rows, seqlen * plan.together);
      EXPECT_LT((plan.tiles_m - 1) * rows, seqlen * plan.together);
      EXPECT_EQ(plan.tiles, plan.tiles_m * plan.units * 3);
      EXPECT_LE(plan.tiles, (seqlen + rows - 1) / rows * 4 * group * 3);
      EXPECT_EQ(64 % plan.together, 0);
    }
  }
}

// The work list has room for any lengths that keep the caller's word.
TEST(ForwardPlan, RaggedBoundHoldsForAllLengths) {
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
    const ForwardPlan by_packing = plan_of(packed(sizes, total, 100));
    Problem padded = dense(sizes);
    padded.seqused_q.present = true;
    const ForwardPlan by_padding = plan_of(padded);
    int64_t needed = 0, needed_padded = 0;
    for (const int64_t length : lengths) {
      needed += (length * by_packing.together + by_packing.tile.rows() - 1) / by_packing.tile.rows();
      needed_padded += (longest * by_padding.together + by_padding.tile.rows() - 1) / by_padding.tile.rows();
    }
    EXPECT_GE(by_packing.tiles_m, needed);
    EXPECT_LT(by_packing.tiles_m, needed + batch);  // and not much more
    EXPECT_EQ(by_padding.tiles_m, needed_padded);
    tight += by_packing.tiles_m == needed;
    for (const ForwardPlan& plan : {by_packing, by_padding}) {
      EXPECT_EQ(plan.tiles, plan.tiles_m * plan.units);
      EXPECT_TRUE(plan.counted);
      EXPECT_GE(plan.workspace_bytes, plan::kWorkspaceAlignment - 1 + plan::kWorkOffset +
                                          static_cast<size_t>(plan.tiles_m) * sizeof(ForwardWork));
    }
  }
  EXPECT_GT(tight, 100);
}

TEST(ForwardPlan, GridAndCounter) {
  // As many tiles as SMs, or equal ones: no counter, no workspace.
  for (const int64_t batch : {1, 132}) {
    const ForwardPlan plan = plan_of(causal(dense({.batch = batch, .seqlen_q = 100, .seqlen_k = 100})));
    EXPECT_EQ(plan.grid, batch);
    EXPECT_FALSE(plan.counted);
    EXPECT_EQ(plan.workspace_bytes, 0u);
  }
  const Problem many = dense({.batch = 133, .seqlen_q = 100, .seqlen_k = 100});
  EXPECT_FALSE(plan_of(many).counted);
  EXPECT_EQ(plan_of(many).grid, 132);
  EXPECT_TRUE(plan_of(causal(many)).counted);
  EXPECT_EQ(plan_of(causal(many)).workspace_bytes, 47u);
  const ForwardPlan decode = plan_of(causal(dense({.batch = 500, .seqlen_q = 1, .seqlen_k = 100})));
  EXPECT_FALSE(decode.counted);  // one query that sees all keys: no mask
}

TEST(ForwardPlan, NoKeysAtAll) {
  const ForwardPlan plan = plan_of(dense({.batch = 2, .seqlen_q = 5, .seqlen_k = 0}));
  EXPECT_TRUE(plan.keyless);
  EXPECT_GE(plan.workspace_bytes, plan::kWorkspaceAlignment - 1 + plan::kWorkOffset);
  EXPECT_FALSE(plan_of(dense({})).keyless);
  EXPECT_TRUE(plan_of(packed({.batch = 2, .seqlen_q = 5, .seqlen_k = 0}, 8, 0)).keyless);
}

// Under a mask units are taken in groups, which have no more of them the longer their keys are; else one by one.
TEST(ForwardPlan, GroupsOfHeads) {
  for (const int64_t heads : {1, 3, 5, 16, 31, 64}) {
    for (const int64_t batch : {1, 7}) {
      int before = INT_MAX;
      for (const int64_t seqlen : {2, 100, 500, 3000, 9000, 40000, 1 << 20}) {
        const Problem p =
            dense({.batch = batch, .seqlen_q = seqlen, .seqlen_k = seqlen, .heads_q = heads, .heads_k = heads});
        EXPECT_EQ(plan_of(p).group, 1);
        const int group = plan_of(causal(p)).group;
        EXPECT_GE(group, 1);
        EXPECT_LE(group, batch * heads);
        EXPECT_LE(group, before);
        before = group;
      }
    }
  }
  const Problem documents =
      packed({.batch = 9, .seqlen_q = 500, .seqlen_k = 500, .heads_q = 6, .heads_k = 6}, 900, 900);
  EXPECT_LE(plan_of(documents).group, 6);  // all sequences are in one list: units are heads
}

template <class Kernel>
void add_with_all_options(Kernel t, std::vector<plan::Tile>* tiles) {
  for (int options = 0; options < 1 << 9; ++options) {
    t.f16 = options & 1;
    t.left = options & 2;
    t.right = options & 4;
    t.ragged = options & 8;
    t.unscaled = options & 16;
    t.softcap = options & 32;
    t.alibi = options & 64;
    t.bias = static_cast<Bias>(options >> 7);
    tiles->emplace_back(t);
  }
}

std::vector<plan::Tile> many_tiles() {
  std::vector<plan::Tile> tiles;
  for (const plan::TileChoice& choice : plan::kHopperTiles) {
    for (int dim = 16; dim <= choice.head_dim; dim += 16)
      add_with_all_options(plan::tile_of(choice, dim, choice.head_dim_v), &tiles);
  }
  for (const plan::BlackwellChoice& choice : plan::kBlackwellTiles) {
    for (const int fma_pairs : {0, choice.fma_pairs_unchecked, choice.fma_pairs_checked}) {
      for (const int clusters : {0, 1, 2, 3}) {
        for (const int dim : {16, choice.head_dim}) {
          add_with_all_options(BlackwellTile{.head_dim = dim,
                                             .head_dim_v = choice.head_dim_v,
                                             .fma_pairs = fma_pairs,
                                             .pair = (clusters & 1) != 0,
                                             .takes_over = (clusters & 2) != 0},
                               &tiles);
        }
      }
    }
  }
  return tiles;
}

// Whatever makes two tiles differ makes their numbers, names and sources differ.
TEST(ForwardPlan, TilesAreToldApart) {
  std::set<uint64_t> ids;
  std::set<std::string> names, sources;
  const std::vector<plan::Tile> tiles = many_tiles();
  for (const plan::Tile& t : tiles) {
    ids.insert(plan::id_of(t));
    names.insert(plan::name_of(t));
    sources.insert(plan::translation_unit(t));
  }
  EXPECT_EQ(names.size(), sources.size());
  EXPECT_EQ(ids.size(), sources.size());
  EXPECT_GT(sources.size(), tiles.size() / 3);  // the tables repeat some
}

TEST(ForwardPlan, TranslationUnit) {
  ForwardTile t{.head_dim = 64, .head_dim_v = 48, .warpgroups = 3, .keys = 112, .turns = false, .right = true};
  EXPECT_EQ(plan::name_of(t), "forward_bf16_d64v48_192x112x2_right");
  const std::string dense_unit = plan::translation_unit(t);
  for (const char* part : {"#include \"sm90/forward.cuh\"", ".head_dim = 64", ".head_dim_v = 48", ".keys = 112",
                           ".right = true", ".bias = Bias::none", "forward<kTile>(p)"}) {
    EXPECT_NE(dense_unit.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(dense_unit.find("schedule"), std::string::npos);
  t.ragged = true;
  EXPECT_NE(plan::translation_unit(t).find("schedule<kTile>(p)"), std::string::npos);
}

TEST(ForwardPlan, TranslationUnitOfBlackwell) {
  const BlackwellTile t{.head_dim = 192, .head_dim_v = 128, .fma_pairs = 3, .f16 = true, .right = true};
  EXPECT_EQ(plan::name_of(t), "forward_f16_d192v128_2x128x128_fma3_right");
  const std::string unit = plan::translation_unit(t);
  for (const char* part : {"#include \"sm100/forward.cuh\"", "constexpr BlackwellTile kTile{", ".head_dim = 192",
                           ".fma_pairs = 3", ".f16 = true", "forward<kTile>(p)"}) {
    EXPECT_NE(unit.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(unit.find("__cluster_dims__"), std::string::npos);
  const BlackwellTile pair{.pair = true};
  EXPECT_EQ(plan::name_of(pair), "forward_bf16_d128_2x256x128_fma4");
  EXPECT_NE(plan::translation_unit(pair).find("__cluster_dims__(2, 1, 1)"), std::string::npos);
}

}  // namespace
}  // namespace tandem::test
