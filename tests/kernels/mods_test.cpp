// score_mod and mask_mod on a GPU, within the error bound.
#include <limits>
#include <utility>

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
    "--score-mod tanh(score)*exp(0.1*slope[doc[batch,q]])+table[head,(q-k)//40+4]*slope[k%4] --dropout 0.2",
    "--score-mod score-slope[head]*abs(q-k) --softcap 5 --alibi head --bias f32 --bias-shape 1hij",
    "--score-mod max(score*temperature,table[1,k%9]) --left 20 --right 6 --sink f32 --layout 349525",
};

// Each expression is a kernel that takes seconds to compile, so each runs in one type only.
std::vector<CheckedCase> cases(const std::string& flags) {
  std::vector<CheckedCase> all;
  for (const char* mod : kMods) all.emplace_back(flags + mod);
  return all;
}

TEST(KernelsMods, Dense) {
  const std::string shape = "--dtype bf16 --batch 2 --seqlen-q 141 --seqlen-k 150 --head-dim 64 --head-dim-v 64 ";
  std::vector<CheckedCase> all = cases(shape + "--heads-q 4 --heads-k 2 ");
  for (const char* mod : kDense) all.emplace_back(shape + "--heads-q 2 --heads-k 2 " + mod);
  expect_all_good(all);
}

// Packed tensors change batch, seqlen_q, seqlen_k, and the elements that an expression reads.
TEST(KernelsMods, Packed) {
  std::vector<CheckedCase> all;
  for (const char* mod : kMods) {
    const std::string_view text = mod;
    if (text.find('[') == text.npos && text.find("seqlen") == text.npos) continue;
    all.emplace_back(std::string("--dtype f16 --packed 1 --max-seqlen 3 --lengths-q 20,0,133,1 --lengths-k 19,4,133,40 "
                                 "--heads-q 2 --heads-k 1 --head-dim 128 --head-dim-v 128 ") +
                     mod);
  }
  expect_all_good(all);
}

// Several tiles, some of which the mask hides completely.
TEST(KernelsMods, Long) {
  std::vector<CheckedCase> all;
  for (const char* mod :
       {"--mask-mod q//150==k//150 --head-dim 64 --head-dim-v 64",
        "--mask-mod k>=200&&k<=q --score-mod score*temperature --head-dim 128 --head-dim-v 128",
        "--score-mod score+table[head,clamp((q-k)//50,0,8)] --causal 1 --head-dim 256 --head-dim-v 256"}) {
    all.emplace_back(std::string("--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 300 --seqlen-k 420 ") + mod);
  }
  expect_all_good(all);
}

// Expressions that GPUs replace by options, checked as expressions. In two cases one expression stays next to the
// option of the other expression.
TEST(KernelsMods, Options) {
  std::vector<CheckedCase> all;
  for (const char* shape : {"--batch 2 --seqlen-q 141 --seqlen-k 250 --head-dim 64 --head-dim-v 64 ",
                            "--packed 1 --max-seqlen 3 --lengths-q 20,0,233,1 --lengths-k 19,4,133,40 --head-dim 128 "
                            "--head-dim-v 128 "}) {
    for (const char* mods : {"--score-mod score+slope[head]*(k-q) --mask-mod k<=q&&q-k<90 --gradients qkv",
                             "--score-mod score-slope[head]*abs(q-k+seqlen_k-seqlen_q) --causal 1 --gradients qkv",
                             "--score-mod score-slope[head]*abs(q-k) --mask-mod k<q-n --gradients qkvm",
                             "--score-mod score-slope[head]*abs(q-k) --mask-mod (q^k)&3!=0&&q-k<90 --gradients qkv"}) {
      all.emplace_back(std::string("--dtype bf16 --heads-q 4 --heads-k 2 --dlse 1 ") + shape + mods);
    }
  }
  expect_all_good(all);
}

TEST(KernelsMods, Backward) {
  std::vector<CheckedCase> all = cases(
      "--dtype bf16 --batch 2 --seqlen-q 41 --seqlen-k 53 --head-dim 64 --head-dim-v 64 --heads-q 2 --heads-k 1 "
      "--gradients qkvsm --dlse 1 ");
  for (const char* mod : {"--mask-mod q//150==k//150", "--score-mod 5*tanh(score/5)*temperature --mask-mod k<=q"}) {
    all.emplace_back(std::string("--dtype f16 --seqlen-q 300 --seqlen-k 420 --head-dim 128 --head-dim-v 128 ") +
                     "--gradients qkvsm --dlse 1 " + mod);
  }
  expect_all_good(all);
}

