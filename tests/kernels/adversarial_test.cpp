// Inputs that break careless kernels.
#include <cmath>
#include <limits>

#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::string kDims = "--head-dim 64 --head-dim-v 64 ";

class KernelsAdversarial : public testing::Test {
 protected:
  void add(const std::string& flags, const std::function<void(Instance&)>& adjust = nullptr) {
    for (const char* dtype : {"--dtype bf16 ", "--dtype f16 "}) cases_.emplace_back(dtype + kDims + flags, adjust);
  }
  void TearDown() override { expect_all_good(cases_); }

 private:
  std::vector<CheckedCase> cases_;
};

void set_all(Tensor& t, double x) {
  for (int64_t n = 0; n < t.size(); ++n) {
    if (!std::isnan(t.get(n))) t.set(n, x);
  }
}

TEST_F(KernelsAdversarial, NothingToDo) {
  for (const std::string flags : {"--batch 0", "--heads-q 0 --heads-k 0", "--heads-q 0 --heads-k 2", "--seqlen-q 0",
                                  "--seqlen-k 0", "--seqlen-q 0 --seqlen-k 0", "--packed 1 --max-seqlen 0",
                                  "--packed 1 --lengths-q 0,0 --lengths-k 0,0 --max-seqlen 0",
                                  "--packed 1 --lengths-q 130,3 --lengths-k 0,0 --max-seqlen 0"}) {
    add(flags);
    add(flags + " --sink f32 --causal 1");
  }
  add("--batch 0 --bias f32 --bias-shape 1hij --heads-q 2 --heads-k 2");
  add("--seqlen-k 0 --bias f32 --bias-shape bhi1");
}

TEST_F(KernelsAdversarial, RowsThatSeeNothing) {
  for (const std::string mask : {"--right -300", "--right -90", "--causal 1 --seqlen-k 3", "--left -80", "--used-k 0",
                                 "--top-left 1 --left 5 --right 5", "--top-left 1 --left 5 --right -3"}) {
    for (const char* more : {"", " --sink f32", " --alibi head --softcap 3"}) {
      add("--seqlen-q 200 --seqlen-k 150 " + mask + more);
    }
  }
}

TEST_F(KernelsAdversarial, BiasThatHidesAll) {
  for (const std::string more : {"", " --sink f32", " --causal 1", " --seqlen-q 1"}) {
    add("--seqlen-q 70 --seqlen-k 190 --bias bool" + more, [](Instance& in) { set_all(in.bias, 0); });
    add("--seqlen-q 70 --seqlen-k 190 --bias f32" + more, [](Instance& in) { set_all(in.bias, -kInfinity); });
    add("--seqlen-q 70 --seqlen-k 190 --bias same" + more, [](Instance& in) { set_all(in.bias, -kInfinity); });
    // Masks hide whole tiles, either at the end or at the beginning.
    for (const bool last : {false, true}) {
      add("--seqlen-q 70 --seqlen-k 300 --bias f32 --bias-shape 111j" + more, [=](Instance& in) {
        for (int64_t j = 0; j < 290; ++j) in.bias.set(last ? 299 - j : j, -kInfinity);
      });
    }
  }
}

// exp(lse) and exp(-lse) are outside of float32.
TEST_F(KernelsAdversarial, LogSumExpFarFromZero) {
  for (const double level : {-700.0, -200.0, -95.0, 95.0, 700.0}) {
    for (const char* more : {"--seqlen-q 140", "--seqlen-q 1", "--seqlen-q 40 --sink f32"}) {
      add("--seqlen-k 170 --bias f32 --bias-shape 11i1 " + std::string(more),
          [=](Instance& in) { set_all(in.bias, level); });
    }
  }
}

TEST_F(KernelsAdversarial, LargeScores) {
  for (const char* more : {"", "--causal 1", "--softcap 50", "--sink f32", "--seqlen-q 2", "--scale -0.125"}) {
    add("--seqlen-q 130 --seqlen-k 140 --values large " + std::string(more));
  }
}

