// Splits of the keys: the caller's number and the plan's choice, with every option of the forward.
#include "kernels/on_gpu.h"
#include "plan/plan.h"

namespace tandem::test {
namespace {

const std::string kShort = "--dtype bf16 --batch 2 --heads-q 4 --heads-k 2 --seqlen-q 70 --seqlen-k 700 ";

TEST(KernelsSplits, EveryOption) {
  const char* const options[] = {
      "",
      "--causal 1",
      "--causal 1 --top-left 1",
      "--left 90",
      "--left 200 --right 30",
      "--left 40 --right -20",
      "--sink f32",
      "--sink same --causal 1 --top-left 1 --seqlen-k 300",
      "--softcap 5",
      "--alibi batch --causal 1",
      "--bias f32 --bias-inf 1",
      "--bias bool --bias-shape b1ij",
      "--dropout 0.3 --causal 1",
      "--scale -0.2",
      "--values large --causal 1",
      "--values needle20",
      "--max-scores 1 --causal 1",
      "--float32 o --lse 0",
      "--score-mod score*temperature+table[head,clamp(q-k+4,0,8)]",
      "--mask-mod (q^k)&3!=0",
      "--used-q 50,0 --used-k 600,3",
      "--used-k 0,700 --sink f32",
      "--explicit 1 --diagonals 400,-60 --causal 1",
  };
  std::vector<CheckedCase> cases;
  for (const char* option : options)
    cases.emplace_back(kShort + (cases.size() % 2 ? "--splits 5 " : "--splits 2 ") + option);
  expect_all_good(cases);
}

TEST(KernelsSplits, EverySize) {
  expect_all_good(
      {{"--dtype bf16 --head-dim 64 --head-dim-v 64 --seqlen-q 1 --seqlen-k 1500 --heads-q 8 --splits 4"},
       {"--dtype f16 --head-dim 64 --head-dim-v 64 --seqlen-q 200 --seqlen-k 130 --causal 1 --splits 2"},
       {"--dtype bf16 --head-dim 80 --head-dim-v 80 --seqlen-q 3 --seqlen-k 1000 --causal 1 --heads-q 6 --heads-k 2 "
        "--splits 128"},
       {"--dtype bf16 --head-dim 128 --head-dim-v 128 --seqlen-q 300 --seqlen-k 257 --heads-q 3 --heads-k 3 --splits "
        "3"},
       {"--dtype f16 --head-dim 192 --head-dim-v 128 --seqlen-q 200 --seqlen-k 300 --causal 1 --splits 2"},
       {"--dtype bf16 --head-dim 256 --head-dim-v 256 --seqlen-q 130 --seqlen-k 200 --heads-q 2 --splits 4"},
       // More splits than combine_by_cta() copies at once.
       {"--dtype f16 --head-dim 16 --head-dim-v 16 --seqlen-q 1 --seqlen-k 18000 --splits 140 --float32 o"}});
}

// The more rows, the fewer threads merge a row: several CTAs in the other tests, a warp and 8 lanes here.
TEST(KernelsSplits, LanesOfMerge) {
  std::vector<CheckedCase> cases;
  for (const char* dims : {"8", "64", "96", "128", "256"})
    cases.emplace_back("--dtype bf16 --head-dim " + std::string(dims) + " --head-dim-v " + dims +
                       " --seqlen-q 70 --seqlen-k 900 --heads-q 6 --heads-k 2 --splits 5 --causal 1");
  cases.emplace_back("--dtype f16 --head-dim 128 --head-dim-v 128 --seqlen-q 9 --seqlen-k 500 --splits 3 --float32 o");
  for (const int lanes : {8, 32}) {
    plan::Tuning tuning;
    tuning.sm90.forward_order.combine_few_rows = tuning.sm100.forward_order.combine_few_rows = 0;
    if (lanes == 8) tuning.sm90.forward_order.combine_many_rows = tuning.sm100.forward_order.combine_many_rows = 0;
    const ForcedTuning forced(tuning);
    expect_all_good(cases);
    EXPECT_EQ(plan_of_case(TANDEM_FORWARD, cases.back().flags, tuning).forward.combine_lanes, lanes);
  }
}

TEST(KernelsSplits, PackedSequences) {
  const std::string packed = "--dtype bf16 --packed 1 --heads-q 4 --heads-k 2 --lengths-q 1,130,0,40 ";
  expect_all_good({{packed + "--lengths-k 900,130,50,0 --splits 3"},
                   {packed + "--lengths-k 900,130,50,600 --causal 1 --splits 4"},
                   {packed + "--lengths-k 900,500,50,600 --left 300 --sink f32 --splits 4 --used-q 1,100,0,7"},
                   {packed + "--lengths-k 1,2,3,900 --splits 2 --max-seqlen 400"}});
}

// Splits have whole n_blocks. A larger number of splits means one n_block per split.
TEST(KernelsSplits, CallersNumber) {
  const auto splits = [](int number) {
    return plan_of_case(TANDEM_FORWARD, kShort + "--splits " + std::to_string(number)).forward.splits;
  };
  EXPECT_EQ(splits(1), 1);
  EXPECT_EQ(splits(2), 2);
  const plan::Plan most = plan_of_case(TANDEM_FORWARD, kShort + "--splits 128");
  EXPECT_EQ(most.forward.split_n_blocks, 1);
  EXPECT_EQ(most.forward.splits, (700 + most.forward.tile.tile_n - 1) / most.forward.tile.tile_n);
}

// Few tiles with many keys are split, whatever the limit of SMs. Problems with enough tiles or few keys are not split.
TEST(KernelsSplits, PlansChoice) {
  const std::string decode = "--dtype bf16 --heads-q 8 --heads-k 1 --seqlen-q 1 ";
  const int splits = plan_of_case(TANDEM_FORWARD, decode + "--seqlen-k 60000").forward.splits;
  EXPECT_GT(splits, 8);
  EXPECT_EQ(plan_of_case(TANDEM_FORWARD, decode + "--seqlen-k 60000 --sm-limit 2").forward.splits, splits);
  EXPECT_EQ(plan_of_case(TANDEM_FORWARD, decode + "--seqlen-k 60000 --splits 1").forward.splits, 1);
  EXPECT_EQ(plan_of_case(TANDEM_FORWARD, decode + "--seqlen-k 60000 --invariant 1").forward.splits, 1);
  EXPECT_EQ(plan_of_case(TANDEM_FORWARD, decode + "--seqlen-k 100").forward.splits, 1);
  EXPECT_EQ(plan_of_case(TANDEM_FORWARD, decode + "--seqlen-k 60000 --batch 200").forward.splits, 1);
  expect_all_good({{decode + "--seqlen-k 5000"}, {decode + "--seqlen-k 5000 --causal 1 --heads-k 2 --batch 2"}});
}

// A sequence has the same bits with fewer SMs and with other neighbours.
TEST(KernelsSplits, Bits) {
  const auto bits = [](const std::string& flags) { return Repeated(kServed + flags).run(); };
  const std::string flags = kShort + "--splits 3 --causal 1 --values large ";
  EXPECT_EQ(bits(flags), bits(flags + "--sm-limit 4"));
}

}  // namespace
}  // namespace tandem::test
