// With chunks, the bits of every result depend neither on the number of ranks nor on the layout and the execution.
// Without chunks they are the same in every run.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ranks/shards.h"
#include "reference/reference.h"

namespace tandem::test {
namespace {

constexpr int32_t kExecutions[] = {TANDEM_CP_GATHER, TANDEM_CP_RING, TANDEM_CP_HEADS};

// Hashes of out, lse and all gradients.
std::vector<uint64_t> bits_of(const Case& c, const Division& division) {
  Instance in(c);
  std::vector<uint64_t> bits;
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    Outputs outputs = in.outputs(pass);
    run_on_ranks(in.problem(pass, &outputs), division, options_of(in.args(pass, &outputs)));
    for (const Tensor* t : outputs.all()) {
      if (*t) bits.push_back(t->fingerprint());
    }
    if (pass == TANDEM_FORWARD) in.give_results(&outputs);
  }
  return bits;
}

// One device could not reproduce the bits of several.
TEST(RankComplaints, CudnnFrontend752And1142OneDeviceReproducesTheBits) {
  struct ChunkCase {
    const char* flags;
    int64_t chunk;
  };
  const ChunkCase kCases[] = {
      {"--packed 1 --lengths-q 70,0,1,33 --lengths-k 70,0,1,33 --heads-q 6 --heads-k 3 --causal 1 --sink f32", 8},
      {"--packed 1 --lengths-q 90 --lengths-k 90 --heads-q 4 --heads-k 2 --left 25 --right 4 --dtype bf16 --softcap 5",
       8},
      {"--packed 1 --lengths-q 20,41 --lengths-k 55,9 --heads-q 2 --heads-k 2 --alibi head --dlse 1", 5},
      {"--packed 1 --lengths-q 50,20 --lengths-k 50,20 --heads-q 4 --heads-k 2 --dropout 0.2 --mask-mod k<=q+head "
       "--score-mod score*temperature+slope[head]*q/seqlen_k+table[head,k-q]",
       16},
      {"--batch 2 --seqlen-q 50 --seqlen-k 41 --used-q 50,21 --used-k 41,30 --heads-q 6 --heads-k 3 --causal 1 "
       "--bias f32 --bias-shape b1ij --score-mod score+slope[q]*table[batch,k]",
       16},
      {"--batch 1 --seqlen-q 50 --seqlen-k 50 --heads-q 4 --heads-k 2 --dtype bf16 --bias same", 8},
      {"--batch 1 --seqlen-q 90 --seqlen-k 70 --heads-q 4 --heads-k 2 --left 20 --blocks random --block-q 8 --block-k "
       "4 "
       "--block-shape 11 --mask-mod (q*k)%5>0",
       16},
      {"--packed 1 --lengths-q 700 --lengths-k 700 --heads-q 8 --heads-k 2 --head-dim 32 --head-dim-v 32 --causal 1",
       128},
  };
  for (const auto& [flags, chunk] : kCases) {
    const Case c = from_flags(flags);
    const std::vector<uint64_t> one = bits_of(c, {1, TANDEM_CP_CONTIGUOUS, TANDEM_CP_GATHER, chunk});
    int32_t layout = 0;
    for (const int32_t ranks : {1, 2, 3, 4, 8}) {
      for (const int32_t execution : kExecutions) {
        layout = (layout + 1) % 5;
        const Division division{ranks, layout, execution, chunk};
        EXPECT_EQ(bits_of(c, division), one) << flags << ": " << division.text();
      }
    }
  }
}

TEST(RankBits, RepeatWithoutChunks) {
  const Case c = from_flags("--packed 1 --lengths-q 70,30 --lengths-k 70,30 --heads-q 4 --heads-k 2 --causal 1");
  for (const int32_t execution : kExecutions) {
    const Division division{4, TANDEM_CP_BALANCED, execution, 0};
    EXPECT_EQ(bits_of(c, division), bits_of(c, division)) << division.text();
  }
  // Both merge by rounds, so that a ring may replace a gather.
  EXPECT_EQ(bits_of(c, {4, 0, TANDEM_CP_GATHER, 0}), bits_of(c, {4, 0, TANDEM_CP_RING, 0}));
}

}  // namespace
}  // namespace tandem::test
