// The schedules of backward plans: configurations that fit, chunks of dS, the order of tiles, and splits. Tuned numbers
// may change, so the tests check bounds and properties.
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "plan/arithmetic.h"
#include "plan/backward.h"
#include "plan/backward_needs.h"
#include "plan/tuning.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

// If one warp has all queries, only a quarter of a tile's dq is accumulated.
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
  EXPECT_FALSE(of(17, 4096, 128).short_q);
  EXPECT_GT(of(17, 4096, 64).tile_m, of(16, 4096, 64).tile_m);
  EXPECT_FALSE(of(1, 4096, 256).short_q);
  EXPECT_FALSE(of(1, 128, 128).short_q);         // one n_block: nothing is accumulated
  EXPECT_FALSE(of(1, 4096, 128, true).short_q);  // rows may be more
  // n_blocks of a head run one after the other without waiting, so that the heads of a group must fill the GPU.
  const auto schedule = [](int64_t seqlen_q, int64_t heads_k) {
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
  for (const int64_t heads_k : {8, 16}) {
    const plan::BackwardSchedule t = schedule(1, heads_k);
    EXPECT_GT(2 * t.l2_heads * (16 / heads_k), t.grid);  // each key head has an iteration per query head
    EXPECT_LE(t.l2_heads, 16 * heads_k);
  }
  EXPECT_LE(schedule(1, 8).l2_heads, schedule(1, 16).l2_heads);
  EXPECT_GE(schedule(16, 16).l2_heads, schedule(1, 16).l2_heads);  // a mask makes n_blocks unequal
  EXPECT_FALSE(schedule(16, 16).tile.spt);
  EXPECT_FALSE(schedule(17, 16).tile.spt);  // every query sees most n_blocks
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
      EXPECT_EQ(t.registers() % 8, 0);
      EXPECT_LE((t.threads() - 128) * t.registers() + 128 * t.load_registers(), 65536) << dim << " " << dim_v;
    }
  }
}

TEST(BackwardPlan, TilesOfBlackwellFit) {
  for (int64_t dim = 8; dim <= 256; dim += 8) {
    bool narrower = false;
    for (int64_t dim_v = 8; dim_v <= 256; dim_v += 8) {
      const Problem p = backward(dense({.seqlen_q = 100, .seqlen_k = 300, .head_dim = dim, .head_dim_v = dim_v}));
      const plan::Plan plan = plan::make_plan(p, blackwell());
      const Sm100BackwardConfig t = plan.backward.tile.for_blackwell();
      EXPECT_TRUE(t.fits()) << dim << " " << dim_v;
      EXPECT_GE(t.head_dim, dim);
      EXPECT_GE(t.head_dim_v, dim_v);
      EXPECT_LT(t.head_dim, dim + (t.two_cta ? 64 : t.two_pass() ? 64 : 16));
      const bool ring = dim > 128 && dim <= 192 && dim_v <= 128;
      EXPECT_EQ(t.two_cta_ring(), ring) << dim << " " << dim_v;
      if (ring) {
        EXPECT_TRUE(t.head_dim == 192 && t.head_dim_v == 128 && !t.two_pass());
        EXPECT_EQ(plan.launches[1].grid, 4u);  // two n_blocks of 256 keys
        continue;
      }
      // Two CTAs have one tile of 128 x 128, so that they are faster above some width.
      const bool narrow = dim <= 128 && dim_v <= 128;
      EXPECT_LE(t.two_cta, narrow && dim > 64 && dim_v > 64) << dim << " " << dim_v;
      EXPECT_TRUE(!narrow || !narrower || t.two_cta) << dim << " " << dim_v;
      narrower = t.two_cta;
      EXPECT_FALSE(t.two_pass() && (narrow || (dim <= 64 && dim_v <= 192)));
      EXPECT_TRUE(t.two_pass() || t.head_dim + t.head_dim_v <= 256);
      EXPECT_EQ(plan.launches[0].grid, 4u);  // m_blocks of 128 queries, 32 per CTA
      if (t.two_cta) {
        EXPECT_EQ(plan.launches[1].grid, 4u);  // two n_blocks of 256 keys
        EXPECT_EQ(plan.launches[2].block, 256u);
        continue;
      }
      if (t.two_pass()) {
        EXPECT_TRUE(t.for_dv().fits());
        EXPECT_EQ(plan.launches[1].grid, 6u);  // three n_blocks, of dk and of dv
        EXPECT_EQ(plan.launches[2].entry, plan::EntryId::dq);
        EXPECT_EQ(plan.launches[2].grid, 1u);  // two m_blocks of 128 queries
        continue;
      }
      EXPECT_GE(t.q_stages, 2);
      EXPECT_GE(t.dq_stages, 2);
      EXPECT_EQ(plan.launches[1].grid, 3u);  // n_blocks of 128 keys
      EXPECT_EQ(plan.launches[2].block, 128u);
    }
  }
}

