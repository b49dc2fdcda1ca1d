// Unchanged kernels have correct results and no findings, under ten schedules (in tools/gpu/prove_virtual.sh under a
// hundred).
#include <gtest/gtest.h>

#include <ostream>

#include "vgpu/tests/mutation/subject.h"

namespace tandem::test {
namespace {

// Few blocks process all tiles, and two run at once.
struct Problem {
  const char* name;
  const char* flags;
  const char* device = "vgpu:h200";

  // Names of tests, because GoogleTest would print addresses.
  friend std::ostream& operator<<(std::ostream& to, const Problem& p) { return to << p.name; }
};
constexpr Problem kProblems[] = {
    {"full", "--dtype bf16 --seqlen-q 300 --seqlen-k 200 --head-dim 64 --head-dim-v 64 --heads-q 4 --heads-k 2"},
    {"causal",
     "--dtype bf16 --seqlen-q 300 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q 2 --heads-k 1"},
    {"window", "--dtype f16 --seqlen-q 300 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --left 70 --right 10"},
    {"wide",
     "--dtype f16 --seqlen-q 150 --seqlen-k 200 --head-dim 256 --head-dim-v 256 --causal 1 --heads-q 2 --heads-k 2"},
    {"three", "--dtype bf16 --seqlen-q 400 --seqlen-k 150 --head-dim 192 --head-dim-v 128 --heads-q 2 --heads-k 2"},
    {"scores",
     "--dtype bf16 --seqlen-q 100 --seqlen-k 130 --head-dim 96 --head-dim-v 96 --alibi head --softcap 20 --bias f32"},
    {"packed",
     "--dtype bf16 --packed 1 --lengths-q 70,200,0,10 --lengths-k 70,230,50,300 --head-dim 64 --head-dim-v 64 --causal "
     "1 "
     "--heads-q 2 --heads-k 1"},
    {"padded",
     "--dtype bf16 --batch 3 --seqlen-q 100 --seqlen-k 200 --used-q 100,0,30 --used-k 10,200,0 --head-dim 128 "
     "--head-dim-v 128"},
    {"blocks",
     "--dtype bf16 --seqlen-q 300 --seqlen-k 460 --head-dim 64 --head-dim-v 64 --heads-q 2 --heads-k 2 --blocks "
     "hostile "
     "--block-q 64 --block-k 64 --mask-mod (q^k)&3!=0"},
    {"backward",
     "--gradients qkv --dtype bf16 --seqlen-q 200 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q "
     "2 "
     "--heads-k 1"},
    {"backward_wide",
     "--gradients qkv --dtype f16 --seqlen-q 150 --seqlen-k 140 --head-dim 256 --head-dim-v 256 --left 70 --dropout "
     "0.2"},
    {"backward_packed",
     "--gradients qkvs --dtype bf16 --packed 1 --lengths-q 70,200,0,10 --lengths-k 70,230,50,150 --head-dim 64 "
     "--head-dim-v 64 --heads-q 2 --heads-k 1 --sink f32 --accumulate 1"},
    {"backward_bias",
     "--gradients qb --dtype bf16 --batch 2 --seqlen-q 100 --seqlen-k 200 --head-dim 64 --head-dim-v 64 --bias f32 "
     "--bias-shape 1h1j"},
    {"blackwell",
     "--dtype bf16 --seqlen-q 300 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q 2 --heads-k 1",
     "vgpu:b200"},
    {"blackwell_blocks",
     "--dtype bf16 --seqlen-q 300 --seqlen-k 460 --head-dim 64 --head-dim-v 64 --heads-q 2 --heads-k 2 --blocks "
     "hostile "
     "--mask-mod (q^k)&3!=0 --seed 5",
     "vgpu:b200"},
    {"blackwell_pair", "--dtype bf16 --seqlen-q 300 --seqlen-k 200 --head-dim 128 --head-dim-v 128 --heads-q 3",
     "vgpu:b200"},
    {"blackwell_wide",
     "--dtype f16 --seqlen-q 300 --seqlen-k 200 --head-dim 256 --head-dim-v 256 --causal 1 --heads-q 2 --heads-k 2",
     "vgpu:b200"},
    {"blackwell_packed",
     "--dtype bf16 --packed 1 --lengths-q 70,200,0,10 --lengths-k 70,230,50,300 --head-dim 64 --head-dim-v 64 "
     "--heads-q 2 --heads-k 1",
     "vgpu:b200"},
    {"blackwell_padded",
     "--dtype bf16 --batch 3 --seqlen-q 100 --seqlen-k 200 --used-q 100,0,30 --used-k 10,200,0 --head-dim 192 "
     "--head-dim-v 136",
     "vgpu:b200"},
    {"blackwell_gradients",
     "--dtype bf16 --gradients qkv --seqlen-q 300 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q "
     "2 --heads-k 1",
     "vgpu:b200"},
    {"blackwell_pair_gradients",
     "--dtype bf16 --gradients qkv --seqlen-q 520 --seqlen-k 520 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q "
     "2 --heads-k 1",
     "vgpu:b200"},
    {"blackwell_pair_padded_gradients",
     "--dtype f16 --gradients qkv --batch 2 --seqlen-q 100 --seqlen-k 441 --used-q 100,3 --used-k 441,17 --head-dim "
     "128 --head-dim-v 128",
     "vgpu:b200"},
    {"blackwell_narrow_gradients",
     "--dtype f16 --gradients qkvs --seqlen-q 300 --seqlen-k 200 --head-dim 64 --head-dim-v 64 --left 70 --right 10 "
     "--softcap 20 --sink f32",
     "vgpu:b200"},
    {"blackwell_between_gradients",
     "--dtype bf16 --gradients qkv --seqlen-q 200 --seqlen-k 300 --head-dim 80 --head-dim-v 112 --causal 1",
     "vgpu:b200"},
    {"blackwell_wide_gradients",
     "--dtype f16 --gradients qkv --seqlen-q 300 --seqlen-k 200 --head-dim 256 --head-dim-v 256 --causal 1 --heads-q 2 "
     "--heads-k 1 --dropout 0.2",
     "vgpu:b200"},
    {"blackwell_mixed_padded_gradients",
     "--dtype bf16 --gradients qkvs --batch 2 --seqlen-q 150 --seqlen-k 200 --used-q 150,3 --used-k 17,200 --head-dim "
     "192 --head-dim-v 128 --sink f32",
     "vgpu:b200"},
    {"blackwell_dropout_gradients",
     "--dtype bf16 --gradients qkv --seqlen-q 200 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --heads-q 2 --heads-k "
     "1 --dropout 0.2",
     "vgpu:b200"},
    {"blackwell_packed_gradients",
     "--dtype bf16 --gradients qkv --packed 1 --lengths-q 70,200,0,10 --lengths-k 70,230,50,300 --head-dim 128 "
     "--head-dim-v 64 --heads-q 2 --heads-k 1",
     "vgpu:b200"},
    {"blackwell_padded_gradients",
     "--dtype bf16 --gradients qkv --batch 3 --seqlen-q 100 --seqlen-k 200 --used-q 100,0,30 --used-k 10,200,0 "
     "--head-dim 64 --head-dim-v 128",
     "vgpu:b200"},
};

class Clean : public CompilerTest, public testing::WithParamInterface<Problem> {
 protected:
  void expect_clean(int schedules) const {
    const Subject subject(GetParam().flags, 2, GetParam().device);
    std::vector<std::string> ptx;
    const Status compiled = subject.compile(jit::kernels(), &ptx);
    ASSERT_TRUE(compiled.ok()) << compiled.message;
    for (int n = 0; n < schedules; ++n) {
      const Trial trial = subject.run(ptx, n, n < 4);
      EXPECT_EQ(trial.failure, "") << "schedule " << n;
      for (const Found& found : trial.found) ADD_FAILURE() << "schedule " << n << "\n" << found.text;
    }
  }
};

TEST_P(Clean, UnderTenSchedules) { expect_clean(10); }
TEST_P(Clean, DISABLED_UnderAHundredSchedules) { expect_clean(100); }

INSTANTIATE_TEST_SUITE_P(Each, Clean, testing::ValuesIn(kProblems), [](const auto& at) { return at.param.name; });

}  // namespace
}  // namespace tandem::test
