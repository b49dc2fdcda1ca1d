// Forces every schedule that sizes choose at small sizes: schedules of wide heads, chunks of dS, tiles of two query
// heads. Also forces shortest-first order, two CTAs, and the rows of the forward's table.
#include <iterator>
#include <span>

#include "kernels/on_gpu.h"
#include "plan/plan.h"
#include "problem/problem.h"
#include "reference/reference.h"

namespace tandem::test {
namespace {

using Schedule = Sm90BackwardConfig::Schedule;

bool is_hopper() { return the_gpu()->device().properties().compute_major == 9; }

void expect_good_with(const plan::Tuning& tuning, const std::vector<std::string>& cases) {
  const ForcedTuning forced(tuning);
  std::vector<CheckedCase> checked;
  for (const std::string& flags : cases) checked.emplace_back(flags);
  expect_all_good(checked);
}

// Judges cases after expect(schedule) has checked the schedule of each plan.
template <class Expect>
void expect_good_schedules(const plan::Tuning& tuning, const std::vector<std::string>& cases, const Expect& expect) {
  for (const std::string& flags : cases) {
    SCOPED_TRACE(flags);
    expect(plan_of_case(TANDEM_BACKWARD, flags, tuning).backward);
  }
  expect_good_with(tuning, cases);
}

std::vector<std::string> with_prefix(const std::string& prefix, std::span<const char* const> flags) {
  std::vector<std::string> cases;
  for (const char* rest : flags) cases.push_back(prefix + rest);
  return cases;
}

const std::string kQkv = "--dtype bf16 --gradients qkv ";
const std::string kWide = "--dtype bf16 --gradients qkv --head-dim 256 --head-dim-v 256 ";
const std::string kMla = "--dtype bf16 --gradients qkv --head-dim 192 --head-dim-v 128 ";

plan::Tuning with_schedule(Schedule schedule, int64_t chunk_tiles = 512) {
  plan::Tuning tuning;
  tuning.sm90.backward.schedule = schedule;
  tuning.sm90.backward.ds_chunk_tiles = chunk_tiles;
  tuning.sm90.backward.min_ds_bytes = tuning.sm90.backward.two_head_tile_min_tiles = 0;
  return tuning;
}

TEST(KernelsSchedules, WideHeads) {
  if (!is_hopper()) GTEST_SKIP();
  const char* const sizes[] = {"--seqlen-q 130 --seqlen-k 200 --causal 1 --heads-q 4 --heads-k 2 --batch 2",
                               "--seqlen-q 70 --seqlen-k 300 --heads-q 3 --heads-k 3",
                               "--seqlen-q 200 --seqlen-k 190 --left 70 --right 5 --heads-q 2 --heads-k 1"};
  for (const Schedule schedule : {Schedule::shared_p, Schedule::cluster2, Schedule::warpgroup_roles, Schedule::ds_gmem,
                                  Schedule::ds_gmem_sub_m}) {
    const bool is_narrower = schedule == Schedule::warpgroup_roles || schedule == Schedule::ds_gmem_sub_m;
    const plan::Tuning tuning = with_schedule(schedule);
    const std::vector<std::string> cases = with_prefix(is_narrower ? kMla : kWide, sizes);
    expect_good_schedules(tuning, cases,
                          [&](const plan::BackwardSchedule& t) { EXPECT_EQ(t.tile.for_hopper().schedule, schedule); });
  }
}

// n_blocks add to two or three sums of dq in turn, or each n_block has its own.
TEST(KernelsSchedules, SplitsOfDq) {
  if (!is_hopper()) GTEST_SKIP();
  const char* const sizes[] = {
      "--seqlen-q 130 --seqlen-k 600 --heads-q 4 --heads-k 2 --batch 2",
      "--seqlen-q 7 --seqlen-k 900 --heads-q 3 --heads-k 3",
      "--seqlen-q 700 --seqlen-k 700 --causal 1 --heads-q 2 --heads-k 2",
      "--seqlen-q 400 --seqlen-k 700 --left 70 --right 5 --heads-q 2 --heads-k 1",
      "--seqlen-q 200 --seqlen-k 300 --causal 1 --heads-q 4 --heads-k 2 --packed 1 --lengths-q 200,1,77 "
      "--lengths-k 300,129,0",
  };
  for (const char* dims : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 128 --head-dim-v 128 "}) {
    for (const int splits : {2, 3, 100}) {
      plan::Tuning tuning;
      tuning.sm90.backward.dq_splits = splits;
      tuning.sm90.backward.spt_l2_bytes = 0;
      const std::vector<std::string> cases = with_prefix(kQkv + dims, sizes);
      expect_good_schedules(tuning, cases, [](const plan::BackwardSchedule& t) { EXPECT_GT(t.dq_splits, 1); });
    }
  }
}

// n_blocks are fewer or more than the iterations of a tile, which are whole or parts of query heads or of iterations.
// With two SMs the order of tiles decides who waits.
TEST(KernelsSchedules, WrappedIterations) {
  if (!is_hopper()) GTEST_SKIP();
  const char* const sizes[] = {
      "--seqlen-q 700 --seqlen-k 600 --heads-q 4 --heads-k 2 --batch 2",
      "--seqlen-q 300 --seqlen-k 900 --heads-q 3 --heads-k 3 --sm-limit 2",
      "--seqlen-q 400 --seqlen-k 530 --heads-q 6 --heads-k 2 --float32 g --accumulate 1",
      "--seqlen-q 500 --seqlen-k 300 --heads-q 2 --heads-k 1 --dropout 0.3 --bias same --bias-shape 1hij",
  };
  for (const char* dims : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 96 --head-dim-v 128 "}) {
    for (const int m_splits : {1, 2, 3}) {
      plan::Tuning tuning;
      tuning.sm90.backward.wraps = true;
      tuning.sm90.backward.m_splits = m_splits;
      tuning.sm90.backward.dq_splits = m_splits == 2 ? 4 : 2;
      const std::vector<std::string> cases = with_prefix(kQkv + dims, sizes);
      expect_good_schedules(tuning, cases,
                            [](const plan::BackwardSchedule& t) { EXPECT_TRUE(t.tile.for_hopper().wraps); });
    }
  }
}

// The first tiles are whole, and the last n_blocks are split: by query heads, by iterations, and in separate sums of
// dq.
TEST(KernelsSchedules, SplitsOfTheLastTiles) {
  if (!is_hopper()) GTEST_SKIP();
  const char* const sizes[] = {
      "--seqlen-q 500 --seqlen-k 600 --heads-q 4 --heads-k 2 --batch 2",
      "--seqlen-q 700 --seqlen-k 300 --heads-q 3 --heads-k 3 --float32 g --accumulate 1",
      "--seqlen-q 700 --seqlen-k 700 --causal 1 --heads-q 2 --heads-k 2",
      "--seqlen-q 400 --seqlen-k 700 --left 70 --right 5 --heads-q 3 --heads-k 1",
      "--seqlen-q 200 --seqlen-k 300 --heads-q 4 --heads-k 2 --packed 1 --lengths-q 200,1,77 --lengths-k 300,129,0",
      "--seqlen-q 500 --seqlen-k 600 --heads-q 4 --heads-k 2 --dropout 0.3 --bias same --bias-shape 1hij",
  };
  const struct {
    const char* dims;
    int unsplit_tiles, m_splits, dq_splits;
  } forced[] = {
      {"--head-dim 64 --head-dim-v 64 ", 1, 2, 1},
      {"--head-dim 64 --head-dim-v 64 ", 3, 2, 2},
      {"--head-dim 96 --head-dim-v 80 ", 1000, 3, 1},  // one split n_block
  };
  for (const auto& f : forced) {
    plan::Tuning tuning;
    tuning.sm90.backward.unsplit_tiles = f.unsplit_tiles;
    tuning.sm90.backward.m_splits = f.m_splits;
    tuning.sm90.backward.dq_splits = f.dq_splits;
    tuning.sm90.backward.spt_l2_bytes = 0;
    const std::vector<std::string> cases = with_prefix(kQkv + f.dims, sizes);
    expect_good_schedules(tuning, cases, [](const plan::BackwardSchedule& t) {
      EXPECT_GT(t.unsplit_tiles, 0);
      EXPECT_GT(t.split_n_blocks, 0);
    });
  }
}

// A tile has some or all of the query heads that share its keys.
TEST(KernelsSchedules, TilesOfSeveralHeads) {
  if (!is_hopper()) GTEST_SKIP();
  const char* const sizes = "--seqlen-q 70 --seqlen-k 200 --heads-q 8 --heads-k 1";
  for (const int heads : {4, 8}) {
    for (const std::string& dims : {kWide, kMla}) {
      plan::Tuning tuning;
      tuning.sm90.backward.tile_heads = heads;
      const std::vector<std::string> cases = {dims + sizes, dims + sizes + " --causal 1"};
      expect_good_schedules(tuning, cases,
                            [&](const plan::BackwardSchedule& t) { EXPECT_EQ(t.chunk.tile_heads, heads); });
    }
  }
}

// Cases have parts of one to three n_blocks, parts of query heads, and n_blocks with one part. The diagonal begins
// before or after the first key, and some n_blocks see no query. With two SMs the order of tiles decides who waits.
TEST(KernelsSchedules, DiagonalParts) {
  if (!is_hopper()) GTEST_SKIP();
  const char* const sizes[] = {
      "--seqlen-q 700 --seqlen-k 700 --heads-q 4 --heads-k 2 --batch 2",
      "--seqlen-q 600 --seqlen-k 700 --heads-q 2 --heads-k 1 --sm-limit 2",
      "--seqlen-q 700 --seqlen-k 530 --heads-q 4 --heads-k 2 --float32 g --accumulate 1",
      "--seqlen-q 300 --seqlen-k 600 --heads-q 2 --heads-k 1 --dropout 0.3 --bias same --bias-shape 1hij",
      "--seqlen-q 500 --seqlen-k 500 --heads-q 2 --heads-k 1 --top-left 1 --softcap 3 --alibi batch",
  };
  const struct {
    const char* dims;
    int part_n_blocks, head_parts;
  } forced[] = {
      {"--head-dim 64 --head-dim-v 64 ", 1, 1},
      {"--head-dim 64 --head-dim-v 64 ", 2, 2},
      {"--head-dim 128 --head-dim-v 128 ", 3, 1},
      {"--head-dim 96 --head-dim-v 80 ", 100, 2},
  };
  for (const auto& f : forced) {
    plan::Tuning tuning;
    tuning.sm90.backward.part_n_blocks = f.part_n_blocks;
    tuning.sm90.backward.head_parts = f.head_parts;
    const std::vector<std::string> cases = with_prefix(kQkv + "--causal 1 " + f.dims, sizes);
    expect_good_schedules(tuning, cases, [](const plan::BackwardSchedule& t) { EXPECT_GT(t.part_n_blocks, 0); });
  }
}

// Cases have one, two or an odd number of chunks, and the last chunk is short. All or some query heads of a group are
// in one tile.
TEST(KernelsSchedules, ChunksOfDs) {
  if (!is_hopper()) GTEST_SKIP();
  const struct {
    const char* flags;
    int64_t chunk_tiles, chunks;
    int tile_heads;
  } cases[] = {
      {"--seqlen-q 130 --seqlen-k 130 --heads-q 2 --heads-k 1 --causal 1", 512, 1, 1},
      {"--seqlen-q 130 --seqlen-k 130 --heads-q 2 --heads-k 1 --causal 1 --batch 2", 4, 2, 2},
      {"--seqlen-q 100 --seqlen-k 190 --heads-q 6 --heads-k 3 --causal 1", 4, 3, 2},
      {"--seqlen-q 100 --seqlen-k 130 --heads-q 8 --heads-k 2 --causal 1 --batch 3", 10, 6, 2},
      {"--seqlen-q 70 --seqlen-k 130 --heads-q 5 --heads-k 5 --causal 1", 5, 3, 1},
      {"--seqlen-q 70 --seqlen-k 200 --heads-q 5 --heads-k 1", 8, 3, 1},
      {"--seqlen-q 190 --seqlen-k 200 --heads-q 4 --heads-k 2 --left 60 --causal 1", 7, 2, 1},
      {"--seqlen-q 150 --seqlen-k 150 --heads-q 4 --heads-k 2 --causal 1 --float32 g --accumulate 1 --batch 2", 6, 4,
       2},
      {"--seqlen-q 70 --seqlen-k 130 --heads-q 4 --heads-k 2 --causal 1 --batch 2 --bias f32 --bias-shape 1hij", 4, 4,
       2},
      {"--seqlen-q 70 --seqlen-k 200 --heads-q 3 --heads-k 3 --batch 2 --bias same --bias-shape 11ij", 8, 3, 1},
  };
  for (const auto& c : cases) {
    plan::Tuning tuning = with_schedule(Schedule::ds_gmem, c.chunk_tiles);
    if (c.tile_heads == 1) tuning.sm90.backward.two_head_tile_min_tiles = 330;
    const plan::Plan plan = plan_of_case(TANDEM_BACKWARD, kWide + c.flags, tuning);
    EXPECT_EQ(plan.backward.ds_chunks, c.chunks) << c.flags;
    const Case read = from_flags(c.flags);
    EXPECT_EQ(read.heads_q / read.heads_k / plan.backward.m_splits, c.tile_heads) << c.flags;
    expect_good_with(tuning, {kWide + c.flags});
    expect_good_with(with_schedule(Schedule::ds_gmem_sub_m, c.chunk_tiles), {kMla + c.flags});
    if (&c == cases) expect_good_with(tuning, {kWide + c.flags + " --dtype f16"});
  }
}

// A head in several parts, each with complete sums of dq.
TEST(KernelsSchedules, ChunksOfOneHead) {
  if (!is_hopper()) GTEST_SKIP();
  plan::Tuning tuning = with_schedule(Schedule::ds_gmem, 130);
  tuning.sm90.backward.ds_bytes_per_gradient = 0;
  const std::string flags = kWide + "--seqlen-q 60 --seqlen-k 17000 --heads-q 2 --heads-k 1";
  const plan::BackwardSchedule schedule = plan_of_case(TANDEM_BACKWARD, flags, tuning).backward;
  EXPECT_EQ(schedule.chunk.n_blocks, 128);
  EXPECT_EQ(schedule.ds_chunks, 2 * 3);
  expect_good_with(tuning, {flags});
}

plan::Tuning with_blackwell_chunks(int64_t chunk_tiles) {
  plan::Tuning tuning;
  tuning.sm100.backward.ds_chunk_tiles = chunk_tiles;
  return tuning;
}

// Blackwell: chunks of whole heads or of n_blocks of one head, of all sequences together. The last chunk may be short.
TEST(KernelsSchedules, ChunksOfDsOnBlackwell) {
  if (is_hopper()) GTEST_SKIP();
  const struct {
    const char* flags;
    int64_t chunk_tiles, chunks;
  } cases[] = {
      {"--head-dim 256 --head-dim-v 256 --seqlen-q 130 --seqlen-k 200 --heads-q 4 --heads-k 2 --causal 1", 512, 1},
      {"--head-dim 256 --head-dim-v 256 --seqlen-q 300 --seqlen-k 290 --heads-q 3 --heads-k 3 --batch 2", 6, 2},
      {"--head-dim 256 --head-dim-v 256 --seqlen-q 260 --seqlen-k 600 --heads-q 2 --heads-k 1 --batch 2", 2, 3},
      {"--head-dim 256 --head-dim-v 128 --seqlen-q 300 --seqlen-k 300 --heads-q 2 --heads-k 2 --causal 1", 1, 6},
      {"--head-dim 192 --head-dim-v 256 --seqlen-q 400 --seqlen-k 500 --heads-q 2 --heads-k 1 --left 150 --right 5", 1,
       4},
      {"--head-dim 128 --head-dim-v 256 --seqlen-q 140 --seqlen-k 300 --heads-q 2 --heads-k 1 --float32 g "
       "--accumulate 1",
       2, 2},
      {"--head-dim 256 --head-dim-v 256 --heads-q 4 --heads-k 2 --packed 1 --lengths-q 20,0,300,150 --lengths-k "
       "200,4,260,0 --causal 1",
       1, 6},
      {"--head-dim 256 --head-dim-v 256 --seqlen-q 200 --seqlen-k 420 --heads-q 2 --heads-k 1 --blocks hostile "
       "--mask-mod (q^k)&3!=0 --dtype f16",
       1, 4},
      {"--head-dim 256 --head-dim-v 256 --seqlen-q 70 --seqlen-k 200 --heads-q 4 --heads-k 2 --batch 2 --bias f32 "
       "--bias-shape 1hij --gradients qkvb",
       2, 2},
  };
  for (const auto& c : cases) {
    const plan::Tuning tuning = with_blackwell_chunks(c.chunk_tiles);
    const std::string flags = kQkv + c.flags;
    EXPECT_EQ(plan_of_case(TANDEM_BACKWARD, flags, tuning).backward.ds_chunks, c.chunks) << c.flags;
    expect_good_with(tuning, {flags});
  }
}

// Sums of dq pass from chunk to chunk without rounding, so that chunks do not change bits.
TEST(KernelsSchedules, ChunksKeepBitsOnBlackwell) {
  if (is_hopper()) GTEST_SKIP();
  const std::string flags = kServed + kWide + "--seqlen-q 140 --seqlen-k 500 --heads-q 2 --heads-k 1 --causal 1";
  Instance in(from_flags(flags));
  Outputs exact = in.exact_outputs(TANDEM_FORWARD);
  reference::forward(in.exact_problem(TANDEM_FORWARD, &exact));
  in.give_results(&exact);
  std::vector<std::byte> expected;
  for (const int64_t chunk_tiles : {512, 1, 3}) {
    const ForcedTuning forced(with_blackwell_chunks(chunk_tiles));
    Outputs outputs = in.outputs(TANDEM_BACKWARD);
    DeviceCall call(*the_gpu(), in, TANDEM_BACKWARD, outputs);
    call.prepare();
    call.allocate_workspace();
    call.forward(the_gpu()->stream());
    call.fetch(the_gpu()->stream());
    const std::vector<std::byte> bytes = bytes_of(outputs.dq);
    if (expected.empty()) expected = bytes;
    EXPECT_EQ(bytes == expected, true) << chunk_tiles;
  }
}

// Sums of dq over one, two and three n_blocks, which are added in order.
TEST(KernelsSchedules, SumsOfDq) {
  if (!is_hopper()) GTEST_SKIP();
  const char* const sizes[] = {
      "--seqlen-q 130 --seqlen-k 450 --heads-q 2 --heads-k 1",
      "--seqlen-q 300 --seqlen-k 300 --heads-q 2 --heads-k 2 --causal 1 --batch 2",
      "--seqlen-q 190 --seqlen-k 400 --heads-q 2 --heads-k 1 --left 130 --right 5",
      "--seqlen-q 70 --seqlen-k 330 --heads-q 3 --heads-k 3 --float32 g --accumulate 1",
  };
  for (const int n_blocks : {1, 2, 3}) {
    for (const auto& [schedule, dims] : {std::pair{Schedule::ds_gmem, kWide}, {Schedule::ds_gmem_sub_m, kMla}}) {
      plan::Tuning tuning = with_schedule(schedule);
      tuning.sm90.backward.dq_sum_n_blocks = n_blocks;
      const std::vector<std::string> cases = with_prefix(dims, sizes);
      expect_good_schedules(tuning, cases,
                            [&](const plan::BackwardSchedule& t) { EXPECT_EQ(t.chunk.sum_n_blocks, n_blocks); });
    }
  }
}

TEST(KernelsSchedules, ShortestFirst) {
  plan::Tuning tuning;
  tuning.sm90.backward.spt_min_grouped_seqlen = tuning.sm90.backward.spt_min_grouped_ctas = 1;
  tuning.sm90.backward.spt_min_grouped_waves = 0;
  tuning.sm90.backward.part_n_blocks = 0;
  tuning.sm90.backward.min_split_iterations = 1000;  // m_splits exclude spt without grouped heads
  std::vector<std::string> cases;
  for (const std::string dim : {"64", "128"}) {
    for (const char* sizes :
         {"--heads-q 4 --heads-k 2", "--heads-q 6 --heads-k 2 --batch 2", "--heads-q 3 --heads-k 3"}) {
      if (is_hopper() && dim == "64" && sizes != std::string("--heads-q 3 --heads-k 3")) continue;  // short iterations
      cases.push_back("--dtype bf16 --gradients qkv --seqlen-q 280 --seqlen-k 300 --causal 1 --head-dim " + dim +
                      " --head-dim-v " + dim + " " + sizes);
    }
  }
  expect_good_schedules(tuning, cases, [](const plan::BackwardSchedule& t) { EXPECT_TRUE(t.tile.spt); });
  tuning.sm90.backward.spt_l2_bytes = tuning.sm100.backward.spt_l2_bytes = 0;
  expect_good_schedules(tuning, cases, [](const plan::BackwardSchedule& t) { EXPECT_FALSE(t.tile.spt); });
}

TEST(KernelsSchedules, TwoCtas) {
  if (is_hopper()) GTEST_SKIP();
  for (const int64_t clocks : {int64_t{0}, int64_t{1} << 30}) {
    plan::Tuning tuning;
    tuning.sm100.backward.two_cta_clocks = clocks;
    const std::string flags = "--dtype bf16 --gradients qkv --head-dim 128 --head-dim-v 96 --seqlen-q 150 ";
    const std::vector<std::string> cases = {flags + "--seqlen-k 300 --heads-q 4 --heads-k 2 --causal 1",
                                            flags + "--seqlen-k 530 --batch 2", flags + "--seqlen-k 290 --left 50"};
    for (const std::string& c : cases)
      EXPECT_EQ(plan_of_case(TANDEM_BACKWARD, c, tuning).backward.tile.for_blackwell().two_cta, clocks == 0) << c;
    expect_good_with(tuning, cases);
  }
}

// Every form of TANDEM_SM100, with products of every width.
TEST(KernelsSchedules, SwitchesOfBlackwell) {
  if (is_hopper()) GTEST_SKIP();
  const std::string flags = "--dtype bf16 --gradients qkv --heads-q 2 --heads-k 1 --seqlen-q 140 --seqlen-k 270 ";
  const std::vector<std::string> cases = {
      flags + "--head-dim 80 --head-dim-v 112 --causal 1", flags + "--head-dim 128 --head-dim-v 128",
      flags + "--head-dim 24 --head-dim-v 160 --left 90", flags + "--head-dim 192 --head-dim-v 192 --causal 1",
      flags + "--head-dim 160 --head-dim-v 96 --causal 1"};
  for (const std::string switches :
       {"exact_n", "no_two_cta", "wait_products", "no_two_cta,wait_products,exact_n", "no_clc,no_overlap"}) {
    SCOPED_TRACE(switches);
    Env env;
    env.sm100 = switches;
    expect_good_with(plan::tuning_of(env), cases);
  }
}

// Uses every row of the table, at lengths that would choose a different row.
TEST(KernelsSchedules, RowsOfTheForward) {
  if (!is_hopper()) GTEST_SKIP();
  size_t used = 0;
  for (size_t row = 0; row < std::size(plan::kSm90TuningRows); ++row) {
    const plan::Sm90TuningRow& r = plan::kSm90TuningRows[row];
    if (r.rows == 0 && r.keys == 0 && r.query_heads == 0) continue;
    plan::Tuning tuning;
    tuning.sm90.forward_row = row;
    const bool is_capped = r.scores == plan::Scores::capped, has_bias = r.scores == plan::Scores::bias;
    const std::string flags = "--dtype bf16 --head-dim " + std::to_string(r.head_dim) + " --head-dim-v " +
                              std::to_string(r.head_dim_v) + (is_capped ? " --softcap 5" : "") +
                              (has_bias ? " --bias f32" : "") + (r.mask == plan::Mask::bounded ? " --causal 1" : "");
    expect_good_with(tuning,
                     {flags + " --seqlen-q 100 --seqlen-k 333", flags + " --seqlen-q 3 --seqlen-k 50 --batch 2"});
    ++used;
  }
  EXPECT_GT(used, 4u);
}

}  // namespace
}  // namespace tandem::test