// Two CTAs share an MMA if the last CTA then has less work. Problems with few keys are excluded, and n_blocks whose
// second half often has no key. A limit of multiprocessors must not decide.
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
  // Wide keys: one CTA would need two passes.
  for (Problem wide : {dense({.seqlen_q = 100, .seqlen_k = 100, .head_dim = 136, .head_dim_v = 8}),
                       dense({.seqlen_q = 8192, .seqlen_k = 300, .head_dim = 192, .head_dim_v = 128})}) {
    wide.batch_invariant = true;
    EXPECT_TRUE(pairs(wide));
  }
  // With batch_invariant, other sequences must not decide.
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

// Two CTAs with separate keys exchange dS if head_dim exceeds 128 and only the device knows lengths. Keys that fit one
// CTA are excluded, unless batch_invariant forbids a choice by lengths.
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

size_t bytes_of(const plan::Plan& plan, std::string_view name) {
  for (const plan::Region& region : plan.regions) {
    if (region.name == name) return region.bytes;
  }
  return 0;
}

Problem wide(int64_t batch, int64_t seqlen, int64_t heads_q, int64_t heads_k) {
  return backward(dense({.batch = batch,
                         .seqlen_q = seqlen,
                         .seqlen_k = seqlen,
                         .heads_q = heads_q,
                         .heads_k = heads_k,
                         .head_dim = 256,
                         .head_dim_v = 256}));
}

plan::BackwardSchedule hopper_schedule(const Problem& p) { return plan::make_plan(p, hopper()).backward; }

// The n_blocks that m_block `m` sees in a problem of equal lengths.
int64_t count_visible(const Problem& p, const Sm90BackwardConfig& config, int64_t m) {
  const int64_t keys = config.cta_keys();
  const int64_t first = p.window_left < 0 ? 0 : std::max<int64_t>(m * config.tile_m - p.window_left, 0);
  const int64_t end = p.window_right < 0 ? p.seqlen_k : std::min((m + 1) * config.tile_m, p.seqlen_k);
  return (end - 1) / keys - first / keys + 1;
}

