// Kernels copy a bias to shared memory in pieces of the size that its strides and its address allow.
#include <string>
#include <vector>

#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

// Moves the bias in memory: `margin` elements before its first element, `gap` elements between rows.
std::function<void(Instance&)> moved(int64_t margin, int64_t gap) {
  return [=](Instance& in) {
    Tensor bias(in.bias.dtype(), in.bias.shape(), gap > 0 ? kGaps : kCompact, margin, gap);
    for (int64_t n = 0; n < bias.size(); ++n) bias.set(n, in.bias.get(n));
    in.bias = std::move(bias);
  };
}

// Rows are multiples of 16 bytes, of 4 bytes or of neither, or only begin off such a multiple. Tiles are whole, or end
// with the tensor's last row or key: nothing beyond is read.
TEST(KernelsBias, PiecesOfEveryLength) {
  const struct {
    int64_t seqlen_k, margin, gap;
  } places[] = {{256, 64, 0}, {200, 64, 0}, {202, 64, 0}, {201, 64, 0}, {200, 33, 0}, {200, 34, 0}, {201, 64, 7}};
  std::vector<CheckedCase> cases;
  for (const char* bias : {"f32", "same", "bool"}) {
    for (const char* dims : {"64 --head-dim-v 64", "128 --head-dim-v 128"}) {
      for (const auto& place : places) {
        cases.emplace_back("--dtype bf16 --gradients qkv --seqlen-q 150 --seqlen-k " + std::to_string(place.seqlen_k) +
                               " --bias " + bias + " --head-dim " + dims,
                           moved(place.margin, place.gap));
      }
    }
  }
  expect_all_good(cases);
}

// TMA copies a shared bias for the CTAs of a cluster: shared by sequences, by heads, or by both. Other tiles also share
// keys and values. Rows and keys end within a tile, and a NaN follows each row.
TEST(KernelsBias, OfACluster) {
  std::vector<CheckedCase> cases;
  for (const char* sharing : {"--batch 4 --bias-shape 1hij --heads-q 2 --heads-k 2 --sm-limit 4",
                              "--batch 2 --bias-shape b1ij --heads-q 4 --heads-k 2 --softcap 3 --sm-limit 7",
                              "--batch 1 --bias-shape 11ij --heads-q 8 --heads-k 8 --dropout 0.2",
                              "--batch 5 --bias-shape 1hij --heads-q 2 --heads-k 2 --bias-inf 1 --sm-limit 2",
                              "--batch 4 --bias-shape 11ij --heads-q 2 --heads-k 2 --causal 1",
                              "--batch 2 --bias-shape bhij --heads-q 3 --heads-k 1 --seqlen-q 450 --sm-limit 3",
                              "--batch 1 --bias-shape bhij --heads-q 2 --heads-k 2 --seqlen-q 130 --dropout 0.2"}) {
    for (const char* dims : {"64 --head-dim-v 64 --bias f32", "128 --head-dim-v 128 --bias f32",
                             "128 --head-dim-v 128 --bias same --float32 o", "256 --head-dim-v 256 --bias f32"}) {
      cases.emplace_back(std::string("--dtype bf16 --gradients none --align 8 --seqlen-q 300 --seqlen-k 328 ") +
                             "--head-dim " + dims + " " + sharing,
                         moved(64, 8));
    }
  }
  expect_all_good(cases);
}

// Sequences and heads share a bias, or neighbouring rows of a tile belong to different heads. Cases have lengths,
// masks, and scales that kernels cannot divide the bias by.
TEST(KernelsBias, BesideOtherOptions) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--batch 3 --bias-shape 1hij --heads-q 2 --heads-k 2", "--batch 3 --bias-shape b1ij --heads-q 2 --heads-k 2",
        "--batch 2 --bias-shape 11i1 --heads-q 4 --heads-k 1 --causal 1", "--batch 2 --used-q 9,140 --used-k 201,70",
        "--batch 2 --bias-shape 1h1j --heads-q 4 --heads-k 2 --left 60 --right 3 --bias-inf 1",
        "--scale 0.00000001 --values large", "--scale 4000000 --gradients none"}) {
    for (const char* dims : {"64 --head-dim-v 64", "128 --head-dim-v 128"}) {
      cases.emplace_back(std::string("--dtype f16 --align 8 --seqlen-q 140 --seqlen-k 264 --bias f32 ") +
                         "--head-dim " + dims + " " + flags);
    }
  }
  expect_all_good(cases);
}

}  // namespace
}  // namespace tandem::test