// Gradients of captured tensors along each line of a tile and along none. Cases have each option that precedes
// score_mod, and several tiles in each direction.
TEST(KernelsMods, Captured) {
  std::vector<CheckedCase> all;
  for (const char* flags :
       {"--score-mod score*temperature+table[head,clamp(q-k+4,0,8)] --head-dim 128 --head-dim-v 128 --causal 1",
        "--score-mod score+table[head,(q-k)//40+4]*slope[k]+slope[q] --head-dim 64 --head-dim-v 64 --accumulate 1",
        "--score-mod tanh(score)*exp(0.1*slope[doc[batch,q]])+table[q,k%9] --head-dim 128 --head-dim-v 64 --dlse 1",
        "--score-mod score*(1+slope[head]*temperature) --head-dim 256 --head-dim-v 256 --heads-q 4 --float32 g",
        "--score-mod select(k<=q,score+slope[head],score-table[k,head]) --mask-mod (q^k)&3!=0 --head-dim 80 "
        "--head-dim-v 112 --dropout 0.2",
        "--score-mod score-slope[head]*abs(q-k) --softcap 5 --alibi head --bias f32 --bias-shape 1hij --head-dim 128 "
        "--head-dim-v 128 --gradients bm",
        "--score-mod max(score*temperature,table[1,k%9]) --scale -0.2 --left 200 --right 60 --sink f32 --head-dim 64 "
        "--head-dim-v 64 --heads-q 6 --layout 349525",
        "--score-mod score+temperature --head-dim 192 --head-dim-v 128 --invariant 1",
        "--score-mod score*slope[head]*temperature+table[q,k%9] --head-dim 64 --head-dim-v 64 --gradients t",
        "--score-mod score+0*slope[head]+floor(temperature) --head-dim 64 --head-dim-v 64",
        "--score-mod max(score,-1.25) --head-dim 64 --head-dim-v 64"}) {  // reads no captured tensor
    all.emplace_back(std::string("--dtype bf16 --batch 2 --heads-q 2 --heads-k 2 --seqlen-q 150 --seqlen-k 270 "
                                 "--gradients m ") +
                     flags);
  }
  for (const char* flags :
       {"--packed 1 --max-seqlen 3 --lengths-q 20,0,133,1 --lengths-k 19,4,333,40 --causal 1",
        "--batch 3 --seqlen-q 170 --seqlen-k 141 --used-q 3,170,0 --used-k 141,17,30",
        "--batch 2 --seqlen-q 0 --seqlen-k 100", "--batch 2 --seqlen-q 100 --seqlen-k 0 --accumulate 1",
        "--seqlen-q 1 --seqlen-k 300 --top-left 1 --right -2"}) {
    all.emplace_back(std::string("--dtype f16 --heads-q 4 --heads-k 2 --head-dim 64 --head-dim-v 64 --gradients qm "
                                 "--score-mod score*temperature+table[head,clamp(q-k+4,0,8)]+slope[batch] ") +
                     flags);
  }
  expect_all_good(all);
}

// Adds cases of packed tensors, and of lengths that only the device has.
void add_lengths_of_the_device(std::vector<CheckedCase>* all, const std::string& flags) {
  for (const char* lengths : {"--packed 1 --max-seqlen 3 --lengths-q 20,0,233,1 --lengths-k 319,4,333,40",
                              "--batch 3 --seqlen-q 170 --seqlen-k 341 --used-q 3,170,0 --used-k 341,17,30"}) {
    all->emplace_back("--dtype f16 --heads-q 4 --heads-k 2 --gradients km " + flags + lengths);
  }
}

