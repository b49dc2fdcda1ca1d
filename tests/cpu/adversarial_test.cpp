// Inputs that break careless kernels.
#include <cmath>
#include <limits>
#include <string>

#include "cpu/judged.h"
#include "reference/reference.h"

namespace tandem::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const char* const kTypes[] = {"f32", "bf16", "f16"};

void expect_good_in_all(const std::string& flags, const std::function<void(Instance&)>& adjust = nullptr) {
  for (const std::string dtype : kTypes) expect_good("--dtype " + dtype + " " + flags, adjust);
}

void set_all(Tensor& t, double x) {
  for (int64_t n = 0; n < t.size(); ++n) {
    if (!std::isnan(t.get(n))) t.set(n, x);
  }
}

TEST(CpuAdversarial, NothingToDo) {
  for (const char* flags : {"--batch 0", "--heads-q 0 --heads-k 0", "--heads-q 0 --heads-k 2", "--seqlen-q 0",
                            "--seqlen-k 0", "--seqlen-q 0 --seqlen-k 0", "--packed 1",
                            "--packed 1 --lengths-q 0,0 --lengths-k 0,0", "--packed 1 --lengths-q 3 --lengths-k 0"}) {
    expect_good_in_all(flags);
    expect_good_in_all(std::string(flags) + " --sink f32 --dlse 1");
  }
  expect_good_in_all("--batch 0 --bias f32 --bias-shape 1hij --heads-q 2 --heads-k 2");
  expect_good_in_all("--seqlen-k 0 --bias f32 --bias-shape bhi1");
}

// Cases have sinks, needles and heads that copy.
TEST(CpuAdversarial, RowsThatOneKeyTakes) {
  const std::string dims = "--seqlen-k 384 --head-dim 64 --head-dim-v 64 --values ";
  for (const std::string values :
       {"sink12", "sink16", "sink20", "sink50", "needle12", "needle16", "needle50", "copy"}) {
    for (const std::string more : {"--seqlen-q 70", "--seqlen-q 1", "--seqlen-q 5 --splits 2"}) {
      expect_good_in_all(dims + values + " --gradients none " + more);
    }
  }
  for (const std::string values : {"sink16", "needle50", "copy"}) {
    expect_good_in_all(dims + values + " --seqlen-q 90 --heads-q 2 --heads-k 1 --sink f32 --causal 1");
  }
}

// The factor of kept entries, 16 / 15, is no bfloat16: probabilities of 1 must not be rounded with it.
TEST(CpuAdversarial, RowsOfOneKeyUnderDropout) {
  for (const char* seed : {"950078", "2", "3"}) {
    expect_good_in_all(
        "--heads-q 2 --heads-k 2 --seqlen-q 29 --seqlen-k 2 --head-dim 128 --head-dim-v 128 --dropout 0.0625 --layout "
        "56374 --used-q 23 --right 55 --seed " +
        std::string(seed));
  }
}

TEST(CpuAdversarial, RowsThatSeeNothing) {
  for (const char* mask : {"--right -300", "--right -90", "--causal 1 --seqlen-k 3", "--left -80", "--used-k 0",
                           "--top-left 1 --left 5 --right 5"}) {
    for (const char* more : {"", "--sink f32 --dlse 1", "--dlse 1 --alibi head --softcap 3"}) {
      expect_good_in_all("--seqlen-q 200 --seqlen-k 150 --head-dim 16 --head-dim-v 16 " + std::string(mask) + " " +
                         more);
    }
  }
}

TEST(CpuAdversarial, BooleanBiasThatHidesAll) {
  for (const char* more : {"", "--sink f32", "--causal 1"}) {
    expect_good_in_all("--seqlen-q 70 --seqlen-k 90 --bias bool --dlse 1 " + std::string(more),
                       [](Instance& in) { set_all(in.bias, 0); });
  }
}

