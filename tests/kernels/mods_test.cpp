// Score and mask modifications on a GPU, by the judge.
#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

const char* const kMods[] = {
    "--score-mod score-slope[head]*abs(q-k)",
    "--score-mod score-slope[head]*abs(q-k) --softcap 5 --alibi head --causal 1",
    "--score-mod score*temperature+table[head,clamp(q-k+4,0,8)]",
    "--score-mod 3*tanh(score/3)*(1+0.1*sigmoid(score)) --sink f32",
    "--score-mod log(1+exp(score))+exp2(min(score,2))*0.1+log2(1+float(k))",
    "--score-mod sqrt(1+score*score)-max(score,-0.5)-abs(score)",
    "--score-mod select(k<=q,score,-inf)",
    "--score-mod score+0.1*float((q//3-k%5)^(q<<1&k>>1)|~k&3)+0.1*floor(0.3*float(q))",
    "--score-mod score+float(int(0.37*q)-sign(k-9))%1.7+0.5*(float(k)//3.3)/(1+q)",
    "--score-mod score+c*ceil(0.3*q)*0.1-trunc(0.7*k)*0.05+round(0.5*k)*0.01+sign(0.5-k)",
    "--score-mod score*0.5+table[q,k%9]+0.01*seqlen_q-0.01*seqlen_k*batch --float32 o",
    "--mask-mod k<=q",
    "--mask-mod doc[batch,q]==doc[batch,k]",
    "--mask-mod doc[batch,q]==doc[batch,k]&&k<=q --causal 1",
    "--mask-mod seen[k]||!on --sink same",
    "--mask-mod (q^k)&3!=0 --softcap 4 --alibi batch",
    "--mask-mod q-k<9&&k-q<9 --score-mod score-slope[head]*(q-k) --scale -0.2",
    "--mask-mod head!=0||k<seqlen_k//2",
    "--mask-mod false",
};
const char* const kDense[] = {
    "--score-mod tanh(score) --bias bool",
    "--score-mod score*(1+slope[head]) --bias f32 --bias-inf 1",
    "--mask-mod k<=q+n --used-q 30,141 --used-k 150,70",
};

// Every text is a kernel, which takes seconds to compile: each in one type.
std::vector<Judged> cases(const std::string& flags) {
  std::vector<Judged> all;
  for (const char* mod : kMods) all.emplace_back(flags + mod);
  return all;
}

TEST(KernelsMods, Dense) {
  const std::string shape = "--dtype bf16 --batch 2 --seqlen-q 141 --seqlen-k 150 --head-dim 64 --head-dim-v 64 ";
  std::vector<Judged> all = cases(shape + "--heads-q 4 --heads-k 2 ");
  for (const char* mod : kDense) all.emplace_back(shape + "--heads-q 2 --heads-k 2 " + mod);
  expect_all_good(all);
}

TEST(KernelsMods, Packed) {
  expect_all_good(
      cases("--dtype f16 --packed 1 --max-seqlen 3 --lengths-q 20,0,133,1 --lengths-k 19,4,133,40 "
            "--heads-q 2 --heads-k 1 --head-dim 128 --head-dim-v 128 "));
}

// Several tiles, some of which masks hide whole.
TEST(KernelsMods, Long) {
  std::vector<Judged> all;
  for (const char* mod :
       {"--mask-mod q//150==k//150 --head-dim 64 --head-dim-v 64",
        "--mask-mod k>=200&&k<=q --score-mod score*temperature --head-dim 128 --head-dim-v 128",
        "--score-mod score+table[head,clamp((q-k)//50,0,8)] --causal 1 --head-dim 256 --head-dim-v 256"}) {
    all.emplace_back(std::string("--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 300 --seqlen-k 420 ") + mod);
  }
  expect_all_good(all);
}

// Gradients but those of what texts read.
TEST(KernelsMods, Backward) {
  std::vector<Judged> all = cases(
      "--dtype bf16 --batch 2 --seqlen-q 41 --seqlen-k 53 --head-dim 64 --head-dim-v 64 --heads-q 2 --heads-k 1 "
      "--gradients qkvs --dlse 1 ");
  for (const char* mod : {"--mask-mod q//150==k//150", "--score-mod 5*tanh(score/5)*temperature --mask-mod k<=q"}) {
    all.emplace_back(std::string("--dtype f16 --seqlen-q 300 --seqlen-k 420 --head-dim 128 --head-dim-v 128 ") +
                     "--gradients qkvs --dlse 1 " + mod);
  }
  expect_all_good(all);
}

}  // namespace
}  // namespace tandem::test