// Cases have sinks, needles and heads that copy.
TEST_F(KernelsAdversarial, RowsThatOneKeyTakes) {
  for (const char* values : {"sink12", "sink20", "sink50", "needle12", "needle25", "needle50", "copy"}) {
    for (const char* more : {"", "--causal 1", "--head-dim 128 --head-dim-v 128", "--left 250 --right 0", "--f32 1",
                             "--packed 1 --lengths-q 384,200 --lengths-k 384,200 --used-q 300,200 --used-k 384,190",
                             "--heads-q 4 --heads-k 2 --sink f32 --causal 1"}) {
      const bool f32 = std::string(more) == "--f32 1";
      add(std::string("--seqlen-q 384 --seqlen-k 384 --values ") + values + " " + (f32 ? "--float32 o" : more));
    }
  }
}

// The maximum grows with every tile, from either end, by less and by more than the threshold of a rescale.
TEST_F(KernelsAdversarial, ScoresThatRise) {
  for (const double step : {0.01, 0.05, 0.2, 1.0, -0.01, -0.05, -0.2, -1.0}) {
    for (const char* more : {"--seqlen-q 133", "--seqlen-q 1"}) {
      add("--seqlen-k 400 --bias f32 --bias-shape 111j " + std::string(more), [=](Instance& in) {
        for (int64_t j = 0; j < 400; ++j) in.bias.set(j, step * static_cast<double>(j));
      });
    }
  }
}

// Products alone make the maximum grow. Kernels begin with the last keys, and the first ones outweigh all earlier ones
// at once. Some partial sums stay finite and other partial sums overflow, with one query or many, in one tile of many.
TEST_F(KernelsAdversarial, FirstKeysOutweighTheLast) {
  for (const double jump : {5.0, 10.0, 15.0, 30.0, 50.0, 100.0}) {
    for (const char* more :
         {"--seqlen-q 300", "--seqlen-q 700 --causal 1", "--seqlen-q 1", "--seqlen-q 90 --sink f32",
          "--seqlen-q 700 --left 400 --right 0", "--seqlen-q 700 --left 300",
          "--seqlen-q 64 --head-dim 128 --head-dim-v 128", "--seqlen-q 700 --head-dim 128 --head-dim-v 128"}) {
      add("--seqlen-k 700 --heads-q 4 --heads-k 4 " + std::string(more), [=](Instance& in) {
        const int64_t row = in.k.size() / (in.c.batch * 700);  // elements of all heads
        for (int64_t n = 0; n < in.k.size(); ++n) {
          const int64_t key = n / row % 700, head = n / in.c.head_dim % 4;
          if (head == 1) continue;
          const double level = key < 5 ? 2 * jump : key < 260 && head > 1 ? jump : 0;
          in.k.set(n, level / std::sqrt(static_cast<double>(in.c.head_dim)) + in.k.get(n) / 16);
        }
        for (int64_t n = 0; n < in.q.size(); ++n) in.q.set(n, 1 + in.q.get(n) / 16);
      });
    }
  }
}

// One product exceeds every other one by more than the range of float's exponents. Either unit may compute its exp2.
TEST_F(KernelsAdversarial, OneProductOutweighsAll) {
  for (const double jump : {40.0, 100.0, 150.0, 220.0, 400.0}) {
    for (const char* more : {"", "--causal 1", "--head-dim 128 --head-dim-v 128"}) {
      for (const int64_t key : {130, 133, 135, 140, 159}) {
        add("--seqlen-q 300 --seqlen-k 400 " + std::string(more), [=](Instance& in) {
          const int64_t d = in.c.head_dim;
          for (int64_t n = 0; n < in.k.size(); ++n)
            in.k.set(n, (n / d == key ? jump / std::sqrt(static_cast<double>(d)) : 0) + in.k.get(n) / 16);
          for (int64_t n = 0; n < in.q.size(); ++n) in.q.set(n, 1 + in.q.get(n) / 16);
        });
      }
    }
  }
}

