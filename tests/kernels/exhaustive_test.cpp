// Every feature at every kind of head_dim, in both types. A virtual GPU needs hours for all cases
// (tools/gpu/prove_virtual.sh).
#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

// Head dims at multiples of 8 at and around the head dims of the kernels' configurations.
const char* const kDims[] = {
    "--head-dim 8 --head-dim-v 8",     "--head-dim 16 --head-dim-v 16",   "--head-dim 40 --head-dim-v 40",
    "--head-dim 64 --head-dim-v 64",   "--head-dim 72 --head-dim-v 72",   "--head-dim 96 --head-dim-v 96",
    "--head-dim 128 --head-dim-v 128", "--head-dim 136 --head-dim-v 136", "--head-dim 160 --head-dim-v 160",
    "--head-dim 192 --head-dim-v 192", "--head-dim 200 --head-dim-v 200", "--head-dim 256 --head-dim-v 256",
    "--head-dim 192 --head-dim-v 128", "--head-dim 64 --head-dim-v 128",  "--head-dim 128 --head-dim-v 64",
    "--head-dim 64 --head-dim-v 256",  "--head-dim 72 --head-dim-v 136",  "--head-dim 256 --head-dim-v 64"};
const char* const kMasks[] = {"",
                              "--causal 1",
                              "--causal 1 --top-left 1",
                              "--left 70 --right 20",
                              "--left 40 --causal 1",
                              "--left 30 --right -4"};
const char* const kScores[] = {"",
                               "--softcap 5",
                               "--scale -0.2",
                               "--alibi head",
                               "--bias f32",
                               "--bias same --bias-shape 1hij",
                               "--bias bool",
                               "--sink f32"};
const char* const kLengths[] = {"--seqlen-q 150 --seqlen-k 280",
                                "--packed 1 --lengths-q 20,0,150,1 --lengths-k 9,4,280,0 --max-seqlen 0",
                                "--batch 2 --seqlen-q 65 --seqlen-k 150 --used-q 3,65 --used-k 141,17"};

// Returns the product; `extra` is added to the flags of each problem.
std::vector<CheckedCase> product_of(const std::string& extra) {
  std::vector<CheckedCase> cases;
  for (const std::string dims : kDims)
    for (const std::string mask : kMasks)
      for (const std::string scores : kScores)
        for (const std::string lengths : kLengths)
          for (const std::string dtype : {"bf16", "f16"}) {
            if (scores.starts_with("--bias") && lengths.starts_with("--packed")) continue;
            cases.emplace_back("--dtype " + dtype + " " + dims + " " + lengths + " " + mask + " " + scores + extra);
          }
  return cases;
}

TEST(KernelsExhaustive, DISABLED_EveryFeatureAtEveryHeadDim) { expect_all_good(product_of("")); }

TEST(KernelsExhaustive, DISABLED_GradientsOfEveryFeatureAtEveryHeadDim) {
  expect_all_good(product_of(" --gradients qkv"));
}

}  // namespace
}  // namespace tandem::test