// Chunks of dS cover all tiles, hold all visible n_blocks, and stay within the tuned memory.
void expect_sound_ds_chunks(const Problem& p) {
  const plan::Plan plan = plan::make_plan(p, hopper());
  const plan::BackwardSchedule& t = plan.backward;
  ASSERT_TRUE(t.tile.ds_gmem);
  const Sm90BackwardConfig config = t.tile.for_hopper();
  EXPECT_FALSE(config.cluster2());
  EXPECT_TRUE(config.fits());
  EXPECT_TRUE(t.chunk.heads == 1 || t.chunk.n_blocks == t.n_blocks);
  EXPECT_EQ(t.ds_chunks,
            plan::ceil_div(p.batch * p.heads_q, t.chunk.heads) * plan::ceil_div(t.n_blocks, t.chunk.n_blocks));
  EXPECT_LE(t.grid, hopper().sm_count);

  // The main kernel and the kernel of dq run once per chunk.
  ASSERT_EQ(plan.launches.size(), t.m_splits > 1 ? 4u : 3u);
  EXPECT_EQ(plan.repeat.begin, 1u);
  EXPECT_EQ(plan.repeat.end, 3u);
  EXPECT_EQ(plan.repeat.times, t.ds_chunks);
  EXPECT_EQ(plan.launches[1].grid, static_cast<uint32_t>(t.grid));
  EXPECT_EQ(plan.launches[2].entry, plan::EntryId::dq);
  EXPECT_EQ(plan.launches[2].grid, static_cast<uint32_t>(t.dq_ctas));

  const plan::Sm90BackwardTuning& tuning = plan::kTuning.sm90.backward;
  const int64_t gradients =
      p.batch * (p.seqlen_q * p.heads_q * p.head_dim + p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v));
  const int64_t block_bytes = int64_t{2} * config.cta_keys() * config.tile_m;
  EXPECT_EQ(bytes_of(plan, "workspace.ds"), static_cast<size_t>(t.chunk.bytes));
  EXPECT_LE(t.chunk.bytes,
            std::max({tuning.ds_bytes_per_gradient * gradients, 512 * block_bytes, tuning.min_ds_bytes}));
  const auto dq_floats = static_cast<size_t>(p.batch * p.heads_q * p.seqlen_q * config.head_dim);
  EXPECT_EQ(bytes_of(plan, "workspace.dq_accum"), t.accumulates_dq ? sizeof(float) * dq_floats : 0);

  const int64_t m_blocks = t.sequence_m_blocks;
  for (int64_t m = 0; m < m_blocks; ++m) {
    const int64_t partner = m_blocks - 1 - m;  // shares the row of dS
    const int64_t n_blocks =
        count_visible(p, config, m) + (t.chunk.pack_triangle && partner != m ? count_visible(p, config, partner) : 0);
    ASSERT_LE(std::min<int64_t>(n_blocks, t.chunk.n_blocks * (t.chunk.pack_triangle ? 2 : 1)), t.chunk.row_n_blocks)
        << m;
  }
}

// dS of wide heads goes through global memory in chunks of whole heads, or without a mask of n_blocks of one head.
TEST(BackwardPlan, DsChunks) {
  for (Problem p : {wide(16, 4096, 8, 8), wide(1, 16384, 8, 8), wide(1, 32768, 4, 4), wide(8, 4096, 16, 2)}) {
    SCOPED_TRACE(testing::Message() << p.seqlen_k << ", heads " << p.heads_q);
    expect_sound_ds_chunks(p);
    EXPECT_GT(hopper_schedule(p).ds_chunks, 1);
    p.window_right = 0;
    p.window_left = 1000;  // rows of few n_blocks
    expect_sound_ds_chunks(p);
    EXPECT_LT(hopper_schedule(p).chunk.row_n_blocks, hopper_schedule(p).n_blocks);
  }
  EXPECT_FALSE(hopper_schedule(wide(4, 4096, 8, 8)).accumulates_dq);
  EXPECT_TRUE(hopper_schedule(wide(1, 16384, 8, 8)).accumulates_dq);  // more n_blocks than one sum

  // Under a causal mask two m_blocks share a row.
  Problem p = wide(1, 16384, 8, 8);
  p.window_right = 0;
  expect_sound_ds_chunks(p);
  EXPECT_TRUE(hopper_schedule(p).chunk.pack_triangle);
  // A head that does not fit is divided only if its tiles have one length.
  p = wide(1, 32768, 4, 4);
  EXPECT_LT(hopper_schedule(p).chunk.n_blocks, hopper_schedule(p).n_blocks);
  p.window_right = 0;
  EXPECT_FALSE(hopper_schedule(p).tile.ds_gmem);
  EXPECT_TRUE(hopper_schedule(p).tile.for_hopper().cluster2());

  // Without dq all tiles are one chunk, and no dS is in memory.
  p = wide(1, 4096, 32, 2);
  p.dq = {};
  EXPECT_EQ(plan::make_plan(p, hopper()).repeat.times, 1);
  EXPECT_EQ(bytes_of(plan::make_plan(p, hopper()), "workspace.ds"), 0u);
  p = wide(1, 4096, 2, 2);
  p.batch_invariant = true;
  EXPECT_FALSE(hopper_schedule(p).tile.ds_gmem);
  EXPECT_FALSE(hopper_schedule(wide(1, 64, 2, 2)).tile.ds_gmem);  // one n_block
}

