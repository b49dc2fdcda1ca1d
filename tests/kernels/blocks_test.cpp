// Block masks on a GPU, within the error bound: skipped, full and partial blocks, and lists of arbitrary contents.
#include <limits>
#include <string>

#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

std::vector<CheckedCase> with_all(const std::string& flags, std::initializer_list<const char*> more) {
  std::vector<CheckedCase> all;
  for (const char* one : more) all.emplace_back(flags + one);
  return all;
}

// Several tiles in each direction, which end within a block; each kind of list, each broadcast dimension.
TEST(KernelsBlocks, Lists) {
  expect_all_good(with_all(
      "--dtype bf16 --batch 2 --heads-q 2 --heads-k 1 --seqlen-q 300 --seqlen-k 620 --head-dim 64 --head-dim-v 64 ",
      {"--blocks random", "--blocks random --block-shape 11 --mask-mod (q^k)&3!=0",
       "--blocks partial --block-shape b1 --mask-mod (q^k)&3!=0", "--blocks partial --block-shape 1h",
       "--blocks hostile --mask-mod (q^k)&3!=0", "--blocks hostile --block-q 256 --layout 65536 --seed 2",
       "--blocks random --block-q 128 --block-k 256 --mask-mod (q^k)&3!=0 --sm-limit 2",
       "--blocks random --block-q 1000 --block-k 384 --seed 3 --float32 o",
       "--blocks random --block-k 4611686018427387904 --block-q 128 --mask-mod (q^k)&3!=0 --lse 0"}));
}

// Hopper preloads up to two words per row and per key of a mask_mod. Cases read rows, keys, both, or more than two
// words. CTAs have several tiles, and results pass through shared memory or not.
TEST(KernelsBlocks, Reading) {
  const std::string shape =
      "--dtype bf16 --batch 2 --heads-q 2 --heads-k 1 --seqlen-q 300 --seqlen-k 620 --sm-limit 2 ";
  std::vector<CheckedCase> all = with_all(
      shape + "--blocks random --head-dim 64 --head-dim-v 64 ",
      {"--mask-mod doc[batch,q]==doc[batch,k]&&k<=q+200", "--mask-mod seen[k]||!on --seed 2 --float32 o",
       "--mask-mod doc[batch,q]<4||seen[(q+k)//2]", "--mask-mod head==0||q//150==k//200",
       "--mask-mod slope[q%5]*slope[k%7]+exp(0.01*q)<table[1,k%9]*sqrt(float(k//3))+table[head,q%9]*tanh(0.1*k)"
       " --float32 o"});
  for (const char* more : {"--head-dim 128 --head-dim-v 128 --blocks hostile --left 300 --seed 3",
                           "--head-dim 256 --head-dim-v 256 --blocks random --causal 1",
                           "--head-dim 64 --head-dim-v 64 --blocks random --used-q 300,129 --used-k 300,520"})
    all.emplace_back(shape + "--mask-mod doc[batch,q]==doc[batch,k] " + more);
  expect_all_good(all);
}