TEST(CpuAdversarial, FloatBiasOfMinusInfinity) {
  for (const char* more : {"", "--sink f32", "--seqlen-q 1"}) {
    expect_good_in_all("--seqlen-q 70 --seqlen-k 190 --bias f32 --dlse 1 " + std::string(more),
                       [](Instance& in) { set_all(in.bias, -kInfinity); });
    // Masks hide the first tiles completely; visible keys follow.
    expect_good_in_all("--seqlen-q 70 --seqlen-k 300 --bias f32 --bias-shape 111j " + std::string(more),
                       [](Instance& in) {
                         for (int64_t j = 0; j < 290; ++j) in.bias.set(j, -kInfinity);
                       });
  }
}

// exp(lse) and exp(-lse) are outside of float32.
TEST(CpuAdversarial, LogSumExpFarFromZero) {
  for (const double level : {-700.0, -200.0, -95.0, 95.0, 700.0}) {
    for (const char* more : {"--seqlen-q 40", "--seqlen-q 1", "--seqlen-q 40 --sink f32"}) {
      SCOPED_TRACE(level);
      expect_good_in_all("--seqlen-k 70 --dlse 1 --bias f32 --bias-shape 11i1 " + std::string(more),
                         [=](Instance& in) { set_all(in.bias, level); });
    }
  }
}

TEST(CpuAdversarial, LargeScores) {
  for (const char* more : {"", "--causal 1", "--softcap 50", "--sink f32", "--dropout 0.5", "--seqlen-q 2"}) {
    expect_good_in_all("--seqlen-q 130 --seqlen-k 140 --head-dim 64 --head-dim-v 64 --values large " +
                       std::string(more));
  }
}

// The maximum grows with every tile, by less and by more than the threshold of a rescale.
TEST(CpuAdversarial, ScoresThatRise) {
  for (const double step : {0.01, 0.05, 0.2, 1.0, 3.0}) {
    for (const char* more : {"--seqlen-q 33", "--seqlen-q 1"}) {
      expect_good_in_all("--seqlen-k 400 --bias f32 --bias-shape 111j " + std::string(more), [=](Instance& in) {
        for (int64_t j = 0; j < 400; ++j) in.bias.set(j, step * static_cast<double>(j));
      });
      expect_good_in_all("--seqlen-k 400 --bias f32 --bias-shape 111j " + std::string(more), [=](Instance& in) {
        for (int64_t j = 0; j < 400; ++j) in.bias.set(j, -step * static_cast<double>(j));
      });
    }
  }
}

TEST(CpuAdversarial, OneKeyOutweighsAll) {
  expect_good_in_all("--seqlen-q 20 --seqlen-k 300 --bias f32 --bias-shape 111j --dlse 1",
                     [](Instance& in) { in.bias.set(150, 500); });
  expect_good_in_all("--seqlen-q 20 --seqlen-k 30 --sink f32 --dlse 1", [](Instance& in) { in.sink.set(0, 200); });
  expect_good_in_all("--seqlen-q 20 --seqlen-k 30 --sink f32 --dlse 1", [](Instance& in) { in.sink.set(0, -200); });
  expect_good_in_all("--seqlen-q 20 --seqlen-k 30 --sink f32 --dlse 1",
                     [](Instance& in) { in.sink.set(0, -kInfinity); });
}

TEST(CpuAdversarial, TinyAndHugeValues) {
  for (const double size : {1e-4, 1e3}) {
    expect_good_in_all("--seqlen-q 40 --seqlen-k 50 --head-dim 16 --head-dim-v 16", [=](Instance& in) {
      for (int64_t n = 0; n < in.v.size(); ++n) in.v.set(n, in.v.get(n) * size);
    });
  }
  for (const char* dtype : {"f32", "bf16"}) {
    expect_good(std::string("--gradients none --seqlen-q 40 --seqlen-k 50 --dtype ") + dtype, [](Instance& in) {
      for (int64_t n = 0; n < in.v.size(); ++n) in.v.set(n, in.v.get(n) * 1e30);
    });
  }
}

