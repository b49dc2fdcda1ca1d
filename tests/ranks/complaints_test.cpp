// Runs the problems of reports about other implementations of context parallelism. Each test names the report.
#include <gtest/gtest.h>

#include <string>

#include "ranks/group.h"
#include "ranks/shards.h"

namespace tandem::test {
namespace {

constexpr int32_t kExecutions[] = {TANDEM_CP_GATHER, TANDEM_CP_RING, TANDEM_CP_HEADS};

void expect_accurate(const std::string& flags, Division division) {
  for (const int32_t execution : kExecutions) {
    division.execution = execution;
    const Verdict verdict = run_case(from_flags(flags), engine_on_ranks(division));
    EXPECT_EQ(verdict.failure + verdict.refusal, "") << division.text();
  }
}

// Documents that do not divide by twice the ranks lost keys, and rows were zero.
TEST(RankComplaints, TransformerEngine3331And1930TailPadding) {
  const std::string flags = "--packed 1 --lengths-q 17,3,1,0,30,29 --lengths-k 17,3,1,0,30,29 --causal 1";
  for (int32_t layout = 0; layout < 5; ++layout) expect_accurate(flags, {2, layout});
}

// Packed documents on 15 ranks exceeded the tolerance of bfloat16.
TEST(RankComplaints, TransformerEngine3489FifteenRanks) {
  expect_accurate("--packed 1 --lengths-q 61,1,44,29 --lengths-k 61,1,44,29 --causal 1 --dtype bf16", {15});
}

// A ring refused sinks and windows.
TEST(RankComplaints, TransformerEngine2541SinksAndWindowsInEveryExecution) {
  expect_accurate(
      "--packed 1 --lengths-q 50,9 --lengths-k 50,9 --heads-q 4 --heads-k 2 --causal 1 --left 12 --sink f32", {4});
}

// A missing size disabled context parallelism, and each rank saw only its own keys.
TEST(RankComplaints, MegatronBridge2667RanksReceiveKeys) {
  Instance in(from_flags("--packed 1 --lengths-q 64 --lengths-k 64"));
  Outputs outputs = in.outputs(TANDEM_FORWARD);
  const Problem p = in.problem(TANDEM_FORWARD, &outputs);
  const CpPlan plan = plan_of(p, {4});
  ThreadGroup group(4);
  on_ranks(4, [&](int32_t rank) { return run_rank(p, {plan.get(), group.transport(rank)}); });
  for (int32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(group.received(r), 48 * p.heads_k * (p.head_dim + p.head_dim_v) * size_of(p.k.dtype));
  }
}

// The number of ranks was limited to the number of key heads.
TEST(RankComplaints, PrimeRl3042MoreRanksThanKeyHeads) {
  expect_accurate("--packed 1 --lengths-q 40 --lengths-k 40 --heads-q 8 --heads-k 2 --causal 1", {8});
  expect_accurate("--packed 1 --lengths-q 40 --lengths-k 40 --heads-q 6 --heads-k 2 --causal 1", {4});
  expect_accurate("--packed 1 --lengths-q 40 --lengths-k 40 --heads-q 6 --heads-k 3 --causal 1", {8});
}

// The backward transposed keys and values twice. Different heads, head_dim and lengths show such an error.
TEST(RankComplaints, Diffusers14338GradientsOfUnevenShapes) {
  expect_accurate("--batch 2 --seqlen-q 13 --seqlen-k 29 --heads-q 6 --heads-k 3 --head-dim 24 --head-dim-v 8", {3});
}

// Parts were rounded to bfloat16 before they were merged.
TEST(RankComplaints, RingFlashAttention42PartsAreFloat32) {
  expect_accurate("--packed 1 --lengths-q 300 --lengths-k 300 --dtype bf16 --head-dim 32 --head-dim-v 32", {8});
}

// Each document had to divide by twice the ranks.
TEST(RankComplaints, Torchtitan2536And2543AnyLengths) {
  for (const int32_t ranks : {3, 7}) {
    expect_accurate("--packed 1 --lengths-q 7,13,1,0,31 --lengths-k 7,13,1,0,31 --causal 1",
                    {ranks, TANDEM_CP_PER_DOCUMENT});
  }
}

// Packed documents attended to each other.
TEST(RankComplaints, Maxtext4476DocumentsAreSeparate) {
  expect_accurate("--packed 1 --lengths-q 9,20,1,14 --lengths-k 9,20,1,14", {3});
}

// A shard of another plan gave wrong numbers without a message.
TEST(RankComplaints, AShardOfAnotherPlanIsRefused) {
  Instance in(from_flags("--packed 1 --lengths-q 21 --lengths-k 21"));
  Outputs outputs = in.outputs(TANDEM_FORWARD);
  const Problem p = in.problem(TANDEM_FORWARD, &outputs);
  const CpPlan plan = plan_of(p, {2}), other = plan_of(p, {3});
  ThreadGroup group(2), others(3, std::chrono::milliseconds(10));
  const auto errors = on_ranks(2, [&](int32_t rank) {
    std::string error;
    // The tensors are the shards of 3 ranks, and the call has the plan of 2 ranks.
    run_rank(p, {other.get(), others.transport(rank)}, [&](tandem_attention_args& shard) {
      const tandem_cp_args args{sizeof(tandem_cp_args), plan.get(), group.transport(rank), 0, 0, &shard};
      if (tandem_cp_forward(nullptr, &args) != TANDEM_OK) error = tandem_last_error();
      shard.accumulate = 1;  // ends the outer call
    });
    return error;
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error.substr(0, error.find(" of rank")).substr(0, 22), "q rows (7) must be the") << error;
  }
}

}  // namespace
}  // namespace tandem::test