// Blackwell: a chunk has whole key heads of all sequences within the tuned memory, or n_blocks of one key head.
TEST(BackwardPlan, DsChunksOfBlackwell) {
  const plan::Sm100BackwardTuning& tuning = plan::kTuning.sm100.backward;
  constexpr int64_t kBlockBytes = int64_t{2} * 128 * 128;
  const auto expect_sound = [&](Problem p, bool divides_heads) {
    SCOPED_TRACE(testing::Message() << p.seqlen_k << ", heads " << p.heads_q << ", batch " << p.batch);
    const plan::Plan plan = plan::make_plan(p, blackwell());
    const plan::BackwardSchedule& t = plan.backward;
    EXPECT_TRUE(t.tile.ds_gmem && t.tile.two_pass);
    EXPECT_EQ(t.chunk.n_blocks < t.n_blocks, divides_heads);
    EXPECT_EQ(t.accumulates_dq, divides_heads);
    EXPECT_EQ(t.chunk.heads % p.group(), 0);
    EXPECT_TRUE(!divides_heads || t.chunk.heads == p.group());
    EXPECT_EQ(t.ds_chunks, plan::ceil_div(p.heads_q, t.chunk.heads) * plan::ceil_div(t.n_blocks, t.chunk.n_blocks));
    EXPECT_EQ(plan.repeat.times, t.ds_chunks);
    EXPECT_EQ(bytes_of(plan, "workspace.ds"),
              static_cast<size_t>(t.chunk.heads * t.m_blocks * t.chunk.row_n_blocks * kBlockBytes));
    const int64_t elements =
        p.batch * (p.seqlen_q * p.heads_q * p.head_dim + p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v));
    const int64_t heads = t.chunk.heads, n_blocks = t.chunk.n_blocks;
    if (t.chunk.bytes > std::max(tuning.ds_bytes_per_gradient * elements, tuning.min_ds_bytes)) {
      EXPECT_LE(t.chunk.bytes, tuning.max_ds_bytes);
      EXPECT_LT(p.batch * heads / p.group() * n_blocks, tuning.order.sms + p.batch);
    }
    p.sm_limit = 3;
    const plan::ChunkSizes limited = plan::make_plan(p, blackwell()).backward.chunk;
    EXPECT_TRUE(limited.heads == heads && limited.n_blocks == n_blocks);
  };
  expect_sound(wide(1, 4096, 16, 16), false);
  expect_sound(wide(8, 4096, 16, 2), true);
  expect_sound(wide(1, 16384, 8, 8), false);
  expect_sound(wide(1, 32768, 4, 1), true);
  expect_sound(wide(1, 8192, 32, 2), false);  // fewer tiles than SMs
  Problem p = wide(1, 32768, 4, 1);
  p.window_right = 0, p.window_left = 1000;  // rows of few n_blocks
  expect_sound(p, false);
  EXPECT_EQ(plan::make_plan(p, blackwell()).backward.chunk.row_n_blocks, 10);
  p.dq = {};  // all tiles are one chunk, and no dS is in memory
  EXPECT_EQ(plan::make_plan(p, blackwell()).repeat.times, 1);
  EXPECT_EQ(bytes_of(plan::make_plan(p, blackwell()), "workspace.ds"), 0u);
}

