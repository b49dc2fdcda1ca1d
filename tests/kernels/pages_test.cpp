// Keys and values in pages: every option of the forward, TMA boxes of every size, and tables with any values.
// Instance shuffles and shares the pages, and poisons unused entries, rows and pages.
#include "engine/context.h"
#include "kernels/on_gpu.h"
#include "plan/plan.h"

namespace tandem::test {
namespace {

const std::string kShort = "--dtype bf16 --batch 2 --heads-q 4 --heads-k 2 --seqlen-q 70 --seqlen-k 384 ";

TEST(KernelsPages, EveryOption) {
  const char* const options[] = {
      "--page-size 16 --used-k 384,150",
      "--page-size 32 --used-k 381,7 --causal 1",
      "--page-size 48 --used-k 333,150 --left 90",
      "--page-size 96 --used-k 200,384 --left 100 --right 30 --top-left 1",
      "--page-size 128 --used-k 384,150 --left 40 --explicit 1 --diagonals 300,-60",
      "--page-size 16 --used-k 380,0 --sink f32",
      "--page-size 64 --used-k 300,200 --softcap 5 --causal 1",
      "--page-size 192 --used-k 300,200 --alibi batch --causal 1",
      "--page-size 16 --used-k 300,200 --bias f32 --bias-inf 1",
      "--page-size 16 --used-k 300,200 --bias bool --bias-shape b1ij",
      "--page-size 32 --used-k 300,200 --dropout 0.3",
      "--page-size 16 --used-k 300,200 --max-scores 1 --left 120",
      "--page-size 64 --used-k 300,200 --max-scores 1 --mask-mod (q^k)&3!=0",
      "--page-size 16 --used-k 300,200 --score-mod score*temperature+table[head,clamp(q-k+4,0,8)]",
      "--page-size 128 --used-k 300,200 --blocks random --mask-mod doc[batch,q//8]==doc[batch,k//8]",
      "--page-size 16 --used-k 300,200 --used-q 50,0 --float32 o --lse 0",
      "--page-size 16 --used-k 300,200 --values large --causal 1 --invariant 1",
      "--page-size 16 --used-k 300,200 --layout 21845",
      "--page-size 16 --used-k 300,200 --layout 43690",
      "--page-size 384 --causal 1 --used-k 300,384",
  };
  std::vector<CheckedCase> cases;
  for (const char* option : options) cases.emplace_back(kShort + option);
  expect_all_good(cases);
}

TEST(KernelsPages, EveryHeadDim) {
  expect_all_good(
      {{"--dtype f16 --head-dim 64 --head-dim-v 64 --seqlen-q 200 --seqlen-k 320 --page-size 16 --used-k 300"},
       {"--dtype bf16 --head-dim 80 --head-dim-v 80 --seqlen-q 9 --seqlen-k 320 --page-size 80 --used-k 300 --causal "
        "1"},
       {"--dtype bf16 --head-dim 128 --head-dim-v 128 --seqlen-q 300 --seqlen-k 320 --page-size 32 --used-k 319"},
       {"--dtype f16 --head-dim 192 --head-dim-v 128 --seqlen-q 130 --seqlen-k 320 --page-size 64 --used-k 300 --left "
        "90"},
       {"--dtype bf16 --head-dim 256 --head-dim-v 256 --seqlen-q 130 --seqlen-k 320 --page-size 16 --used-k 300 "
        "--causal 1 --left 99"},
       {"--dtype bf16 --head-dim 256 --head-dim-v 256 --seqlen-q 300 --seqlen-k 512 --page-size 256 --used-k 500"}});
}

// Prefill, chunked prefill and decode in one call, with and without splits of the keys.
TEST(KernelsPages, MixedBatch) {
  const std::string mixed =
      "--dtype bf16 --packed 1 --heads-q 8 --heads-k 2 --head-dim 64 --head-dim-v 64 --lengths-q 1,130,0,40,1 "
      "--used-k 500,130,7,333,0 --seqlen-k 512 --page-size 16 --causal 1 ";
  expect_all_good({{mixed},
                   {mixed + "--left 64 --sink f32 --page-size 128"},
                   {mixed + "--splits 4"},
                   {mixed + "--splits 3 --left 200 --max-scores 1 --page-size 32"}});
}

TEST(KernelsPages, Decode) {
  expect_all_good(
      {{"--dtype bf16 --heads-q 8 --heads-k 1 --seqlen-q 1 --seqlen-k 5008 --page-size 16 --used-k 5000"},
       {"--dtype f16 --batch 2 --heads-q 4 --heads-k 1 --seqlen-q 2 --seqlen-k 1024 --page-size 64 --used-k "
        "1000,63 --head-dim 128 --head-dim-v 128 --causal 1 --splits 8"},
       // Hopper reads the page table for several n_blocks at once.
       {"--dtype bf16 --batch 2 --heads-q 4 --heads-k 2 --seqlen-q 1 --seqlen-k 2400 --page-size 48 --used-k 2390,1025 "
        "--splits 1"},
       {"--dtype bf16 --batch 2 --heads-q 4 --heads-k 2 --seqlen-q 70 --seqlen-k 1600 --page-size 32 --used-k 1600,513 "
        "--head-dim 128 --head-dim-v 128 --causal 1"}});
}

// Runs a call whose lengths and entries change after its check, as in a graph that is replayed.
void run_with(const std::string& flags, std::initializer_list<int64_t> used, int64_t entry) {
  Instance in(from_flags(kServed + flags));
  Outputs outputs = in.outputs(TANDEM_FORWARD);
  const Problem p = in.problem(TANDEM_FORWARD, &outputs);
  int64_t n = 0;
  for (const int64_t length : used) in.seqused_k.set(n++, static_cast<double>(length));
  for (n = 0; n < in.page_table.size(); n += 2) in.page_table.set(n, static_cast<double>(entry));
  tandem::Engine& engine = *the_gpu()->context()->engine;
  std::vector<std::byte> workspace(engine.workspace_size(p));
  const tandem_attention_args args = in.args(TANDEM_FORWARD, &outputs);
  const CallWorkspace memory{args, TANDEM_FORWARD, workspace.data(), workspace.size()};
  const Status status = engine.run(p, memory, the_gpu()->stream());
  EXPECT_TRUE(status.ok()) << status.message;
  EXPECT_TRUE(outputs.out.guards_intact() && outputs.lse.guards_intact());
  EXPECT_TRUE(the_gpu()->device().synchronize(the_gpu()->stream()).ok());
}

// No value of a length or an entry leads to a read outside the tensors: the checker would find it.
TEST(KernelsPages, AnyLengthAndEntry) {
  if (!the_gpu()->is_virtual()) GTEST_SKIP() << "the test needs tensors in host memory";
  const std::string flags = kShort + "--page-size 48 --used-k 384,384 --max-scores 1 ";
  for (const int64_t entry : {int64_t{-1}, int64_t{INT32_MIN}, int64_t{INT32_MAX}, int64_t{18}, int64_t{0}}) {
    run_with(flags, {384, 150}, entry);
    run_with(flags, {INT32_MAX, INT32_MIN}, entry);
    run_with(flags + "--left 100 --causal 1", {-5, 1 << 20}, entry);
  }
}

// Hopper copies pages of less than 64 keys by cp.async, except with a bias or changed scores. Head dimensions of 72 and
// 136 have a part of the last 64 columns.
TEST(KernelsPages, PageSizes) {
  const std::string flags = kShort + "--head-dim 72 --head-dim-v 136 --used-k 371,65 --page-size ";
  std::vector<CheckedCase> cases;
  for (const int page_size : {16, 32, 48, 64, 80}) {
    const std::string sized = flags + std::to_string(page_size) + (page_size == 80 ? " --seqlen-k 400" : "");
    cases.emplace_back(sized);
    cases.emplace_back(sized + " --left 150");
    const plan::Plan plan = plan_of_case(TANDEM_FORWARD, sized);
    if (plan.forward.tile.blackwell()) continue;
    EXPECT_EQ(plan.forward.tile.for_hopper().gathers_pages, page_size < 64);
    for (const char* other : {" --bias f32", " --softcap 2"}) {
      const plan::Plan plan_of_other = plan_of_case(TANDEM_FORWARD, sized + other);
      EXPECT_FALSE(plan_of_other.forward.tile.for_hopper().gathers_pages) << other;
    }
  }
  expect_all_good(cases);
}

// A box lies in one page, and an iteration has whole boxes.
TEST(KernelsPages, BoxRows) {
  for (const int page_size : {16, 32, 48, 80, 128, 384}) {
    const plan::Plan plan =
        plan_of_case(TANDEM_FORWARD, kShort + "--used-k 9,9 --page-size " + std::to_string(page_size));
    for (const int rows : {plan.forward.tile.boxes.k, plan.forward.tile.boxes.v}) {
      EXPECT_EQ(rows % 16, 0);
      EXPECT_EQ(page_size % rows, 0);
      EXPECT_EQ(plan.forward.tile.tile_n % rows, 0);
    }
  }
}

}  // namespace
}  // namespace tandem::test