// Only every other 128 rows outgrow their first keys: the rows of one CTA of two. If that CTA loses these rows, both
// CTAs compute the tile again.
TEST_F(KernelsAdversarial, RowsOfOneCtaOutgrowTheirFirstKeys) {
  for (const int64_t which : {0, 1}) {
    for (const char* more : {"--seqlen-q 400 --head-dim 128 --head-dim-v 128",
                             "--seqlen-q 1100 --head-dim 192 --head-dim-v 128 --heads-q 4 --heads-k 2",
                             "--batch 3 --seqlen-q 500 --head-dim 96 --head-dim-v 80"}) {
      add("--seqlen-k 700 --values needle80 " + std::string(more), [=](Instance& in) {
        const int64_t row = in.q.size() / (in.c.batch * in.c.seqlen_q);  // elements of all heads
        for (int64_t n = 0; n < in.q.size(); ++n) {
          if (n / row % in.c.seqlen_q / 128 % 2 == which) in.q.set(n, 0);
        }
      });
    }
  }
}

TEST_F(KernelsAdversarial, OneKeyOutweighsAll) {
  add("--seqlen-q 20 --seqlen-k 300 --bias f32 --bias-shape 111j", [](Instance& in) { in.bias.set(150, 500); });
  for (const double sink : {200.0, -200.0, -kInfinity}) {
    add("--seqlen-q 20 --seqlen-k 130 --sink f32", [=](Instance& in) { in.sink.set(0, sink); });
  }
}

TEST_F(KernelsAdversarial, TinyAndHugeValues) {
  for (const double size : {1e-4, 1e3}) {
    add("--seqlen-q 140 --seqlen-k 150", [=](Instance& in) {
      for (int64_t n = 0; n < in.v.size(); ++n) in.v.set(n, in.v.get(n) * size);
    });
  }
}

// A sequence full of NaN changes no bit of its neighbours.
TEST(KernelsPoison, NanInANeighbour) {
  for (const std::string dtype : {"bf16", "f16"}) {
    for (const std::string more : {"", " --causal 1 --left 20", " --sink f32 --alibi head"}) {
      const std::string flags = "--dtype " + dtype +
                                " --packed 1 --lengths-q 130,70,40 --lengths-k 135,75,40 --max-seqlen 0 --heads-q 4 "
                                "--heads-k 2 --head-dim 64 --head-dim-v 64" +
                                more;
      Repeated clean(flags);
      auto instance = std::make_unique<Instance>(clean.instance->c);
      for (int64_t n = 130 * 4 * 64; n < 200 * 4 * 64; ++n) instance->q.set(n, NAN);
      for (int64_t n = 135 * 2 * 64; n < 210 * 2 * 64; ++n) instance->k.set(n, NAN), instance->v.set(n, NAN);
      Repeated poisoned(std::move(instance));
      clean.run();
      poisoned.run();
      for (int64_t n = 0; n < clean.outputs.out.size(); ++n) {
        if (n >= 130 * 4 * 64 && n < 200 * 4 * 64) continue;
        ASSERT_FALSE(std::isnan(clean.outputs.out.get(n)));
        ASSERT_EQ(clean.outputs.out.get(n), poisoned.outputs.out.get(n)) << flags << ", element " << n;
      }
      for (int64_t n = 0; n < clean.outputs.lse.size(); ++n) {
        if (n % 240 >= 130 && n % 240 < 200) continue;
        ASSERT_EQ(clean.outputs.lse.get(n), poisoned.outputs.lse.get(n)) << flags << ", lse " << n;
      }
    }
  }
}

// A hidden NaN may spread to rows of a tile that loads it, but not farther. This test checks rows two tiles earlier.
TEST(KernelsPoison, HiddenNanStaysInItsTile) {
  for (const std::string dtype : {"bf16", "f16"}) {
    auto in = std::make_unique<Instance>(
        from_flags(kServed + kDims + "--seqlen-q 1200 --seqlen-k 1200 --causal 1 --dtype " + dtype));
    for (int64_t n = 1199 * 64; n < 1200 * 64; ++n) in->k.set(n, NAN), in->v.set(n, NAN);
    Repeated call(std::move(in));
    call.run();
    for (int64_t i = 0; i < 600; ++i) ASSERT_TRUE(std::isfinite(call.outputs.lse.get(i))) << dtype << " row " << i;
    for (int64_t n = 0; n < 600 * 64; ++n) ASSERT_TRUE(std::isfinite(call.outputs.out.get(n))) << dtype << " at " << n;
    EXPECT_TRUE(std::isnan(call.outputs.out.get(1199 * 64))) << dtype;
  }
}

}  // namespace
}  // namespace tandem::test