// Tiles of a group's query heads add dk and dv in their order. Under a causal mask a tile may have two query heads, if
// tiles are short and many. Without a mask it has as many as leave a wave of tiles.
TEST(BackwardPlan, QueryHeadsOfDsChunks) {
  Problem p = wide(1, 4096, 16, 2);
  EXPECT_TRUE(hopper_schedule(p).tile.for_hopper().split_q_heads);
  EXPECT_EQ(hopper_schedule(p).tiles, p.heads_k * hopper_schedule(p).n_blocks);
  p = wide(1, 1024, 16, 2);
  EXPECT_EQ(hopper_schedule(p).tiles, 8 * hopper_schedule(p).n_blocks);
  const auto heads_of_tile = [](int64_t seqlen, int64_t heads_q, int64_t heads_k, int64_t left) {
    Problem causal = wide(1, seqlen, heads_q, heads_k);
    causal.window_right = 0, causal.window_left = left;
    const plan::BackwardSchedule t = hopper_schedule(causal);
    EXPECT_TRUE(t.tile.for_hopper().split_q_heads);
    EXPECT_EQ(causal.group() % t.m_splits, 0);
    EXPECT_EQ(t.tiles, causal.heads_k * t.m_splits * t.n_blocks);
    EXPECT_EQ(t.chunk.heads % (causal.group() / t.m_splits), 0);
    causal.dq = {};
    EXPECT_EQ(hopper_schedule(causal).m_splits, t.m_splits);  // dk and dv have the same bits
    return causal.group() / t.m_splits;
  };
  constexpr int64_t kNoBound = TANDEM_UNBOUNDED;
  EXPECT_EQ(heads_of_tile(4096, 32, 2, kNoBound), 2);
  EXPECT_EQ(heads_of_tile(2560, 32, 2, kNoBound), 2);
  EXPECT_EQ(heads_of_tile(4096, 32, 2, 1000), 1);
  EXPECT_EQ(heads_of_tile(4096, 6, 2, kNoBound), 1);  // an odd group
  EXPECT_EQ(heads_of_tile(1024, 8, 2, kNoBound), 1);
  const int64_t most = plan::kTuning.sm90.backward.two_head_tile_max_m_blocks * Sm90BackwardConfig{}.tile_m;
  EXPECT_EQ(heads_of_tile(2 * most, 32, 2, kNoBound), 1);
}

// The minimum number of heads that keep all multiprocessors busy for the longest n_block run last, with n_blocks from
// the first.
void expect_last_heads_fill(const plan::BackwardSchedule& t, int64_t heads, const gpu::Properties& device) {
  const int64_t last = heads - t.spt_heads, needed = 2 * device.sm_count / t.tile.ctas;
  EXPECT_GE(last * (t.n_blocks + 1), needed);
  EXPECT_LT((last - 1) * (t.n_blocks + 1), needed);
}

// Under a causal mask the shortest n_block of a head runs first, except for the last heads. The L2 cache must hold the
// m_blocks of a head, and a limit of multiprocessors must not decide.
TEST(BackwardPlan, ShortestFirst) {
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
  const int64_t spt_heads = schedule(p).spt_heads;
  expect_last_heads_fill(schedule(p), 128, hopper());
  p.sm_limit = 3;
  EXPECT_EQ(schedule(p).spt_heads, spt_heads);
  p.batch_invariant = true;
  EXPECT_EQ(schedule(p).spt_heads, 128);
  const auto spt = [&schedule](const Problem& of) { return schedule(of).tile.for_hopper().spt; };
  const plan::Sm90BackwardTuning& tuning = plan::kTuning.sm90.backward;
  EXPECT_FALSE(spt(causal(tuning.spt_min_grouped_seqlen / 2, 128, 64)));
  EXPECT_FALSE(spt(causal(tuning.spt_min_grouped_seqlen, 128, 64)));  // short iterations
  Problem grouped = causal(tuning.spt_min_grouped_seqlen, 128, 64);
  grouped.head_dim = grouped.head_dim_v = 128;
  EXPECT_TRUE(spt(grouped));
  const int64_t fitting = tuning.spt_l2_bytes / plan::query_bytes(64, 64);
  EXPECT_TRUE(spt(causal(fitting, 4, 4)));
  EXPECT_FALSE(spt(causal(2 * fitting, 4, 4)));
  EXPECT_TRUE(spt(causal(1000, 4, 4)));
  Problem window = causal(4096, 128, 128);
  window.window_left = 100;
  EXPECT_FALSE(spt(window));
  // batch_invariant decides without the lengths, although a single query sees all keys.
  Problem one = causal(300, 4, 4);
  one.batch_invariant = true;
  EXPECT_TRUE(spt(one));
  one = dense({.seqlen_q = 1, .seqlen_k = 300, .head_dim = 64});
  one.window_right = 0;
  one.batch_invariant = true;
  EXPECT_TRUE(spt(one));
}

