// Results have the same bits for any placement of blocks: on few or many multiprocessors, in any order, concurrently.
// Counters and cluster launch control then give each block different work. Only a virtual GPU can place blocks.
#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

const char* const kProblems[] = {
    "--dtype bf16 --batch 2 --heads-q 3 --heads-k 3 --seqlen-q 500 --seqlen-k 300 --head-dim 128 --head-dim-v 128",
    "--dtype f16 --heads-q 4 --heads-k 2 --seqlen-q 700 --seqlen-k 333 --head-dim 64 --head-dim-v 64 --causal 1",
    "--dtype bf16 --heads-q 2 --heads-k 1 --seqlen-q 600 --seqlen-k 400 --head-dim 64 --head-dim-v 256 --causal 1",
    "--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 300 --seqlen-k 200 --head-dim 256 --head-dim-v 256",
    "--dtype f16 --packed 1 --max-seqlen 0 --lengths-q 300,5,0,129,270 --lengths-k 300,90,7,129,1 --heads-q 4 "
    "--heads-k 2 "
    "--head-dim 128 --head-dim-v 128 --causal 1",
    "--dtype bf16 --packed 1 --max-seqlen 0 --lengths-q 300,5,0,129,270 --lengths-k 300,90,7,129,1 --heads-q 2 "
    "--heads-k 1 "
    "--head-dim 192 --head-dim-v 192 --left 100 --causal 1"};

// At least 2, because clusters have two blocks.
constexpr int kMultiprocessors[] = {0, 132, 8, 3, 2};

TEST(KernelsPlacement, SameBitsWhereverBlocksRun) {
  if (!the_gpu()->is_virtual()) GTEST_SKIP() << "A real GPU places its blocks itself.";
  for (const char* flags : kProblems) {
    const std::vector<std::byte> expected = Repeated(flags).run();
    for (int seed = 1; seed <= 2; ++seed) {
      for (const int sms : kMultiprocessors) {
        const Gpu other(the_gpu()->name(), 2 + seed, {.seed = static_cast<uint64_t>(10 * seed + sms), .sm_count = sms});
        EXPECT_TRUE(Repeated(flags, other).run() == expected)
            << "placement " << 10 * seed + sms << " on " << sms << " multiprocessors: " << flags;
      }
    }
  }
}

// A limit changes which block computes a tile, but no bits. Clusters of two blocks need at least two multiprocessors.
TEST(KernelsPlacement, SameBitsOnFewerMultiprocessors) {
  for (const char* flags : kProblems) {
    const std::vector<std::byte> expected = Repeated(flags).run();
    for (const char* limit : {"1", "3", "100000"}) {
      EXPECT_TRUE(Repeated(std::string(flags) + " --sm-limit " + limit).run() == expected)
          << "at most " << limit << ": " << flags;
    }
  }
}

// Several blocks add to dq in turn, so that gradients must have the same bits too. The engine compares the bits of all
// GPUs.
TEST(KernelsPlacement, SameGradientsWhereverBlocksRun) {
  if (!the_gpu()->is_virtual()) GTEST_SKIP() << "A real GPU places its blocks itself.";
  Gpus gpus = {the_gpu()};
  for (const int sms : {132, 8, 3})
    gpus.push_back(std::make_shared<const Gpu>(
        the_gpu()->name(), 3, Gpu::Placement{.seed = static_cast<uint64_t>(10 + sms), .sm_count = sms}));
  const NamedEngine engine = gpu_engine(gpus);
  for (const char* flags :
       {"--dtype bf16 --batch 2 --heads-q 2 --heads-k 1 --seqlen-q 200 --seqlen-k 270 --head-dim 128 --head-dim-v 128",
        "--dtype f16 --heads-q 3 --heads-k 3 --seqlen-q 260 --seqlen-k 300 --head-dim 64 --head-dim-v 64 --causal 1",
        "--dtype bf16 --packed 1 --max-seqlen 0 --lengths-q 200,5,0,129 --lengths-k 200,90,7,270 --heads-q 4 "
        "--heads-k 2 --head-dim 128 --head-dim-v 64 --left 100 --causal 1",
        "--dtype bf16 --batch 2 --heads-q 3 --heads-k 3 --seqlen-q 9 --seqlen-k 400 --head-dim 128 --head-dim-v 128 "
        "--causal 1",
        "--dtype bf16 --heads-q 36 --heads-k 2 --seqlen-q 10 --seqlen-k 520 --head-dim 8 --head-dim-v 136 --causal 1",
        "--dtype bf16 --batch 2 --heads-q 2 --heads-k 1 --seqlen-q 130 --seqlen-k 270 --head-dim 128 --head-dim-v 128 "
        "--score-mod score*temperature+table[head,(q-k)//50+4]+slope[k%2]"}) {
    const Verdict verdict = run_case(from_flags(std::string("--align 8 --gradients qkvm ") + flags), engine.run);
    EXPECT_EQ(verdict.failure + verdict.refusal, "") << flags;
  }
}

}  // namespace
}  // namespace tandem::test