// The main kernel sums captured gradients of tiles that read one element of each tensor. Some cases have other tiles
// too, or each option that chooses tiles. Slopes, softcap, variable derivatives or absent gradients disable the sum.
TEST(KernelsMods, CapturedTiles) {
  std::vector<CheckedCase> all;
  for (const char* flags :
       {"--score-mod score+table[head,clamp(q-k+4,0,8)] --head-dim 128 --head-dim-v 128",
        "--score-mod score-2*table[head,clamp(q-k+4,0,8)]+temperature --head-dim 64 --head-dim-v 64 --causal 1",
        "--score-mod score+table[batch,clamp(k//100,0,8)]+slope[head] --head-dim 128 --head-dim-v 64 --accumulate 1",
        "--score-mod score+table[head,clamp(q//50,1,8)] --head-dim 64 --head-dim-v 64 --heads-q 4 --left 100 --right "
        "90",
        "--score-mod score+slope[head]+table[select(k>200,1,0),select(q>100,8,2)] --head-dim 96 --head-dim-v 96 "
        "--dropout 0.2 --alibi head",
        "--score-mod score+table[head,clamp(q-k,0,8)] --head-dim 128 --head-dim-v 128 --mask-mod k<=q+50",
        "--score-mod score+table[head,clamp(q-k,0,8)] --head-dim 256 --head-dim-v 256",
        "--score-mod score+table[head,clamp(q-k,0,8)] --head-dim 64 --head-dim-v 64 --softcap 3",
        "--score-mod 1.5*score+table[head,clamp(q-k,0,8)] --head-dim 64 --head-dim-v 64",
        "--score-mod score+table[head,clamp(q-k,0,8)]*slope[head] --head-dim 64 --head-dim-v 64",
        "--score-mod score+table[head,clamp(q-k,0,8)] --head-dim 64 --head-dim-v 64 --gradients m",
        "--score-mod score+table[head,clamp(q-k,0,8)] --head-dim 64 --head-dim-v 64 --gradients vm"}) {
    all.emplace_back(std::string("--dtype bf16 --batch 2 --heads-q 2 --heads-k 2 --seqlen-q 200 --seqlen-k 420 "
                                 "--gradients qkvm ") +
                     flags);
  }
  add_lengths_of_the_device(&all,
                            "--head-dim 64 --head-dim-v 64 --score-mod score+table[head,clamp(q-k+seqlen_k-300,0,8)] ");
  expect_all_good(all);
}

// All scores of a tile read one element, and the derivative is the score, so Hopper's main kernel sums them. Cases have
// every option that changes or hides scores, m_splits and split heads. Wide heads or other derivatives disable the sum.
TEST(KernelsMods, CapturedScores) {
  std::vector<CheckedCase> all;
  for (const char* flags :
       {"--score-mod score*temperature --head-dim 128 --head-dim-v 128 --causal 1 --heads-q 4",
        "--score-mod score*(1+slope[head]) --head-dim 64 --head-dim-v 64 --left 100 --right 90 --accumulate 1",
        "--score-mod score*slope[batch]+table[head,3] --head-dim 128 --head-dim-v 128 --dropout 0.2",
        "--score-mod temperature*score --head-dim 96 --head-dim-v 64 --softcap 3 --alibi head --mask-mod k<=q+50",
        "--score-mod score*slope[head] --head-dim 128 --head-dim-v 128 --blocks random --mask-mod (q^k)&3!=0",
        "--score-mod score*slope[head] --head-dim 64 --head-dim-v 64 --batch 1 --heads-q 1 --heads-k 1 --seqlen-q 1500",
        "--score-mod score*temperature --head-dim 128 --head-dim-v 128 --bias f32 --bias-shape 1hij --values large",
        "--score-mod score*temperature --head-dim 64 --head-dim-v 64 --invariant 1 --scale -0.2 --gradients qm",
        "--score-mod score*temperature*slope[head] --head-dim 64 --head-dim-v 64",
        "--score-mod score*temperature --head-dim 256 --head-dim-v 256",
        "--score-mod score*temperature --head-dim 64 --head-dim-v 64 --gradients vm"}) {
    all.emplace_back(std::string("--dtype bf16 --batch 2 --heads-q 2 --heads-k 2 --seqlen-q 200 --seqlen-k 420 "
                                 "--gradients qkvm ") +
                     flags);
  }
  add_lengths_of_the_device(&all, "--head-dim 128 --head-dim-v 128 --score-mod score*slope[head] ");
  expect_all_good(all);
}

template <class Value>
void set_each(Tensor& t, const Value& value) {
  for (int64_t n = 0; n < t.size(); ++n) t.set(n, value(n));
}
Tensor table_of(DType type, int64_t rows, int64_t columns) {
  Tensor made(type, {rows, columns});
  set_each(made, [](int64_t n) { return static_cast<double>(n * 29 % 64 - 32) / 32; });
  return made;
}

const std::string kTables =
    "--dtype f16 --batch 2 --heads-q 2 --heads-k 1 --seqlen-q 130 --seqlen-k 150 --head-dim 64 --head-dim-v 64 "
    "--score-mod score+table[head,q-k+150]*slope[head] ";
