// Rows whose scores are all large, and rows with one dominant key: probabilities must keep the digits that a float32
// lse drops.
#include <cmath>
#include <limits>
#include <string>

#include "cpu/judged.h"

namespace tandem::test {
namespace {

const std::string kGradients = " --gradients qkvbsm ";

void fill(Tensor& t, const std::function<double(int64_t)>& value) {
  for (int64_t n = 0; n < t.size(); ++n) {
    if (!std::isnan(t.get(n))) t.set(n, value(n));
  }
}

void expect_good_in_all(const std::string& flags, const std::function<void(Instance&)>& adjust = nullptr) {
  for (const std::string dtype : {"f32", "f16", "bf16"}) expect_good("--dtype " + dtype + kGradients + flags, adjust);
}

TEST(CpuLargeScores, RandomBias) {
  for (const double sigma : {1e2, 1e4, 1e6}) {
    for (const char* shape :
         {"--seqlen-q 70 --seqlen-k 150", "--seqlen-q 3 --seqlen-k 300", "--seqlen-q 40 --seqlen-k 420"}) {
      expect_good_in_all("--bias f32 --head-dim 64 --head-dim-v 64 --dlse 1 " + std::string(shape),
                         [&](Instance& in) { fill(in.bias, [&](int64_t n) { return in.bias.get(n) * sigma; }); });
    }
  }
}

TEST(CpuLargeScores, WholeRows) {
  for (const double score : {-1e4, -1e8, -1e9, -1e10, -1e30, 1e9}) {
    for (const char* more : {"--gradients qkvs", "--sink f32 --gradients qkvs", "--causal 1 --gradients qkv",
                             "--seqlen-q 2 --gradients qkv", "--dtype f32 --seqlen-q 2"}) {
      // Every third row has large scores, or every row. float32 rounds these scores, so that dbias is requested only in
      // float32: the test compares a 16-bit dbias with the reference's out.
      expect_good_in_all("--seqlen-q 50 --seqlen-k 210 --bias f32 --bias-shape 11i1 " + std::string(more),
                         [=](Instance& in) { fill(in.bias, [=](int64_t n) { return n % 3 == 0 ? score : 0; }); });
      expect_good_in_all("--seqlen-q 50 --seqlen-k 70 --bias f32 --bias-shape 1111 " + std::string(more),
                         [=](Instance& in) { fill(in.bias, [=](int64_t) { return score; }); });
    }
  }
}

TEST(CpuLargeScores, ScoreMod) {
  for (const char* mod : {"select(q>3,score,-1e9)", "score-1e8", "select(k>q,score-1e4,score*100)"})
    expect_good_in_all("--seqlen-q 40 --seqlen-k 90 --score-mod " + std::string(mod));
}

TEST(CpuLargeScores, SteepAlibi) {
  for (const double slope : {-5.0, 5.0, -300.0}) {
    expect_good_in_all("--alibi head --heads-q 2 --heads-k 1 --seqlen-q 70 --seqlen-k 250",
                       [=](Instance& in) { fill(in.alibi_slopes, [=](int64_t) { return slope; }); });
  }
}

// The reference's lse: its products have another order than the engine's, so that sums and lse agree less.
// Cancelling products, softcap and score_mod make the errors of scores large against lse.
TEST(CpuLargeScores, OtherLse) {
  for (const char* more :
       {"--mask-mod (q+k)%3==0 --seqlen-k 3 --head-dim 128", "--softcap 4 --left 0 --right 0 --head-dim 64",
        "--softcap 4 --score-mod 3*score --seqlen-k 2 --head-dim 40", "--left 0 --right 0 --head-dim 256",
        "--score-mod score*c --causal 1 --seqlen-k 40 --head-dim 128", "--seqlen-q 5 --seqlen-k 300 --head-dim 192",
        "--seqlen-q 300 --seqlen-k 300 --left 0 --right 0 --head-dim 128", "--seqlen-k 3 --sink f32 --head-dim 96",
        "--seqlen-q 300 --seqlen-k 300 --mask-mod k==(q*7)%299 --head-dim 128",
        "--seqlen-q 300 --seqlen-k 300 --score-mod select(k==(q*7)%299,score,-inf) --head-dim 64"}) {
    for (const char* seed : {"1", "2", "3"})
      expect_good(
          "--dtype f32 --heads-q 2 --heads-k 2 --seqlen-q 40 --seqlen-k 40 --lse 0 --values large --gradients qkvs "
          "--seed " +
          std::string(seed) + " " + more);
  }
  expect_good(
      "--dtype f32 --batch 2 --heads-q 2 --heads-k 2 --seqlen-q 32 --seqlen-k 32 --head-dim 96 --head-dim-v 96 "
      "--bias bool --bias-shape b11j --lse 0 --values large --seed 7016" +
      kGradients);
}

TEST(CpuLargeScores, SinkAmongThem) {
  for (const double score : {-1e9, 1e4}) {
    for (const double sink : {-1e9, 1e4, 50.0}) {
      expect_good("--dtype f32 --seqlen-q 40 --seqlen-k 60 --sink f32 --bias f32 --bias-shape 1111" + kGradients,
                  [=](Instance& in) {
                    fill(in.bias, [=](int64_t) { return score; });
                    fill(in.sink, [=](int64_t) { return sink; });
                  });
    }
  }
}

// Equal scores: a float32 lse rounds log(keys), by 8 half units for 3100 keys. Standard attention makes at most two
// roundings of float32, for 1 / n and for the product. Twice as much is allowed.
TEST(CpuLargeScores, FewBroadRows) {
  for (const int keys : {8, 100, 1500, 3100, 3625}) {
    Instance in(
        from_flags("--dtype f32 --values integer --gradients v --batch 1 --heads-q 1 --heads-k 1 --seqlen-q 1 "
                   "--head-dim 16 --head-dim-v 16 --seqlen-k " +
                   std::to_string(keys)));
    Outputs results = in.outputs(TANDEM_FORWARD);
    cpu_engine(2).run(in.problem(TANDEM_FORWARD, &results));
    in.give_results(&results);
    Outputs gradients = in.outputs(TANDEM_BACKWARD);
    cpu_engine(2).run(in.problem(TANDEM_BACKWARD, &gradients));
    for (int64_t n = 0; n < gradients.dv.size(); ++n) {
      const double reference = in.dout.get(n % 16) / keys;
      ASSERT_LE(std::fabs(gradients.dv.get(n) - reference), std::fabs(reference) * 0x1p-22) << keys << " keys";
    }
  }
}

// The probability of a dominant key must be 1 on every path of the engine: streamed, transposed, tiled, split.
TEST(CpuLargeScores, RowsThatOneKeyTakes) {
  for (const char* shape :
       {"--seqlen-q 1 --seqlen-k 1 --head-dim 256 --head-dim-v 256", "--seqlen-q 6 --seqlen-k 1 --head-dim 64",
        "--seqlen-q 200 --seqlen-k 1", "--seqlen-q 200 --seqlen-k 200 --left 0 --right 0 --head-dim 128",
        "--seqlen-q 3 --seqlen-k 1100 --head-dim 40 --splits 2", "--seqlen-q 70 --seqlen-k 300 --head-dim 64",
        "--seqlen-q 9 --seqlen-k 300 --head-dim 64 --softcap 50", "--seqlen-q 40 --seqlen-k 200 --causal 1"}) {
    for (const char* values : {"large", "needle16", "sink50", "copy"}) {
      if (std::string(values) == "copy" && std::string(shape).find("k 1 ") != std::string::npos) continue;
      expect_good("--dtype f32 --dlse 1 --values " + std::string(values) + kGradients + shape);
    }
  }
}

// A few keys take each row. dS of a row adds up to 0, because the rounding errors of dP cancel in dP - delta. On
// average the sum is below a quarter of the last digit of the largest dP.
TEST(CpuLargeScores, RowsThatFewKeysTake) {
  constexpr int64_t kRows = 64, kKeys = 64, kDim = 256;
  Instance in(
      from_flags("--dtype f32 --batch 1 --heads-q 1 --heads-k 1 --seqlen-q 64 --seqlen-k 64 --head-dim 32 "
                 "--head-dim-v 256 --bias f32 --gradients b"));
  for (int64_t n = 0; n < in.bias.size(); ++n) in.bias.set(n, 5 * in.bias.get(n));
  Outputs results = in.outputs(TANDEM_FORWARD);
  cpu_engine(2).run(in.problem(TANDEM_FORWARD, &results));
  in.give_results(&results);
  Outputs gradients = in.outputs(TANDEM_BACKWARD);
  cpu_engine(2).run(in.problem(TANDEM_BACKWARD, &gradients));
  double sums = 0, limits = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    double sum = 0, largest = 0;
    for (int64_t key = 0; key < kKeys; ++key) {
      sum += gradients.dbias.get(row * kKeys + key);
      double dp = 0;
      for (int64_t c = 0; c < kDim; ++c) dp += in.dout.get(row * kDim + c) * in.v.get(key * kDim + c);
      largest = std::max(largest, std::fabs(dp));
    }
    sums += std::fabs(sum);
    limits += largest * 0x1p-25;
  }
  EXPECT_LE(sums, limits);
}

// max_scores is NaN if a score of the row is NaN.
TEST(CpuLargeScores, NanInMaxScores) {
  for (const char* shape : {"--seqlen-q 1 --seqlen-k 2", "--seqlen-q 5 --seqlen-k 1", "--seqlen-q 70 --seqlen-k 90"}) {
    for (const std::string dtype : {"f32", "f16", "bf16"}) {
      expect_good("--max-scores 1 --gradients none --dtype " + dtype + " " + shape,
                  [](Instance& in) { in.k.set(in.k.size() - 1, std::numeric_limits<double>::quiet_NaN()); });
    }
  }
}

// Blocks that a block mask hides are skipped. Tiles, panels and pairs of keys begin at other positions.
TEST(CpuLargeScores, HiddenBlocks) {
  for (const char* blocks : {"--block-q 64 --block-k 48", "--block-q 128 --block-k 128", "--block-q 7 --block-k 33",
                             "--block-q 500 --block-k 1"}) {
    for (const char* kind : {"random", "partial", "hostile", "late"}) {
      for (const char* more :
           {"", "--bias f32 --dlse 1", "--softcap 5 --dropout 0.2", "--mask-mod k<=q --score-mod score*c"}) {
        expect_good_in_all("--seqlen-q 410 --seqlen-k 430 --blocks " + std::string(kind) + " " + blocks + " " + more);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