// Dropout doubles the kept values, so that many exceed the largest float16.
TEST(CpuAdversarial, ResultsThatOverflow) {
  expect_good("--gradients none --dtype f16 --seqlen-q 40 --seqlen-k 3 --dropout 0.5", [](Instance& in) {
    for (int64_t n = 0; n < in.v.size(); ++n) in.v.set(n, n % 8 < 4 ? 60000 : -60000);
  });
}

// A sequence full of NaN changes no bit of its neighbours.
TEST(CpuAdversarial, NanInANeighbour) {
  for (const std::string dtype : kTypes) {
    const Case c =
        from_flags("--dtype " + dtype +
                   " --packed 1 --lengths-q 30,20,40 --lengths-k 35,25,40 --causal 1 --heads-q 4 --heads-k 2");
    const NamedEngine engine = cpu_engine(2);
    Instance clean(c), poisoned(c);
    for (int64_t n = 30 * 4 * 8; n < 50 * 4 * 8; ++n) poisoned.q.set(n, NAN), poisoned.dout.set(n, NAN);
    for (int64_t n = 35 * 2 * 8; n < 60 * 2 * 8; ++n) poisoned.k.set(n, NAN), poisoned.v.set(n, NAN);
    for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
      Outputs a = clean.outputs(pass), b = poisoned.outputs(pass);
      engine.run(clean.problem(pass, &a));
      engine.run(poisoned.problem(pass, &b));
      const auto same_outside = [&](const Tensor& x, const Tensor& y, int64_t begin, int64_t end) {
        for (int64_t n = 0; n < x.size(); ++n) {
          if (n >= begin && n < end) continue;
          ASSERT_FALSE(std::isnan(x.get(n)));
          ASSERT_EQ(x.get(n), y.get(n)) << dtype << " element " << n;
        }
      };
      if (pass == TANDEM_FORWARD) {
        same_outside(a.out, b.out, 30 * 4 * 8, 50 * 4 * 8);
        Outputs exact = clean.exact_outputs(pass);
        reference::forward(clean.exact_problem(pass, &exact));
        clean.give_results(&exact);
        poisoned.give_results(&exact);
        for (int64_t n = 30 * 4 * 8; n < 50 * 4 * 8; ++n) poisoned.given_out.set(n, NAN);
        for (int64_t n = 0; n < poisoned.given_lse.size(); ++n) {
          if (n % 90 >= 30 && n % 90 < 50) poisoned.given_lse.set(n, NAN);
        }
      } else {
        same_outside(a.dq, b.dq, 30 * 4 * 8, 50 * 4 * 8);
        same_outside(a.dk, b.dk, 35 * 2 * 8, 60 * 2 * 8);
        same_outside(a.dv, b.dv, 35 * 2 * 8, 60 * 2 * 8);
      }
    }
  }
}

// A hidden NaN may spread to rows of a tile that loads it, but not farther. This test checks rows two tiles earlier.
TEST(CpuAdversarial, HiddenNanStaysInItsTile) {
  for (const std::string dtype : kTypes) {
    Instance in(from_flags("--dtype " + dtype + " --seqlen-q 1200 --seqlen-k 1200 --causal 1"));
    for (int64_t n = 1199 * 8; n < 1200 * 8; ++n) in.k.set(n, NAN), in.v.set(n, NAN);
    Outputs o = in.outputs(TANDEM_FORWARD);
    cpu_engine(2).run(in.problem(TANDEM_FORWARD, &o));
    for (int64_t i = 0; i < 600; ++i) ASSERT_TRUE(std::isfinite(o.lse.get(i))) << dtype << " row " << i;
    for (int64_t n = 0; n < 600 * 8; ++n) ASSERT_TRUE(std::isfinite(o.out.get(n))) << dtype << " element " << n;
    EXPECT_TRUE(std::isnan(o.out.get(1199 * 8))) << dtype << ": " << o.out.get(1199 * 8);
  }
}

}  // namespace
}  // namespace tandem::test
