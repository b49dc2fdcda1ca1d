// Score and mask modifications, forward and backward, within the error bound.
#include <bit>
#include <string>
#include <vector>

#include "cpu/judged.h"
#include "reference/reference.h"

namespace tandem::test {
namespace {

class CpuMods : public testing::TestWithParam<const char*> {
 protected:
  std::string dtype() const { return std::string("--dtype ") + GetParam() + " "; }
};

INSTANTIATE_TEST_SUITE_P(, CpuMods, testing::Values("f32", "bf16", "f16"), [](const auto& one) { return one.param; });

const char* const kMods[] = {
    "--score-mod score-slope[head]*abs(q-k)",
    "--score-mod score-slope[head]*abs(q-k) --softcap 5 --bias f32 --alibi head",
    "--score-mod score*temperature+table[head,clamp(q-k+4,0,8)] --bias same --bias-shape 1hij",
    "--score-mod table[head,k%9]*tanh(score) --bias f32 --softcap 3 --sink f32 --dlse 1",
    "--score-mod 20*tanh(score/20) --causal 1",
    "--score-mod select(k<=q,score,-inf)",
    "--score-mod select(score>0,sqrt(score),0)",
    "--score-mod score*score*temperature --dropout 0.25",
    "--score-mod 0.5 --causal 1",
    "--score-mod -inf",
    "--score-mod c*score+float(n) --gradients m",
    "--score-mod table[q,k] --gradients qm --accumulate 1",
    "--score-mod score+temperature --float32 g",
    "--score-mod tanh(score) --bias bool",
    "--score-mod 0.3*float((q*5+k)%7) --bias f32 --bias-inf 1",
    "--mask-mod k<=q",
    "--mask-mod doc[batch,q]==doc[batch,k] --causal 1",
    "--mask-mod seen[k] --bias f32 --gradients b",
    "--mask-mod false --sink f32 --dlse 1",
    "--mask-mod (q^k)&3!=0 --softcap 4 --alibi batch",
    "--mask-mod head!=0||k<seqlen_k//2 --used-q 3,41 --used-k 50,17",
    "--mask-mod q-k<9&&k-q<9 --score-mod score-slope[head]*(q-k) --scale -0.2",
    "--mask-mod k<5 --score-mod exp(score*0.1)+0.1*seqlen_q --layout 43690",
};

TEST_P(CpuMods, Dense) {
  for (const char* mod : kMods) {
    for (const char* heads : {"--heads-q 2 --heads-k 2 ", "--heads-q 6 --heads-k 2 "}) {
      expect_good(dtype() + "--batch 2 --seqlen-q 41 --seqlen-k 53 --head-dim 40 --head-dim-v 24 " + heads + mod);
    }
  }
}

TEST_P(CpuMods, Packed) {
  for (const std::string mod : kMods) {
    if (mod.find("bias") != std::string::npos || mod.find("used") != std::string::npos) continue;
    expect_good(dtype() + "--packed 1 --lengths-q 20,0,33,1,7 --lengths-k 9,4,33,0,40 --head-dim 16 --head-dim-v 16 " +
                "--heads-q 4 --heads-k 2 " + mod);
  }
}

// Block masks whose blocks are no multiples of the tiles, with and without a mask_mod. Lists may have any contents.
TEST_P(CpuMods, Blocks) {
  for (const char* blocks :
       {"--blocks random --block-q 16 --block-k 24", "--blocks random --block-q 1 --block-k 7 --block-shape 1h",
        "--blocks partial --block-q 40 --block-k 8 --block-shape b1", "--blocks hostile --block-q 5 --block-k 16",
        "--blocks random --block-q 1000 --block-k 1000 --block-shape 11"}) {
    for (const char* mod : {"", "--mask-mod (q^k)&3!=0", "--mask-mod k<=q --score-mod score*temperature --causal 1",
                            "--bias bool --sink f32 --dlse 1 --used-q 3,141 --used-k 150,17"}) {
      expect_good(dtype() + "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 141 --seqlen-k 150 --head-dim 16 " +
                  "--head-dim-v 16 " + blocks + " " + mod);
    }
  }
  expect_good(dtype() + "--heads-q 4 --seqlen-q 1 --seqlen-k 1500 --head-dim 32 --head-dim-v 32 --blocks random " +
              "--block-k 40");
}

// Few queries: keys are streamed, and split.
TEST_P(CpuMods, Decode) {
  for (const char* mod : {"--score-mod score-slope[head]*abs(k-400) --mask-mod k!=7", "--mask-mod k>700",
                          "--mask-mod doc[batch,k]==0", "--score-mod 3*tanh(score)+table[head,k%9]"}) {
    expect_good(dtype() + "--heads-q 4 --heads-k 2 --seqlen-q 1 --seqlen-k 1500 --head-dim 32 --head-dim-v 32 " + mod);
  }
}

// Masks hide some of several tiles, whole and in part.
TEST_P(CpuMods, Long) {
  for (const char* mod : {"--mask-mod q//150==k//150", "--mask-mod k>=200&&k<=q --score-mod score*temperature",
                          "--score-mod score+table[head,clamp((q-k)//50,0,8)] --causal 1"}) {
    expect_good(dtype() + "--heads-q 2 --seqlen-q 500 --seqlen-k 700 --head-dim 32 --head-dim-v 32 " + mod);
  }
}

// Scores as large as their exponents allow: one key of a row has all its weight. Gradients are too large for float16.
TEST(CpuModsOfRange, LargeScores) {
  for (const char* dtype : {"f32", "bf16"}) {
    for (const char* mod : {"score*1e5", "score*1e7", "-1e7*abs(score)", "score*temperature*1e7 --causal 1"}) {
      expect_good(std::string("--heads-q 2 --heads-k 2 --seqlen-q 140 --seqlen-k 270 --head-dim 32 --head-dim-v 32 ") +
                  "--dtype " + dtype + " --score-mod " + mod);
    }
  }
}

// Cases have more tiles than parts, which sum captured gradients.
TEST_P(CpuMods, ManyTiles) {
  expect_good(dtype() + "--batch 40 --heads-q 4 --heads-k 2 --seqlen-q 5 --seqlen-k 7 --head-dim 16 --head-dim-v 16 " +
              "--score-mod score*temperature-slope[head]*abs(q-k)+table[head,k]");
}

// The engine has options for these texts, but the check evaluates them as texts. Cases are also packed, or have
// separate lengths.
TEST_P(CpuMods, Options) {
  for (const char* shape : {"--batch 2 --seqlen-q 41 --seqlen-k 70 ", "--batch 2 --seqlen-q 70 --seqlen-k 41 ",
                            "--batch 2 --seqlen-q 41 --seqlen-k 70 --used-q 30,41 --used-k 70,7 ",
                            "--packed 1 --lengths-q 20,0,33,1 --lengths-k 19,4,33,40 "}) {
    for (const char* mods :
         {"--score-mod score-slope[head]*abs(q-k) --mask-mod k<q+n", "--score-mod score-slope[head]*abs(k-q+7)",
          "--score-mod score+slope[head]*(k-q) --mask-mod k<=q&&q-k<9",
          "--score-mod (q-k)*slope[head]+score --mask-mod q<=k --softcap 5",
          "--score-mod score-slope[head]*abs(q-k+seqlen_k-seqlen_q) --causal 1",
          "--score-mod score-slope[head]*abs(q-k) --causal 1 --left 20", "--mask-mod abs(q-k+seqlen_k-seqlen_q)<=3",
          "--mask-mod k<=q+seqlen_k-seqlen_q&&q-k<9", "--mask-mod k<=q --causal 1 --left 20 --alibi head",
          "--mask-mod k<=q-30", "--mask-mod q-k>=seqlen_q-seqlen_k&&on", "--mask-mod k<=q&&(q^k)&3!=0 --left 20"}) {
      expect_good(dtype() + "--heads-q 4 --heads-k 2 --head-dim 16 --head-dim-v 16 " + shape + mods);
    }
  }
}

// A text that equals an option reads the same keys in the same order, so that the bits are equal.
TEST(CpuModsBits, MasksAreTheOptionsThatTheyEqual) {
  const NamedEngine engine = cpu_engine(2);
  const auto bits = [&engine](const std::string& mask) {
    Instance in(from_flags(
        "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 200 --seqlen-k 230 --head-dim 32 --head-dim-v 32 " + mask));
    Outputs exact = in.exact_outputs(TANDEM_FORWARD);
    reference::forward(in.exact_problem(TANDEM_FORWARD, &exact));
    in.give_results(&exact);
    std::vector<uint64_t> all;
    for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
      Outputs o = in.outputs(pass);
      engine.run(in.problem(pass, &o));
      for (const Tensor* t : {&o.out, &o.lse, &o.dq, &o.dk, &o.dv}) {
        for (int64_t n = 0; *t && n < t->size(); ++n) {
          all.push_back(static_cast<uint64_t>(std::bit_cast<uint32_t>(static_cast<float>(t->get(n) + 0.0))));
        }
      }
    }
    return all;
  };
  EXPECT_EQ(bits("--causal 1"), bits("--mask-mod k<=q+seqlen_k-seqlen_q"));
  EXPECT_EQ(bits("--causal 1 --top-left 1"), bits("--mask-mod k<=q"));
  EXPECT_EQ(bits("--left 70 --right 9 --top-left 1"), bits("--mask-mod -9<=q-k&&q-k<=70"));
}

}  // namespace
}  // namespace tandem::test