// On Blackwell query heads that share keys run together, so that the cache must hold all their m_blocks.
TEST(BackwardPlan, ShortestFirstOnBlackwell) {
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
  const int64_t spt_heads = schedule(p).spt_heads;
  expect_last_heads_fill(schedule(p), 128, blackwell());
  p.sm_limit = 3;
  EXPECT_EQ(schedule(p).spt_heads, spt_heads);
  p.batch_invariant = true;
  EXPECT_EQ(schedule(p).spt_heads, 128);
  p = causal(4096, 64, 64, 128);
  EXPECT_TRUE(schedule(p).tile.ctas == 2 && schedule(p).tile.spt);
  expect_last_heads_fill(schedule(p), 64, blackwell());
  const int64_t l2_bytes = plan::kTuning.sm100.backward.spt_l2_bytes;
  const int64_t fitting = l2_bytes / plan::query_bytes(128, 128);
  EXPECT_TRUE(schedule(causal(fitting / 8, 64, 8, 128)).tile.spt);
  EXPECT_FALSE(schedule(causal(fitting / 4, 64, 8, 128)).tile.spt);
  EXPECT_FALSE(schedule(causal(4096, 64, 64, 256)).tile.spt);  // tiles with dS in global memory do not wait
  EXPECT_FALSE(schedule(causal(2 * fitting, 4, 4, 128)).tile.spt);
  p = causal(4096, 64, 64, 128);
  p.window_left = 100;
  EXPECT_FALSE(schedule(p).tile.spt);
  p = causal(300, 8, 2, 64);
  p.batch_invariant = true;
  EXPECT_FALSE(schedule(p).tile.spt);
}

// Grouped query heads then run one by one, and the workspace has dk and dv of a key head once.
TEST(BackwardPlan, ShortestFirstByQueryHead) {
  Problem p = dense({.batch = 2, .seqlen_q = 4096, .seqlen_k = 4096, .heads_q = 64, .heads_k = 8, .head_dim = 128});
  p.head_dim_v = 128;
  p.window_right = 0;
  const plan::BackwardSchedule t = plan::make_plan(backward(p), hopper()).backward;
  EXPECT_TRUE(t.tile.for_hopper().split_q_heads && t.tile.for_hopper().m_split);
  EXPECT_EQ(t.m_splits, p.group());
  EXPECT_EQ(t.tiles, t.n_blocks * p.batch * p.heads_q);
  expect_last_heads_fill(t, p.batch * p.heads_q, hopper());
  EXPECT_EQ(t.dkv_semaphore_count, 32 * 2 * 8 * 4);
  p.batch_invariant = true;
  EXPECT_FALSE(plan::make_plan(backward(p), hopper()).backward.tile.for_hopper().spt);
}