// The block mask's gradients: every configuration of the kernels, heads that share keys, and options that change
// scores.
TEST(KernelsBlocks, Backward) {
  const std::string shape = "--dtype bf16 --heads-q 2 --heads-k 1 --seqlen-q 200 --seqlen-k 420 ";
  std::vector<CheckedCase> all =
      with_all(shape + "--gradients qkv --dlse 1 ",
               {"--head-dim 64 --head-dim-v 64 --blocks random --mask-mod (q^k)&3!=0 --causal 1",
                "--head-dim 128 --head-dim-v 128 --blocks random --block-shape 1h --heads-k 2 --batch 2 --left 150",
                "--head-dim 128 --head-dim-v 128 --blocks hostile --mask-mod (q^k)&3!=0 --float32 g --accumulate 1",
                "--head-dim 256 --head-dim-v 256 --blocks hostile --mask-mod (q^k)&3!=0 --dtype f16",
                "--head-dim 192 --head-dim-v 128 --blocks partial --block-shape 11 --block-q 256 --dropout 0.2",
                "--head-dim 80 --head-dim-v 112 --blocks late --block-k 256 --softcap 5 --sink f32 --gradients qkvs",
                "--head-dim 64 --head-dim-v 64 --blocks random --block-q 1000 --block-k 1000 --seed 3"});
  for (const char* more :
       {"--head-dim 64 --head-dim-v 64 --blocks random --mask-mod (q^k)&3!=0 --bias f32 --bias-shape 1h1j --gradients "
        "b",
        "--head-dim 128 --head-dim-v 128 --blocks random --mask-mod (q^k)&3!=0 --gradients qm --score-mod "
        "score*temperature+table[head,clamp(q-k+4,0,8)]",
        "--seqlen-q 1500 --seqlen-k 200 --head-dim 64 --head-dim-v 64 --heads-q 1 --heads-k 1 --blocks random "
        "--mask-mod (q^k)&3!=0 --gradients kv",
        // This case uses every region of the workspace.
        "--batch 3 --used-k 59,0,1 --head-dim 64 --head-dim-v 64 --heads-q 4 --heads-k 2 --seqlen-k 70 --causal 1 "
        "--sink f32 "
        "--blocks hostile --block-shape 1h --float32 d --score-mod score*(1+slope[head])*temperature"}) {
    all.emplace_back(shape + more);
  }
  expect_all_good(all);
}

// The used length and diagonal of each sequence bound its blocks. A sequence ends within a block, has one key, or has
// none.
TEST(KernelsBlocks, LengthsOfTheDevice) {
  const std::string shape = "--dtype bf16 --batch 4 --heads-q 2 --heads-k 1 --seqlen-q 270 --seqlen-k 520 ";
  const std::string used = "--used-q 270,129,0,64 --used-k 300,1,520,0 ";
  std::vector<CheckedCase> all = with_all(
      shape + used, {"--head-dim 64 --head-dim-v 64 --blocks random --mask-mod (q^k)&3!=0 --causal 1",
                     "--head-dim 128 --head-dim-v 128 --blocks hostile --block-shape 11 --seed 2",
                     "--head-dim 128 --head-dim-v 128 --blocks random --block-shape b1 --left 150",
                     "--head-dim 256 --head-dim-v 256 --blocks late --block-q 256 --dtype f16",
                     "--head-dim 64 --head-dim-v 64 --blocks random --gradients qkv --dlse 1 --mask-mod (q^k)&3!=0",
                     "--head-dim 128 --head-dim-v 128 --blocks random --block-shape 1h --gradients qkv --causal 1",
                     "--head-dim 256 --head-dim-v 256 --blocks hostile --gradients qkv --seed 3",
                     "--head-dim 192 --head-dim-v 128 --blocks random --block-shape 11 --block-q 256 --gradients qkv",
                     "--head-dim 64 --head-dim-v 64 --blocks random --bias f32 --bias-shape 1h1j --gradients b"});
  for (const char* more : {"--causal 1 ", "--left 100 --right 30 --gradients qkv "})
    all.emplace_back(shape + "--head-dim 64 --head-dim-v 64 --blocks random --diagonals 5,-100,300,0 --explicit 1 " +
                     more);
  expect_all_good(all);
}

// Block masks together with other options that hide keys or change scores.
TEST(KernelsBlocks, Options) {
  expect_all_good(with_all(
      "--dtype bf16 --batch 1 --heads-q 2 --heads-k 2 --seqlen-q 300 --seqlen-k 460 --head-dim 128 --head-dim-v 128 "
      "--blocks random ",
      {"--causal 1", "--causal 1 --mask-mod (q^k)&3!=0 --seed 2", "--left 150 --right 60 --mask-mod (q^k)&3!=0",
       "--softcap 5 --mask-mod (q^k)&3!=0", "--score-mod score*temperature --mask-mod k<=q+100 --sink f32",
       "--bias bool --alibi head", "--dropout 0.2 --mask-mod (q^k)&3!=0", "--scale -0.2", "--dtype f16",
       "--bias f32 --bias-inf 1 --causal 1 --top-left 1 --mask-mod (q^k)&3!=0"}));
}

