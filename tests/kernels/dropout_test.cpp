// Dropout in the forward, with options that share registers, heads or rows with it: the reference draws the same words.
// backward_test.cpp has its gradients.
#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

TEST(KernelsDropout, BesideEveryOption) {
  std::vector<CheckedCase> cases;
  for (const char* dim : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 128 --head-dim-v 128 ",
                          "--head-dim 256 --head-dim-v 256 ", "--head-dim 192 --head-dim-v 40 "}) {
    for (const char* option :
         {"--seqlen-q 150 --seqlen-k 210 --causal 1", "--seqlen-q 33 --seqlen-k 300 --heads-q 8 --heads-k 2",
          "--seqlen-q 1 --seqlen-k 100 --heads-q 6 --heads-k 2 --batch 3", "--seqlen-q 130 --seqlen-k 130 --left 40",
          "--packed 1 --lengths-q 20,0,133,1 --lengths-k 9,4,133,7 --max-seqlen 0 --heads-q 4 --heads-k 1",
          "--batch 2 --seqlen-q 70 --seqlen-k 141 --used-q 3,70 --used-k 141,17 --float32 o",
          "--seqlen-q 90 --seqlen-k 200 --softcap 4 --alibi head --sink f32", "--seqlen-q 90 --seqlen-k 90 --bias f32"})
      cases.emplace_back(std::string(dim) + option + (cases.size() % 2 == 0 ? " --dtype bf16" : " --dtype f16") +
                         (cases.size() % 3 == 0 ? " --dropout 0.3 --dropout-pointers 1" : " --dropout 0.1"));
  }
  expect_all_good(cases);
}

// Dropout of nearly 0, about a half and nearly 1: a row may lose all its keys.
TEST(KernelsDropout, AnyProbability) {
  std::vector<CheckedCase> cases;
  for (const char* p : {"0.0000000001", "0.25", "0.49609375", "0.5", "0.50390625", "0.9375", "0.9999999"})
    cases.emplace_back(
        std::string("--dtype bf16 --seqlen-q 70 --seqlen-k 130 --head-dim 64 --head-dim-v 64 --dropout ") + p);
  expect_all_good(cases);
}

// Sequences are parts of longer sequences: places at multiples of 16 keys and at others, and rows with strides.
TEST(KernelsDropout, PlacesOfSequences) {
  const char* const kOptions[] = {
      "--packed 1 --lengths-q 20,0,133,1,40 --lengths-k 9,4,133,7,150 --heads-q 4 --heads-k 2 --dropout 0.3",
      "--batch 2 --seqlen-q 90 --seqlen-k 200 --alibi head --causal 1 --dropout 0.2 --sink f32",
      "--batch 3 --seqlen-q 140 --seqlen-k 150 --alibi batch --left 60",
      "--batch 3 --seqlen-q 70 --seqlen-k 90 --score-mod score*slope[head]+table[head,k%9]+q/seqlen_k "
      "--mask-mod (q+k+batch)%5>0 --dropout 0.1"};
  std::vector<CheckedCase> cases;
  for (const char* dim : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 128 --head-dim-v 128 ",
                          "--head-dim 256 --head-dim-v 256 ", "--head-dim 192 --head-dim-v 128 "}) {
    for (const char* rest : {" --dtype bf16 --places 1", " --dtype f16 --places 3 --dlse 1"}) {
      const size_t n = cases.size();
      cases.emplace_back(std::string(dim) + kOptions[n % 4] + rest + " --seed " + std::to_string(n));
    }
  }
  expect_all_good(cases);
}

// Dropout may keep only the small probabilities of a sharp row, so float16 must not round them away.
TEST(KernelsDropout, SmallProbabilitiesOfFloat16) {
  expect_all_good(
      {{"--dtype f16 --values large --dropout 0.9375 --packed 1 --lengths-q 37,1,19,0 --lengths-k 37,167,19,25 "
        "--max-seqlen 109 --top-left 1 --scale -0.10211677241922797 --heads-q 16 --heads-k 2 --head-dim 64 "
        "--head-dim-v 128 --align 8 --seed 772"}});
}

}  // namespace
}  // namespace tandem::test