// If a tile has both query heads of a group, it stores dk and dv, and the workspace has no sums of them.
TEST(BackwardPlan, ATileOfAWholeGroupStoresDkAndDv) {
  struct {
    int64_t batch, seqlen_q, seqlen_k, heads_q, heads_k;
  } const shapes[] = {{16, 768, 768, 6, 3}, {30, 128, 384, 32, 16}};
  for (const auto& s : shapes) {
    Problem p = dense({s.batch, s.seqlen_q, s.seqlen_k, s.heads_q, s.heads_k, 256});
    p.head_dim_v = 256;
    p.window_right = 0;
    plan::Tuning tuning;
    tuning.sm90.backward.ds_chunk_tiles = 512;
    const plan::Plan plan = plan::make_plan(backward(p), hopper(), tuning);
    const Sm90BackwardConfig& config = plan.backward.tile.for_hopper();
    EXPECT_TRUE(config.ds_gmem() && config.split_q_heads);
    EXPECT_GT(plan.backward.ds_chunks, 1);
    EXPECT_EQ(plan.backward.m_splits, 1);
    EXPECT_FALSE(config.m_split);
    for (const plan::Region& region : plan.regions) EXPECT_STRNE(region.name, "workspace.dkv_accum");
  }
}

// Up to 320 columns of dk and dv, warpgroups have separate keys if dS may go through global memory.
TEST(BackwardPlan, QSubtilesOfHopper) {
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
  EXPECT_GE(t.q_stages, 2);
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.tile.k_box, 64);
  for (const int64_t seqlen : {4096, 32768}) {
    p = backward(dense({.seqlen_q = seqlen, .seqlen_k = seqlen, .heads_q = 16, .heads_k = 16, .head_dim = 192}));
    expect_sound_ds_chunks(p);
    p.window_right = 0;
    expect_sound_ds_chunks(p);
  }
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
  // One n_block needs no dS in memory.
  EXPECT_FALSE(config(backward(dense({.seqlen_q = 300, .seqlen_k = 128, .head_dim = 192}))).q_subtiles());
}

// Otherwise one warpgroup computes scores for two warpgroups that accumulate, if registers suffice. Options that change
// scores need too many registers.
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

// Under a causal mask n_blocks of grouped heads are long and unequal. If n_blocks are few, the query heads are divided
// between CTAs. A limit of multiprocessors, and with batch_invariant other sequences, must not decide.
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
  for (const int64_t group : {2, 3, 8}) {
    const int parts = m_splits(2048, 8 * group, 8, true);
    EXPECT_GT(parts, 1) << group;
    EXPECT_EQ(group % parts, 0) << group;
  }
  EXPECT_EQ(m_splits(2048, 64, 8, false), 1);  // n_blocks of one length
  EXPECT_EQ(m_splits(2048, 64, 8, true, 256), 1);
  EXPECT_EQ(m_splits(8192, 64, 8, true), 8);  // shortest first: query heads one by one
  EXPECT_EQ(m_splits(2048, 8, 8, true), 1);   // heads without a group
}

// Tiles of one length that slightly exceed whole waves: only the last n_blocks are split, and they fill their waves.
TEST(BackwardPlan, TheLastTilesAreSplit) {
  Problem p = backward(dense({.seqlen_q = 8576, .seqlen_k = 8576, .heads_q = 8, .heads_k = 2, .head_dim = 128}));
  const plan::BackwardSchedule t = plan::make_plan(p, hopper()).backward;
  EXPECT_GT(t.unsplit_tiles, 0);
  EXPECT_EQ(t.unsplit_tiles % hopper().sm_count, 0);
  EXPECT_EQ(t.unsplit_tiles + t.split_n_blocks, 2 * t.n_blocks);
  EXPECT_EQ(t.tiles, t.unsplit_tiles + t.split_n_blocks * t.m_splits);
  EXPECT_GT(t.m_splits, 1);
  p.sm_limit = 5;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.unsplit_tiles, t.unsplit_tiles);
  p.batch_invariant = true;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.unsplit_tiles, 0);
  p.batch_invariant = false, p.window_right = 0;
  EXPECT_EQ(plan::make_plan(p, hopper()).backward.unsplit_tiles, 0);
}

}  // namespace
}  // namespace tandem::test
