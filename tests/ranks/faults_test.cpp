// Errors of a call reach all ranks: disagreements, refused options, wrong shards, lost ranks.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "ranks/group.h"
#include "ranks/shards.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

const char* const kSmall = "--packed 1 --lengths-q 20,9 --lengths-k 20,9 --heads-q 2 --heads-k 1 --causal 1 --sink f32";

// One forward call whose arguments a test may change.
struct FaultyCall {
  explicit FaultyCall(const std::string& flags = kSmall, tandem_pass pass = TANDEM_FORWARD)
      : in(from_flags(flags)), outputs(in.outputs(pass)), problem(in.problem(pass, &outputs)) {}

  Instance in;
  Outputs outputs;
  Problem problem;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(RankFaults, OtherPlansAreAnErrorOnAllRanks) {
  FaultyCall call;
  const CpPlan plan = plan_of(call.problem, {3}), other = plan_of(call.problem, {3, TANDEM_CP_BALANCED, 0, 4});
  for (const int32_t execution : {TANDEM_CP_GATHER, TANDEM_CP_RING, TANDEM_CP_HEADS}) {
    ThreadGroup group(3);
    const auto errors = on_ranks(3, [&](int32_t rank) {
      return run_rank(call.problem, {(rank == 2 ? other : plan).get(), group.transport(rank), execution});
    });
    for (const std::string& error : errors) {
      EXPECT_TRUE(contains(error, "plan, shapes or options of rank 2 must equal the ones of rank 0")) << error;
    }
  }
}

TEST(RankFaults, OtherOptionsAreAnErrorOnAllRanks) {
  FaultyCall call;
  const CpPlan plan = plan_of(call.problem, {2});
  static const tandem_mod mask{sizeof(tandem_mod), "k < 5", nullptr, 0, nullptr, 0};
  const std::vector<AdjustArgs> changes = {
      [](tandem_attention_args& a) { a.softcap = 3; },     [](tandem_attention_args& a) { a.softmax_scale = 0.25; },
      [](tandem_attention_args& a) { a.sink = nullptr; },  [](tandem_attention_args& a) { a.lse = nullptr; },
      [](tandem_attention_args& a) { a.dropout_p = 0.5; }, [](tandem_attention_args& a) { a.mask_mod = &mask; },
  };
  for (const AdjustArgs& change : changes) {
    ThreadGroup group(2);
    const auto errors = on_ranks(2, [&](int32_t rank) {
      return run_rank(call.problem, {plan.get(), group.transport(rank)}, rank == 1 ? change : nullptr);
    });
    for (const std::string& error : errors) EXPECT_TRUE(contains(error, "of rank 1 must equal")) << error;
  }
}

TEST(RankFaults, ARefusalOfOneRankIsAnErrorOnAllRanks) {
  FaultyCall call;
  const CpPlan plan = plan_of(call.problem, {3});
  ThreadGroup group(3);
  const auto errors = on_ranks(3, [&](int32_t rank) {
    return run_rank(call.problem, {plan.get(), group.transport(rank)},
                    [&](tandem_attention_args& a) { a.accumulate = rank == 1; });
  });
  EXPECT_EQ(errors[0], "rank 1 refused the call: read the error message of this rank");
  EXPECT_TRUE(contains(errors[1], "attention.accumulate must be absent in context parallelism")) << errors[1];
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(RankFaults, ALostRankEndsInTheTransportsError) {
  FaultyCall call;
  const CpPlan plan = plan_of(call.problem, {3});
  for (const int32_t execution : {TANDEM_CP_GATHER, TANDEM_CP_RING, TANDEM_CP_HEADS}) {
    // calls: the number of calls before rank 2 is lost. The first call compares hashes, and later calls do not.
    for (const int calls : {0, 1}) {
      ThreadGroup group(3, milliseconds(100));
      const auto errors = on_ranks(3, [&](int32_t rank) {
        std::string error;
        for (int n = 0; error.empty() && n < (rank == 2 ? calls : 2); ++n) {
          error = run_rank(call.problem, {plan.get(), group.transport(rank), execution});
        }
        return error;
      });
      EXPECT_TRUE(contains(errors[0], "must return 0") || contains(errors[1], "must return 0"))
          << errors[0] << "; " << errors[1];
      EXPECT_EQ(errors[2], "");
    }
  }
}

// Runs a call on one rank with changed arguments.
std::string refusal(const AdjustArgs& adjust, const std::string& flags = kSmall) {
  FaultyCall call(flags);
  const CpPlan plan = plan_of(call.problem, {1});
  ThreadGroup group(1);
  return run_rank(call.problem, {plan.get(), group.transport(0)}, adjust);
}

TEST(RankRefusals, OptionsThatAreNotServed) {
  static int64_t shape[] = {1, 1, 1, 1};
  static float value = 0;
  static const tandem_tensor tensor{&value, {TANDEM_CPU, 0}, 4, {TANDEM_FLOAT, 32, 1}, shape, nullptr, 0};
  const std::vector<std::pair<std::string, AdjustArgs>> options = {
      {"kv_num_blocks", [](tandem_attention_args& a) { a.kv_num_blocks = &tensor; }},
      {"kv_indices", [](tandem_attention_args& a) { a.kv_indices = &tensor; }},
      {"seqused_k", [](tandem_attention_args& a) { a.seqused_k = &tensor; }},
      {"page_table", [](tandem_attention_args& a) { a.page_table = &tensor; }},
      {"max_scores", [](tandem_attention_args& a) { a.max_scores = &tensor; }},
      {"accumulate", [](tandem_attention_args& a) { a.accumulate = 1; }},
      {"cu_seqlens_q", [](tandem_attention_args& a) { a.cu_seqlens_q = &tensor; }},
      {"causal", [](tandem_attention_args& a) { a.causal = 1; }},
      {"window", [](tandem_attention_args& a) { a.window = TANDEM_WINDOW_LEFT; }},
      {"alignment", [](tandem_attention_args& a) { a.alignment = TANDEM_TOP_LEFT; }},
  };
  for (const auto& [name, adjust] : options) {
    const std::string error = refusal(adjust);
    EXPECT_TRUE(contains(error, "attention." + name + " must be absent in context parallelism: ")) << error;
  }
  EXPECT_TRUE(contains(refusal(nullptr, std::string(kSmall) + " --dtype f64"), "q.dtype (float64) must be"));
}

// A bias of zeros, whose rows are equal by default.
struct SmallBias {
  SmallBias(std::vector<int64_t> sizes, std::vector<int64_t> steps = {0, 0, 1},
            tandem_dtype dtype = {TANDEM_FLOAT, 32, 1})
      : shape(std::move(sizes)), strides(std::move(steps)) {
    static float values[2000];
    tensor = {values, {TANDEM_CPU, 0}, static_cast<int32_t>(shape.size()), dtype, shape.data(), strides.data(), 0};
  }
  SmallBias(const SmallBias&) = delete;

  std::vector<int64_t> shape, strides;
  tandem_tensor tensor{};
};

// The small call has 29 queries, and at most 20 keys in a document.
TEST(RankRefusals, BiasesOfOtherShapes) {
  const auto error = [](const SmallBias& bias) {
    return refusal([&](tandem_attention_args& a) { a.bias = &bias.tensor; });
  };
  EXPECT_EQ(error({{1, 29, 20}}), "");
  EXPECT_EQ(error({{2, 29, 24}}), "");
  EXPECT_TRUE(
      contains(error({{29, 20}, {0, 1}}), "attention.bias (2 dimensions) must have 3: pass (heads, rows, keys)"));
  EXPECT_TRUE(contains(error({{3, 29, 20}}), "bias.heads (3) must be 1 or equal q.heads (2)"));
  EXPECT_TRUE(contains(error({{1, 1, 20}}), "bias.seqlen_q (1) must equal the 29 q rows of the rank"));
  EXPECT_TRUE(contains(error({{1, 29, 19}}), "bias.seqlen_k (19) must be at least 20, the keys of the longest"));
  EXPECT_TRUE(contains(error({{1, 29, 20}, {0, 1, 29}}), "must be 1: copy the tensor so that seqlen_k is contiguous"));
  EXPECT_TRUE(contains(error({{1, 29, 20}, {0, 0, 1}, {TANDEM_INT, 32, 1}}), "bias.dtype (int32) must be"));
}

TEST(RankFaults, OtherBiasesAreAnErrorOnAllRanks) {
  FaultyCall call;
  const CpPlan plan = plan_of(call.problem, {2});
  ThreadGroup group(2);
  const auto errors = on_ranks(2, [&](int32_t rank) {
    int64_t rows = 0;
    tandem_cp_plan_rows(plan.get(), rank, &rows, nullptr);
    const SmallBias bias({1, rows, rank == 1 ? 24 : 20});
    return run_rank(call.problem, {plan.get(), group.transport(rank)},
                    [&](tandem_attention_args& a) { a.bias = &bias.tensor; });
  });
  for (const std::string& error : errors) EXPECT_TRUE(contains(error, "of rank 1 must equal")) << error;
}

// The ranks exchange gradients of captured tensors, whose sizes must be equal.
TEST(RankFaults, OtherCapturedTensorsAreAnErrorOnAllRanks) {
  FaultyCall call(kSmall, TANDEM_BACKWARD);
  const CpPlan plan = plan_of(call.problem, {2});
  for (const bool other_shape : {true, false}) {
    ThreadGroup group(2);
    const auto errors = on_ranks(2, [&](int32_t rank) {
      float values[8] = {};
      int64_t shape[] = {rank == 1 && other_shape ? 4 : 3};
      const tandem_tensor t{values, {TANDEM_CPU, 0}, 1, {TANDEM_FLOAT, 32, 1}, shape, nullptr, 0};
      const tandem_tensor gradient{values + 4, {TANDEM_CPU, 0}, 1, {TANDEM_FLOAT, 32, 1}, shape, nullptr, 0};
      const tandem_mod_tensor captured{"t", &t, rank == 1 && !other_shape ? nullptr : &gradient};
      const tandem_mod mod{sizeof(tandem_mod), "score * t[q]", nullptr, 0, &captured, 1};
      return run_rank(call.problem, {plan.get(), group.transport(rank)},
                      [&](tandem_attention_args& a) { a.score_mod = &mod; });
    });
    for (const std::string& error : errors) EXPECT_TRUE(contains(error, "of rank 1 must equal")) << error;
  }
}

TEST(RankRefusals, PlansOfOtherGroups) {
  FaultyCall call;
  const CpPlan plan = plan_of(call.problem, {3});
  ThreadGroup group(2, milliseconds(10));
  EXPECT_EQ(run_rank(call.problem, {plan.get(), group.transport(0)}),
            "transport.ranks (2) must equal the 3 ranks of the plan: create the plan for this group");
  const CpPlan pair = plan_of(call.problem, {2});
  EXPECT_EQ(run_rank(call.problem, {pair.get(), group.transport(0), 3}).substr(0, 14), "args.execution");
}

TEST(RankRefusals, CallsWithWrongArguments) {
  FaultyCall call;
  const CpPlan plan = plan_of(call.problem, {1});
  ThreadGroup group(1);
  const tandem_attention_args attention{};
  const auto error = [&](auto&& change) -> std::string {
    tandem_cp_transport transport = *group.transport(0);
    tandem_cp_args args{sizeof args, plan.get(), &transport, TANDEM_CP_GATHER, 0, &attention};
    change(args, transport);
    return tandem_cp_forward(nullptr, &args) == TANDEM_OK ? "" : tandem_last_error();
  };
  EXPECT_TRUE(contains(error([](auto& a, auto&) { a.size = 8; }), "args.size (8) must be"));
  EXPECT_TRUE(contains(error([](auto& a, auto&) { a.plan = nullptr; }), "args.plan (NULL)"));
  EXPECT_TRUE(contains(error([](auto& a, auto&) { a.transport = nullptr; }), "args.transport (NULL)"));
  EXPECT_TRUE(contains(error([](auto& a, auto&) { a.attention = nullptr; }), "(NULL) must point to"));
  EXPECT_TRUE(contains(error([](auto& a, auto&) { a.reserved = 1; }), "args.reserved (1) must be 0"));
  EXPECT_TRUE(contains(error([](auto&, auto& t) { t.wait = nullptr; }), "transport (a function is NULL)"));
  EXPECT_TRUE(contains(error([](auto&, auto& t) { t.rank = 1; }), "transport.rank (1) must be below 1"));
  EXPECT_EQ(tandem_cp_forward(nullptr, nullptr), TANDEM_INVALID_ARGUMENT);
}

TEST(RankRefusals, PlansWithWrongArguments) {
  const int64_t lengths[] = {4, 5};
  tandem_cp_plan_args a{};
  a.size = sizeof a;
  a.ranks = 2;
  a.documents = 2;
  a.q_lens = lengths;
  const auto error = [](const tandem_cp_plan_args& args) -> std::string {
    tandem_cp_plan* plan = nullptr;
    if (tandem_cp_plan_create(&args, &plan) != TANDEM_OK) return tandem_last_error();
    tandem_cp_plan_destroy(plan);
    return "";
  };
  const auto with = [&](auto&& change) {
    tandem_cp_plan_args changed = a;
    change(changed);
    return error(changed);
  };
  EXPECT_EQ(error(a), "");
  EXPECT_TRUE(contains(with([](auto& x) { x.ranks = 0; }), "ranks (0) must be"));
  EXPECT_TRUE(contains(with([](auto& x) { x.layout = 9; }), "args.layout (9) must be"));
  EXPECT_TRUE(contains(with([](auto& x) { x.q_lens = nullptr; }), "args.q_lens (NULL)"));
  EXPECT_TRUE(contains(with([](auto& x) { x.alignment = 5; }), "args.alignment (5) must be"));
  EXPECT_TRUE(contains(with([](auto& x) { x.alignment = TANDEM_EXPLICIT; }), "args.diagonals must be"));
  EXPECT_TRUE(contains(with([](auto& x) { x.window = 8; }), "args.window (8) must be"));
  EXPECT_TRUE(contains(with([](auto& x) { x.window = 3, x.window_left = -5; }), "args.window_left (-5)"));
  EXPECT_TRUE(contains(with([](auto& x) { x.chunk = -1; }), "chunk (-1) must not be negative"));
  EXPECT_TRUE(contains(with([](auto& x) { x.block_q = 2; }), "args.block_q (2) and block_k (0) must be at least 1"));
  // Documents of 4 and 5 queries have 2 and 3 rows of blocks of 2 queries.
  static constexpr int64_t rows[] = {0, 1, 1, 2, 3, 3};
  static constexpr int32_t blocks[] = {0, 1, 2};
  const auto with_blocks = [&](auto&& change) {
    return with([&](auto& x) {
      x.block_q = x.block_k = 2;
      x.block_rows = rows;
      x.key_blocks = blocks;
      change(x);
    });
  };
  static constexpr int64_t negative[] = {0, 1, 1, 2, 3, -1}, falling[] = {0, 2, 1, 2, 3, 3};
  static constexpr int32_t beyond[] = {0, 1, 3};
  EXPECT_EQ(with_blocks([](auto&) {}), "");
  // The first version of the struct ends before the block mask.
  EXPECT_EQ(with_blocks([](auto& x) { x.size = offsetof(tandem_cp_plan_args, block_q), x.block_q = -1; }), "");
  EXPECT_TRUE(contains(with_blocks([](auto& x) { x.block_rows = nullptr; }), "args.block_rows (NULL)"));
  EXPECT_TRUE(contains(with_blocks([](auto& x) { x.key_blocks = nullptr; }), "args.key_blocks (NULL)"));
  EXPECT_TRUE(contains(with_blocks([](auto& x) { x.block_rows = negative; }), "args.block_rows[5] (-1) must be"));
  EXPECT_TRUE(contains(with_blocks([](auto& x) { x.block_rows = falling; }), "row_begin[1] (2) must ascend"));
  EXPECT_TRUE(contains(with_blocks([](auto& x) { x.key_blocks = beyond; }), "key_blocks[2] (3) must ascend in row 3"));
  EXPECT_TRUE(contains(with_blocks([](auto& x) { x.chunk = 3; }), "args.chunk (3) must be a multiple of block_q (2)"));
  EXPECT_TRUE(contains(with_blocks([](auto& x) { x.layout = TANDEM_CP_STRIPED; }), "args.layout (striped) must have"));
}

}  // namespace
}  // namespace tandem::test
