// The largest score of each row, against the error bound. A separate kernel computes the scores again, so the cases
// have each option that changes or hides scores, in each form of tiles.
#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

TEST(KernelsMaxScores, Options) {
  const std::string dense = "--max-scores 1 --batch 2 --heads-q 4 --heads-k 2 --seqlen-q 150 --seqlen-k 330 ";
  const std::string packed =
      "--max-scores 1 --packed 1 --lengths-q 70,0,130,1 --lengths-k 0,90,260,3 --heads-q 8 --heads-k 2 ";
  std::vector<CheckedCase> all;
  for (const char* more :
       {"--dtype bf16 --head-dim 64 --head-dim-v 64 --causal 1", "--dtype f16 --head-dim 40 --head-dim-v 72 --left 20",
        "--dtype bf16 --head-dim 256 --head-dim-v 256 --softcap 5 --scale -0.3",
        "--dtype f16 --head-dim 128 --head-dim-v 64 --bias bool --alibi head --sink f32 --lse 0 --float32 o",
        "--dtype bf16 --head-dim 64 --head-dim-v 64 --bias f32 --bias-inf 1 --dropout 0.3 --top-left 1 --causal 1",
        "--dtype bf16 --head-dim 128 --head-dim-v 128 --score-mod score*temperature --mask-mod (q^k)&3!=0",
        "--dtype bf16 --head-dim 64 --head-dim-v 64 --used-q 150,0 --used-k 10,300 --values large",
        "--dtype bf16 --head-dim 128 --head-dim-v 128 --blocks random --block-k 256 --mask-mod (q^k)&3!=0",
        "--dtype f16 --head-dim 192 --head-dim-v 128 --blocks hostile --causal 1 --layout 65536",
        "--dtype bf16 --head-dim 64 --head-dim-v 64 --seqlen-k 0"}) {
    all.emplace_back(dense + more);
  }
  for (const char* more : {"--dtype bf16 --head-dim 96 --head-dim-v 96 --causal 1",
                           "--dtype f16 --head-dim 256 --head-dim-v 256 --left 30 --right 10"}) {
    all.emplace_back(packed + more);
  }
  expect_all_good(all);
}

}  // namespace
}  // namespace tandem::test
