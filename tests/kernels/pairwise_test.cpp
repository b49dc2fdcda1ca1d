// Any two features together, at sizes that a virtual GPU runs quickly: a list of cases that contains every pair.
#include "support/pairwise.h"

#include <array>

#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

using Values = std::vector<const char*>;

// Lengths around the edges of tiles, few queries, and sequences that are packed, partly used or empty.
const Values kLengths = {"--seqlen-q 130 --seqlen-k 150",
                         "--seqlen-q 300 --seqlen-k 270",
                         "--seqlen-q 1 --seqlen-k 200",
                         "--batch 2 --seqlen-q 65 --seqlen-k 81",
                         "--batch 2 --seqlen-q 70 --seqlen-k 141 --used-q 3,70 --used-k 141,17",
                         "--packed 1 --lengths-q 20,0,133,1 --lengths-k 9,4,133,0 --max-seqlen 0",
                         "--packed 1 --lengths-q 5,70 --lengths-k 90,33 --used-q 3,70 --used-k 81,0 "
                         "--max-seqlen 3"};
const Values kDims = {"--head-dim 64 --head-dim-v 64",   "--head-dim 128 --head-dim-v 128",
                      "--head-dim 256 --head-dim-v 256", "--head-dim 192 --head-dim-v 128",
                      "--head-dim 80 --head-dim-v 80",   "--head-dim 64 --head-dim-v 136",
                      "--head-dim 8 --head-dim-v 16"};
const Values kHeads = {"", "--heads-q 4 --heads-k 2", "--heads-q 3", "--heads-q 8"};
const Values kMasks = {"",
                       "--causal 1",
                       "--causal 1 --top-left 1",
                       "--left 30 --right 11",
                       "--left 20 --right -4",
                       "--left 40 --causal 1",
                       "--left 17"};
const Values kScales = {"", "--scale -0.2", "--softcap 5", "--values large"};
const Values kAlibi = {"", "--alibi head", "--alibi batch --top-left 1"};
const Values kBias = {"", "--bias f32 --bias-shape bh1j", "--bias same --bias-inf 1", "--bias bool --bias-shape 1hij"};
const Values kSinks = {"", "--sink f32", "--sink same"};
const Values kTypes = {"--dtype bf16", "--dtype f16"};
const Values kLayouts = {"", "--layout 349525", "--layout 1048575 --lse 0"};
// each: an offset for every sequence.
const Values kDiagonals = {"", "--explicit 1 --diagonal 17", "--explicit 1 --diagonal -30",
                           "--explicit 1 --diagonal 5 --diagonals each"};
const Values kResults = {"", "--float32 o", "--sm-limit 3"};
const Values kDropout = {"", "--dropout 0.1", "--dropout 0.3125 --dropout-pointers 1"};
const Values kOptions[] = {kLengths, kDims,  kHeads,   kMasks,     kScales,  kAlibi,  kBias,
                           kSinks,   kTypes, kLayouts, kDiagonals, kResults, kDropout};

std::vector<CheckedCase> pairs() {
  std::vector<int> choices;
  for (const Values& values : kOptions) choices.push_back(static_cast<int>(values.size()));
  std::vector<CheckedCase> cases;
  for (const std::vector<int>& combination : pairwise(choices)) {
    std::string flags;
    for (size_t option = 0; option < combination.size(); ++option) {
      const std::string value = kOptions[option][static_cast<size_t>(combination[option])];
      const bool packed_bias = value.starts_with("--bias") && flags.find("--packed") != std::string::npos;
      if (!value.empty() && !packed_bias) flags += value + " ";
    }
    cases.emplace_back(with_diagonals(flags));
  }
  return cases;
}

TEST(KernelsPairwise, EveryPairOfFeatures) { expect_all_good(pairs()); }

}  // namespace
}  // namespace tandem::test
