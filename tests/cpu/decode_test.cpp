// Tests of few queries over many keys.
#include <string>

#include "cpu/judged.h"

namespace tandem::test {
namespace {

class CpuDecode : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(, CpuDecode, testing::Values("f32", "bf16", "f16"), [](const auto& one) { return one.param; });

TEST_P(CpuDecode, QueriesKeysAndGroups) {
  for (const int queries : {1, 2, 3, 4, 8}) {
    for (const int keys : {1, 2, 50, 129, 1000}) {
      for (const char* heads : {"--heads-q 2 --heads-k 2", "--heads-q 8 --heads-k 1", "--heads-q 6 --heads-k 2"}) {
        expect_good(std::string("--gradients none --causal 1 --head-dim 64 --head-dim-v 64 --dtype ") + GetParam() +
                    " --seqlen-q " + std::to_string(queries) + " --seqlen-k " + std::to_string(keys) + " " + heads);
      }
    }
  }
}

TEST_P(CpuDecode, Splits) {
  for (const int splits : {0, 1, 2, 7, 64, 1024}) {
    for (const char* more : {"", "--invariant 1", "--sink f32 --softcap 20 --used-k 5000,17", "--left 300 --alibi head",
                             "--bias f32 --bias-shape b11j --bias-inf 1 --dropout 0.5"}) {
      expect_good(std::string("--gradients none --batch 2 --seqlen-q 1 --seqlen-k 5000 --heads-q 2 --heads-k 1 "
                              "--head-dim 20 --head-dim-v 24 --dtype ") +
                  GetParam() + " --splits " + std::to_string(splits) + " " + more);
    }
  }
}

TEST_P(CpuDecode, PackedLengthsThatDiffer) {
  expect_good(std::string("--gradients none --packed 1 --lengths-q 1,3,0,1,8 --lengths-k 3000,1,700,0,129 --heads-q 4 "
                          "--heads-k 2 --head-dim 32 --head-dim-v 32 --causal 1 --dtype ") +
              GetParam());
}

}  // namespace
}  // namespace tandem::test
