// Compares every execution on 1 to 8 ranks with the float64 reference: all gradients, options and layouts.
#include <gtest/gtest.h>

#include <string>

#include "ranks/shards.h"
#include "support/random.h"

namespace tandem::test {
namespace {

constexpr int32_t kExecutions[] = {TANDEM_CP_GATHER, TANDEM_CP_RING, TANDEM_CP_HEADS};

void expect_accurate(const std::string& flags, const Division& division) {
  const Verdict verdict = run_case(from_flags(flags), engine_on_ranks(division));
  EXPECT_EQ(verdict.failure, "") << division.text();
  EXPECT_EQ(verdict.refusal, "") << flags;
}

const char* const kDocuments = "--packed 1 --lengths-q 37,0,1,50,9 --lengths-k 37,0,1,50,9 ";

class RankOptions : public testing::TestWithParam<const char*> {};

// Options of one call each, in every execution on 2 and 5 ranks and in every layout, with and without chunks.
TEST_P(RankOptions, AreAccurate) {
  std::string flags = kDocuments;
  flags.append("--heads-q 4 --heads-k 2 --head-dim 16 --head-dim-v 8 ").append(GetParam());
  int32_t layout = 0;
  for (const int32_t execution : kExecutions) {
    for (const int64_t chunk : {int64_t{0}, int64_t{8}}) {
      for (const int32_t ranks : {2, 5}) {
        layout = (layout + 1) % 5;
        expect_accurate(flags, {ranks, layout, execution, chunk});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RankOptions,
                         testing::Values("--causal 1", "--left 11 --right 3", "--causal 1 --left 20",
                                         "--causal 1 --softcap 3", "--causal 1 --sink f32 --dlse 1",
                                         "--sink f32 --left 4 --right -2", "--causal 1 --alibi head",
                                         "--alibi batch --left 15", "--scale 0.3 --dlse 1",
                                         "--causal 1 --dropout 0.3 --sink f32 --dlse 1", "--mask-mod k<=q+3&&q-k<20",
                                         "--score-mod score*0.5-slope[head]*abs(q-k)+table[head,(q*k)%9] --causal 1",
                                         "--score-mod score*temperature+table[batch,k-q]*slope[q] --sink f32 --dlse 1 "
                                         "--left 9 --gradients qkvbst",
                                         "--mask-mod q%7>=k%5+batch-2 --score-mod 3*tanh(score/3)+q/seqlen_q "
                                         "--dropout 0.1"));

// Without chunks the neighbouring rows of a striped shard have a distance of several positions.
TEST(Ranks, StripedShardsReadPositions) {
  for (const char* options :
       {"--alibi head --causal 1", "--alibi batch --left 15 --right 3", "--dropout 0.3 --dlse 1",
        "--dropout 0.2 --alibi head --causal 1 --mask-mod (k+q)%5>0", "--score-mod score+slope[q%4]*table[k%4,q]"}) {
    std::string flags = kDocuments;
    flags.append("--heads-q 4 --heads-k 2 --head-dim 16 --head-dim-v 8 ").append(options);
    for (const int32_t ranks : {2, 3, 20}) {
      for (const int32_t execution : kExecutions) expect_accurate(flags, {ranks, TANDEM_CP_STRIPED, execution, 0});
    }
    expect_accurate(
        "--packed 1 --lengths-q 5,30 --lengths-k 41,9 --heads-q 2 --heads-k 1 --explicit 1 --diagonals 35,-4 " +
            std::string(options),
        {3, TANDEM_CP_STRIPED, TANDEM_CP_RING, 0});
  }
}

TEST(Ranks, Types) {
  for (const std::string type : {"--dtype bf16", "--dtype f16", "--dtype bf16 --float32 oqkvd"}) {
    for (const int32_t execution : kExecutions) {
      std::string flags = kDocuments;
      flags.append("--heads-q 4 --heads-k 2 --head-dim 32 --head-dim-v 32 --causal 1 --sink f32 ").append(type);
      flags.append(" --score-mod score*temperature+table[head,q-k]*slope[head]");
      expect_accurate(flags, {3, TANDEM_CP_ZIGZAG, execution, 0});
      expect_accurate(flags, {4, TANDEM_CP_BALANCED, execution, 16});
    }
  }
}

TEST(Ranks, QueriesAndKeysOfOtherLengths) {
  const std::string flags =
      "--packed 1 --lengths-q 5,0,30,1,12 --lengths-k 40,7,3,0,12 --heads-q 2 --heads-k 1 --causal 1 --sink f32 "
      "--explicit 1 --diagonals 35,0,-4,2,5";
  for (const int32_t execution : kExecutions) {
    for (const int32_t layout : {0, 1, 2, 3, 4}) {
      expect_accurate(flags, {3, layout, execution, 0});
      expect_accurate(flags, {2, layout, execution, 7});
    }
  }
}

// A rank has the bias rows of its queries. Documents have other lengths than the batch.
TEST(Ranks, Biases) {
  const std::string lengths =
      "--batch 4 --seqlen-q 30 --seqlen-k 41 --used-q 30,0,1,17 --used-k 41,9,1,17 --heads-q 4 --heads-k 2 ";
  int32_t layout = 0;
  for (const char* options :
       {"--bias f32 --causal 1 --sink f32 --dlse 1", "--bias same --bias-shape b1ij --dtype bf16 --left 9 --right 3",
        "--bias bool --causal 1", "--bias f32 --bias-shape b1ij --bias-inf 1 --alibi head --softcap 4",
        "--bias f32 --dropout 0.2 --score-mod score*temperature+slope[head]*q/seqlen_k"}) {
    for (const int32_t execution : kExecutions) {
      for (const int64_t chunk : {int64_t{0}, int64_t{8}}) {
        for (const int32_t ranks : {1, 2, 3, 4}) {
          layout = (layout + 1) % 5;
          expect_accurate(lengths + options, {ranks, layout, execution, chunk});
        }
      }
    }
  }
}

// Blocks cross the bounds of shards. Documents have other lengths than the batch.
TEST(Ranks, BlockMasks) {
  const std::string lengths =
      "--batch 4 --seqlen-q 50 --seqlen-k 61 --used-q 50,0,1,33 --used-k 61,9,1,33 --heads-q 4 --heads-k 2 ";
  int32_t layout = 0;
  for (const char* options :
       {"--blocks random --block-q 8 --block-k 4 --mask-mod (q+k)%3>0 --causal 1 --sink f32 --dlse 1 "
        "--block-shape b1",
        "--blocks partial --block-q 4 --block-k 16 --left 20 --bias f32 --dtype bf16 --block-shape b1",
        "--blocks random --block-q 16 --block-k 8 --block-shape 11 --dropout 0.2 "
        "--score-mod score*temperature+table[head,k%9]"}) {
    for (const int32_t execution : kExecutions) {
      for (const int64_t chunk : {int64_t{0}, int64_t{16}}) {
        for (const int32_t ranks : {1, 2, 3, 4}) {
          layout = (layout + 1) % (chunk > 0 ? 5 : 4);
          expect_accurate(lengths + options, {ranks, layout, execution, chunk});
        }
      }
    }
  }
}

// Ranks without queries, without keys or without heads still take part.
TEST(Ranks, RanksWithoutWork) {
  for (const int32_t execution : kExecutions) {
    for (const int64_t chunk : {int64_t{0}, int64_t{4}}) {
      expect_accurate("--packed 1 --lengths-q 3,0 --lengths-k 3,0 --causal 1 --sink f32", {8, 0, execution, chunk});
      expect_accurate("--packed 1 --lengths-q 1 --lengths-k 30 --causal 1", {8, 1, execution, chunk});
      expect_accurate("--packed 1 --lengths-q 30 --lengths-k 1 --causal 1 --score-mod score+slope[q]*table[k,q]",
                      {8, 2, execution, chunk});
      expect_accurate("--packed 1 --lengths-q 0 --lengths-k 9 --score-mod score*slope[q]", {3, 0, execution, chunk});
    }
  }
}

TEST(Ranks, DenseBatches) {
  for (const int32_t execution : kExecutions) {
    expect_accurate("--batch 3 --seqlen-q 21 --seqlen-k 21 --heads-q 3 --heads-k 3 --causal 1", {4, 4, execution, 0});
  }
}

// Random documents, options and divisions.
TEST(Ranks, RandomProblems) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Random r(seed);
    Case c;
    c.dtype = r.chance(0.7) ? "f32" : "bf16";
    c.packed = true;
    const auto length = [&] { return r.chance(0.3) ? r.between(0, 1) : r.between(0, 40); };
    const bool same = r.chance(0.6);
    for (int64_t n = r.between(1, 5); n > 0; --n) {
      c.lengths_q.push_back(length());
      c.lengths_k.push_back(same ? c.lengths_q.back() : length());
    }
    c.batch = 1;
    c.seqlen_q = c.seqlen_k = 0;
    c.heads_k = r.between(1, 3);
    c.heads_q = c.heads_k * r.between(1, 3);
    c.head_dim = r.between(1, 24);
    c.head_dim_v = r.between(1, 24);
    c.causal = r.chance(0.6);
    c.top_left = r.chance(0.3);
    if (r.chance(0.4)) c.left = r.between(0, 20);
    if (r.chance(0.3)) c.softcap = 2;
    if (r.chance(0.4)) c.sink = "f32";
    c.dlse = r.chance(0.3);
    if (r.chance(0.3)) c.score_mod = "score*temperature+slope[head]*table[q,k]";
    c.seed = static_cast<int64_t>(seed);
    Division division;
    division.ranks = static_cast<int32_t>(r.between(1, 8));
    division.layout = static_cast<int32_t>(r.between(0, 4));
    division.execution = static_cast<int32_t>(r.between(0, 2));
    division.chunk = r.chance(0.4) ? r.between(1, 16) : 0;
    expect_accurate(to_flags(c), division);
  }
}

}  // namespace
}  // namespace tandem::test