TEST(KernelsBlocks, HeadDims) {
  expect_all_good(
      with_all("--dtype f16 --heads-q 2 --heads-k 1 --seqlen-q 270 --seqlen-k 390 --blocks random "
               "--mask-mod (q^k)&3!=0 ",
               {"--head-dim 72 --head-dim-v 40", "--head-dim 192 --head-dim-v 128", "--head-dim 256 --head-dim-v 256",
                "--head-dim 136 --head-dim-v 200 --causal 1", "--head-dim 256 --head-dim-v 256 --blocks hostile",
                "--blocks hostile --block-k 256"}));
}

// Rows whose first keys come late, with scores far above the earlier scores: bfloat16 skips maxima in fully visible
// blocks.
TEST(KernelsBlocks, Sharp) {
  expect_all_good(
      with_all("--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 300 --seqlen-k 1100 --head-dim 64 --head-dim-v 64 ",
               {"--blocks late --values large", "--blocks random --values needle20 --seed 4",
                "--blocks random --values large --mask-mod (q^k)&3!=0", "--blocks random --values sink20",
                "--blocks random --values copy --head-dim 128 --head-dim-v 128", "--blocks hostile --values large"}));
}

// Keys and values of blocks without a query must not be read: their contents would spoil the results.
TEST(KernelsBlocks, Unseen) {
  const auto spoil = [](Instance& in) {
    const int64_t unseen = in.c.seqlen_k / in.c.block_k / 2 * in.c.block_k;
    const int64_t row = in.c.heads_k * in.c.head_dim;
    for (Tensor* t : {&in.k, &in.v})
      for (int64_t n = 0; n < unseen * row; ++n) t->set(n, std::numeric_limits<double>::quiet_NaN());
  };
  std::vector<CheckedCase> all;
  for (const char* more :
       {"--head-dim 64 --head-dim-v 64 --gradients qkv", "--head-dim 128 --head-dim-v 128 --mask-mod (q^k)&3!=0",
        "--head-dim 256 --head-dim-v 256 --causal 1 --mask-mod (q^k)&3!=0"}) {
    all.emplace_back(
        std::string("--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 640 --seqlen-k 640 --blocks late ") + more, spoil);
  }
  expect_all_good(all);
}

// Rows see no key in their first blocks, and then only scores far below 0 in full blocks.
TEST(KernelsBlocks, Low) {
  const auto lower = [](Instance& in) {
    for (Tensor* t : {&in.q, &in.k})
      for (int64_t n = 0; n < t->size(); n += in.c.head_dim) t->set(n, t == &in.q ? 64 : -64);
  };
  std::vector<CheckedCase> all;
  for (const char* more : {"--mask-mod false --seed 2", "--mask-mod false --seed 3", "--seed 4 --block-q 256"})
    all.emplace_back(std::string("--dtype bf16 --heads-q 4 --heads-k 4 --seqlen-q 300 --seqlen-k 700 --head-dim 64 "
                                 "--head-dim-v 64 --blocks random ") +
                         more,
                     lower);
  expect_all_good(all);
}

TEST(KernelsBlocks, Small) {
  expect_all_good(
      with_all("--dtype bf16 --heads-q 2 --heads-k 2 --head-dim 64 --head-dim-v 64 --blocks random ",
               {"--seqlen-q 1 --seqlen-k 1", "--seqlen-q 1 --seqlen-k 0", "--seqlen-q 1 --seqlen-k 700 --seed 5",
                "--seqlen-q 700 --seqlen-k 1 --seed 6", "--seqlen-q 64 --seqlen-k 64 --mask-mod false"}));
}

}  // namespace
}  // namespace tandem::test