TEST(KernelsMods, Tables) {
  std::vector<CheckedCase> all;
  for (const DType type : {DType::f64, DType::bf16, DType::f16})
    all.emplace_back(kTables, [type](Instance& in) { in.table = table_of(type, 2, 280); });
  all.emplace_back(kTables, [](Instance& in) { in.table = table_of(DType::f32, 2, 30'001); });
  expect_all_good(all);
}
// Elements of every type, and more of them than shared memory holds.
TEST(KernelsMods, CapturedTables) {
  const std::string flags = kTables + "--gradients m ";
  std::vector<CheckedCase> all;
  const std::pair<DType, const char*> types[] = {
      {DType::f64, ""}, {DType::f64, "--accumulate 1"}, {DType::f32, "--accumulate 1"}, {DType::bf16, "--accumulate 1"},
      {DType::f16, ""}, {DType::f16, "--float32 g"}};
  for (const auto& [type, more] : types) {
    all.emplace_back(flags + more, [type = type](Instance& in) { in.table = table_of(type, 2, 280); });
  }
  all.emplace_back(flags, [](Instance& in) { in.table = table_of(DType::f32, 2, 30'001); });
  expect_all_good(all);
}

// Tables with infinities and NaN, in the forward and in the gradients of the tables.
std::vector<CheckedCase> adversarial(const std::string& more) {
  const std::string flags =
      "--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 70 --seqlen-k 140 --head-dim 64 --head-dim-v 64 " + more;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<CheckedCase> all;
  const auto add = [&](const std::string& mod, const std::function<void(Instance&)>& adjust) {
    all.emplace_back(flags + "--score-mod " + mod, adjust);
  };
  const auto roots = [](Instance& in) {
    in.table = table_of(DType::f32, 70, 140);
    set_each(in.table, [](int64_t n) { return n % 7 == 3 ? 0.0 : 0.01; });
  };
  add("score+sqrt(table[q,k])", roots);
  add("score+sqrt(table[q,k])*(1+slope[head]) --causal 1 --top-left 1", roots);
  add("score+sqrt(slope[head])",
      [](Instance& in) { set_each(in.slope, [](int64_t n) { return n == 0 ? 0.0 : 1.0; }); });
  add("select(k<=q,score,score+sqrt(temperature)) --causal 1 --top-left 1",
      [](Instance& in) { in.temperature.set(0, 0); });
  for (const double factor : {0.0, 1e-30, -1e-40})
    add("score*temperature --causal 1", [factor](Instance& in) { in.temperature.set(0, factor); });
  add("score+table[q,k%9] --mask-mod q<3", [](Instance& in) {
    in.table = table_of(DType::f32, 70, 9);
    set_each(in.table, [](int64_t n) { return n > 40 ? std::numeric_limits<double>::quiet_NaN() : 0.5; });
  });
  add("score+table[q,k]", [](Instance& in) {
    in.table = table_of(DType::f32, 70, 140);
    in.table.set(5 * 140 + 3, std::numeric_limits<double>::quiet_NaN());
    in.table.set(6 * 140 + 7, -kInfinity);
    for (int64_t k = 0; k < 140; ++k) in.table.set(7 * 140 + k, -kInfinity);
  });
  for (const double size : {1e-36, 1e-20, 1e20, 1e34}) {
    add("score+table[0,k%9]*temperature", [size](Instance& in) {
      set_each(in.table, [&](int64_t n) { return size * static_cast<double>(n % 5 - 2) * (n % 2 ? 1e-3 : 1); });
      in.temperature.set(0, 0.1 / size);
    });
  }
  return all;
}
TEST(KernelsMods, Adversarial) { expect_all_good(adversarial("")); }
// Derivatives are infinite or undefined where they should be, for elements with and without finite neighbours. Sums
// have numbers of very different sizes, and no derivative spoils a gradient of 0.
TEST(KernelsMods, CapturedAdversarial) { expect_all_good(adversarial("--gradients m ")); }
// The same tables if the main kernel accumulates captured gradients.
TEST(KernelsMods, CapturedAdversarialWithKeys) { expect_all_good(adversarial("--gradients km ")); }

// Scores as large as their exponents allow: one key of a row has all its weight.
TEST(KernelsMods, LargeScores) {
  std::vector<CheckedCase> all;
  for (const char* mod : {"score*1e5", "score*1e7", "-1e7*abs(score)", "score*temperature*1e7 --causal 1"}) {
    all.emplace_back(
        std::string("--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 140 --seqlen-k 270 --head-dim 64 --head-dim-v 64 "
                    "--gradients qkv --score-mod ") +
        mod);
  }
  expect_all_good(all);
}

}  // namespace
}  // namespace tandem::test
