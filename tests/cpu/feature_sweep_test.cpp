// Features, head dims and lengths in every dtype, forward and backward, within the error bound.
#include <cmath>
#include <string>

#include "cpu/judged.h"

namespace tandem::test {
namespace {

class CpuFeatureSweep : public testing::TestWithParam<const char*> {
 protected:
  std::string dtype() const { return std::string("--dtype ") + GetParam() + " "; }
};

INSTANTIATE_TEST_SUITE_P(, CpuFeatureSweep, testing::Values("f32", "bf16", "f16"),
                         [](const auto& one) { return one.param; });

const char* const kFeatures[] = {
    "",
    "--causal 1",
    "--causal 1 --top-left 1",
    "--left 9",
    "--right 5",
    "--left 7 --right 3",
    "--left 20 --right -4",
    "--left -4 --right 20",
    "--left 3 --causal 1 --top-left 1",
    "--softcap 5",
    "--softcap 2 --causal 1 --dlse 1",
    "--scale 0.9",
    "--scale -0.2",
    "--alibi head --causal 1",
    "--alibi batch",
    "--alibi batch --top-left 1 --left 20",
    "--bias f32",
    "--bias same --bias-shape 1hij",
    "--bias f32 --bias-shape b1i1",
    "--bias same --bias-shape bh1j",
    "--bias f32 --bias-shape 1111 --softcap 4",
    "--bias f32 --bias-shape b1ij --bias-inf 1 --causal 1",
    "--bias bool",
    "--bias bool --bias-shape b11j --causal 1",
    "--bias bool --bias-shape 11i1 --sink f32",
    "--sink f32",
    "--sink same --dlse 1 --causal 1",
    "--dlse 1",
    "--dropout 0.25",
    "--dropout 0.875 --causal 1 --dropout-pointers 1 --sink f32 --dlse 1",
    "--used-q 3,41 --used-k 50,17",
    "--used-q 41,0 --used-k 0,9 --causal 1 --dlse 1",
    "--used-k 53,2 --bias f32 --alibi head",
    "--lse 0",
    "--gradients q",
    "--gradients k",
    "--gradients v",
    "--gradients b --bias f32",
    "--gradients s --sink f32",
    "--gradients qv --causal 1",
    "--splits 3",
    "--invariant 1 --splits 3",
    "--members deterministic=1,validate=1",
    "--layout 21845",
    "--layout 43690",
    "--layout 65535",
};

TEST_P(CpuFeatureSweep, FeaturesDense) {
  for (const char* feature : kFeatures) {
    for (const char* heads : {"--heads-q 2 --heads-k 2 ", "--heads-q 6 --heads-k 2 "}) {
      expect_good(dtype() + "--batch 2 --seqlen-q 41 --seqlen-k 53 --head-dim 40 --head-dim-v 24 " + heads + feature);
    }
  }
}

TEST_P(CpuFeatureSweep, FeaturesPacked) {
  for (const std::string feature : kFeatures) {
    if (feature.find("bias") != std::string::npos || feature.find("used") != std::string::npos) continue;
    expect_good(dtype() + "--packed 1 --lengths-q 20,0,33,1,7 --lengths-k 9,4,33,0,40 --head-dim 16 --head-dim-v 16 " +
                "--heads-q 4 --heads-k 2 " + feature);
  }
  expect_good(dtype() + "--packed 1 --lengths-q 20,33 --lengths-k 19,33 --used-q 11,33 --used-k 19,2 --causal 1");
}

TEST_P(CpuFeatureSweep, HeadDims) {
  for (const int dim :
       {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 192, 256, 511, 512}) {
    const std::string d = std::to_string(dim);
    expect_good(dtype() + "--seqlen-q 19 --seqlen-k 23 --causal 1 --head-dim " + d + " --head-dim-v " + d);
    expect_good(dtype() + "--seqlen-q 3 --seqlen-k 37 --heads-q 2 --heads-k 1 --head-dim " + d + " --head-dim-v 5");
    expect_good(dtype() + "--seqlen-q 18 --seqlen-k 5 --head-dim 5 --head-dim-v " + d);
  }
}

TEST_P(CpuFeatureSweep, Lengths) {
  for (const int q : {1, 2, 5, 15, 16, 17, 63, 64, 65, 96, 128, 129, 200}) {
    for (const int k : {1, 2, 7, 16, 31, 33, 64, 65, 127, 128, 129, 257}) {
      const std::string lengths = " --seqlen-q " + std::to_string(q) + " --seqlen-k " + std::to_string(k);
      const char* mask = (q + k) % 3 == 0 ? "" : (q + k) % 3 == 1 ? " --causal 1" : " --left 30 --right 11";
      expect_good(dtype() + "--head-dim 8 --head-dim-v 8" + lengths + mask);
    }
  }
}

// Cases have several tiles of queries and of keys.
TEST_P(CpuFeatureSweep, Long) {
  for (const char* mask : {"", "--causal 1", "--left 100 --causal 1"}) {
    expect_good(dtype() + "--heads-q 2 --seqlen-q 500 --seqlen-k 700 --head-dim 32 --head-dim-v 32 " + mask);
  }
}

// With equal scores and small integers only the last division and the last conversion round.
TEST_P(CpuFeatureSweep, IntegersAreExactToOneRounding) {
  for (const int keys : {1, 2, 3, 5, 8, 64, 100, 257, 1000}) {
    Instance in(from_flags(dtype() + "--values integer --seqlen-q 20 --head-dim 16 --head-dim-v 16 --seqlen-k " +
                           std::to_string(keys)));
    Outputs got = in.outputs(TANDEM_FORWARD);
    cpu_engine(2).run(in.problem(TANDEM_FORWARD, &got));
    // Half a unit of T, and two roundings of float32 for 1 / n and the product.
    const double half_unit = in.c.type() == DType::f32 ? 0 : in.c.type() == DType::f16 ? 0x1p-11 : 0x1p-8;
    for (int64_t n = 0; n < got.out.size(); ++n) {
      double sum = 0;
      for (int64_t j = 0; j < keys; ++j) sum += in.v.get(j * 16 + n % 16);
      const double reference = sum / keys;
      ASSERT_LE(std::fabs(got.out.get(n) - reference), std::fabs(reference) * (half_unit + 0x1p-23)) << keys << " keys";
    }
  }
}

}  // namespace
}  // namespace tandem::test
