// The reference at inputs whose results are known by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "problem/philox.h"
#include "reference/reference.h"
#include "support/instance.h"

namespace tandem::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One float64 problem whose inputs a test may set before it runs.
struct Known {
  explicit Known(const std::string& flags) : instance(from_flags(flags + " --dtype f64")) {}

  void forward() {
    results = instance.exact_outputs(TANDEM_FORWARD);
    reference::forward(instance.exact_problem(TANDEM_FORWARD, &results));
  }
  void backward() {
    forward();
    instance.give_results(&results);
    gradients = instance.exact_outputs(TANDEM_BACKWARD);
    reference::backward(instance.exact_problem(TANDEM_BACKWARD, &gradients));
  }

  Instance instance;
  Outputs results, gradients;
};

// Returns the visible keys of each query, read from out with the identity as v: "110 111".
std::string visible(const std::string& options, int64_t seqlen_q, int64_t seqlen_k) {
  const std::string keys = std::to_string(seqlen_k);
  Known known("--seqlen-q " + std::to_string(seqlen_q) + " --seqlen-k " + keys + " --head-dim-v " + keys + " " +
              options);
  for (int64_t n = 0; n < seqlen_k * seqlen_k; ++n) known.instance.v.set(n, n % (seqlen_k + 1) == 0);
  known.forward();
  std::string text;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    if (i) text += ' ';
    for (int64_t j = 0; j < seqlen_k; ++j) text += known.results.out.get(i * seqlen_k + j) != 0 ? '1' : '0';
  }
  return text;
}

TEST(Reference, WhoSeesWhom) {
  EXPECT_EQ(visible("", 2, 3), "111 111");
  EXPECT_EQ(visible("--causal 1", 2, 5), "11110 11111");
  EXPECT_EQ(visible("--causal 1", 5, 2), "00 00 00 10 11");
  EXPECT_EQ(visible("--causal 1 --top-left 1", 2, 5), "10000 11000");
  EXPECT_EQ(visible("--causal 1 --top-left 1", 5, 2), "10 11 11 11 11");
  EXPECT_EQ(visible("--left 1 --right 1", 4, 4), "1100 1110 0111 0011");
  EXPECT_EQ(visible("--left 0 --right 0", 2, 4), "0010 0001");
  EXPECT_EQ(visible("--left 2", 4, 4), "1111 1111 1111 0111");
  EXPECT_EQ(visible("--right 1", 3, 3), "110 111 111");
  EXPECT_EQ(visible("--left -1 --right 2", 4, 4), "0110 0011 0001 0000");
  EXPECT_EQ(visible("--left 3 --right -2", 4, 4), "0000 0000 1000 1100");
  EXPECT_EQ(visible("--left 1 --causal 1 --used-q 2 --used-k 3", 3, 4), "1100 0110 0000");
  EXPECT_EQ(visible("--causal 1 --top-left 1 --used-k 2", 3, 4), "1000 1100 1100");
}

TEST(Reference, EqualScoresAverageTheValues) {
  Known known("--seqlen-q 2 --seqlen-k 5 --head-dim-v 1 --values integer");
  double sum = 0;
  for (int64_t j = 0; j < 5; ++j) sum += known.instance.v.get(j);
  known.forward();
  for (int64_t i = 0; i < 2; ++i) {
    EXPECT_DOUBLE_EQ(known.results.out.get(i), sum / 5);
    EXPECT_DOUBLE_EQ(known.results.lse.get(i), std::log(5));
  }
}

TEST(Reference, DistantScoresPickOneValue) {
  Known known("--seqlen-q 4 --seqlen-k 4 --head-dim 4 --head-dim-v 2 --scale 2000");
  for (int64_t n = 0; n < 16; ++n) {
    known.instance.q.set(n, n % 5 == 0);
    known.instance.k.set(n, n % 5 == 0);
  }
  known.forward();
  for (int64_t n = 0; n < 8; ++n) EXPECT_EQ(known.results.out.get(n), known.instance.v.get(n));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(known.results.lse.get(i), 2000);
}

// One query, two keys, head_dim 1, computed by hand.
TEST(Reference, OrderOfScaleSoftcapBiasAlibi) {
  Known known(
      "--seqlen-q 1 --seqlen-k 2 --head-dim 1 --head-dim-v 1 --scale 0.5 --softcap 3 --bias same --alibi head --sink "
      "same");
  Instance& in = known.instance;
  in.q.set(0, 2);
  in.k.set(0, 3);
  in.k.set(1, -1);
  in.v.set(0, 10);
  in.v.set(1, 20);
  in.bias.set(0, 0.25);
  in.bias.set(1, 0.75);
  in.alibi_slopes.set(0, 0.5);
  in.sink.set(0, 0.125);
  known.forward();
  const double s0 = 3 * std::tanh(0.5 * 6 / 3) + 0.25 - 0.5 * 1;  // the last query matches the last key
  const double s1 = 3 * std::tanh(0.5 * -2 / 3) + 0.75;
  const double sum = std::exp(s0) + std::exp(s1) + std::exp(0.125);
  EXPECT_NEAR(known.results.lse.get(0), std::log(sum), 1e-15);
  EXPECT_NEAR(known.results.out.get(0), (10 * std::exp(s0) + 20 * std::exp(s1)) / sum, 1e-14);
}

TEST(Reference, RowsThatSeeNothing) {
  for (const char* options : {"--seqlen-q 3 --seqlen-k 0", "--seqlen-q 2 --seqlen-k 4 --right -9", "--used-k 0"}) {
    SCOPED_TRACE(options);
    Known known(std::string(options) + " --dlse 1");
    known.backward();
    for (double x : known.results.out.values()) EXPECT_EQ(x, 0);
    for (double x : known.results.lse.values()) EXPECT_EQ(x, -kInfinity);
    for (const Tensor* t : {&known.gradients.dq, &known.gradients.dk, &known.gradients.dv}) {
      for (double x : t->values()) EXPECT_EQ(x, 0);
    }
  }
}

TEST(Reference, SinkAlone) {
  Known known("--seqlen-q 3 --seqlen-k 0 --dlse 1 --sink same");
  known.backward();
  double dlse = 0;
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(known.results.lse.get(i), known.instance.sink.get(0));
    dlse += known.instance.dlse.get(i);
  }
  EXPECT_DOUBLE_EQ(known.gradients.dsink.get(0), dlse);
}

// The case has two rows. The second key is hidden from the first row, so that a NaN there may reach only the second
// row.
TEST(Reference, HiddenNanReachesNothing) {
  Known known("--seqlen-q 2 --seqlen-k 2 --head-dim 1 --head-dim-v 1 --causal 1");
  known.instance.k.set(1, NAN);
  known.instance.v.set(1, NAN);
  known.backward();
  EXPECT_EQ(known.results.out.get(0), known.instance.v.get(0));
  EXPECT_TRUE(std::isnan(known.results.out.get(1)));
  EXPECT_TRUE(std::isfinite(known.gradients.dq.get(0)));
}

TEST(Reference, DropoutFollowsPhilox) {
  Known known("--seqlen-q 3 --seqlen-k 9 --head-dim-v 9 --heads-q 2 --heads-k 1 --dropout 0.5 --values integer");
  Instance& in = known.instance;
  for (int64_t n = 0; n < 81; ++n) in.v.set(n, n % 10 == 0);
  known.forward();
  Outputs unused = in.outputs(TANDEM_FORWARD);
  const DropoutOptions d = in.problem(TANDEM_FORWARD, &unused).dropout;
  for (uint64_t i = 0; i < 3; ++i) {
    for (uint64_t h = 0; h < 2; ++h) {
      for (uint64_t j = 0; j < 9; ++j) {
        const bool dropped = is_dropped(dropout_words(d.seed, d.offset, h, i, j / 16), static_cast<int64_t>(j), 128);
        EXPECT_DOUBLE_EQ(known.results.out.get(static_cast<int64_t>((i * 2 + h) * 9 + j)), dropped ? 0 : 2.0 / 9);
      }
    }
  }
}

// Tasks run in reverse order and on separate threads; the bits must be equal.
TEST(Reference, DoesNotDependOnParallelFor) {
  const reference::ParallelFor reverse = [](int64_t tasks, const std::function<void(int64_t)>& body) {
    while (tasks > 0) body(--tasks);
  };
  const reference::ParallelFor threads = [](int64_t tasks, const std::function<void(int64_t)>& body) {
    std::vector<std::thread> all;
    for (int64_t task = 0; task < tasks; ++task) all.emplace_back(body, task);
    for (std::thread& one : all) one.join();
  };
  Instance in(from_flags(
      "--dtype bf16 --batch 3 --heads-q 4 --heads-k 2 --seqlen-q 9 --seqlen-k 9 --bias f32 --bias-shape 1hij "
      "--sink f32 --dlse 1 --dropout 0.2"));
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    Outputs a = in.exact_outputs(pass);
    const Problem p = in.exact_problem(pass, &a);
    (pass == TANDEM_FORWARD ? reference::forward : reference::backward)(p, reference::serial);
    for (const auto& order : {reverse, threads}) {
      Outputs b = in.exact_outputs(pass);
      (pass == TANDEM_FORWARD ? reference::forward : reference::backward)(with_outputs(p, &b), order);
      const Tensor Outputs::*all[] = {&Outputs::out, &Outputs::lse,   &Outputs::dq,   &Outputs::dk,
                                      &Outputs::dv,  &Outputs::dbias, &Outputs::dsink};
      for (const auto member : all) EXPECT_EQ((a.*member).fingerprint(), (b.*member).fingerprint());
    }
    if (pass == TANDEM_FORWARD) in.give_results(&a);
  }
}

}  // namespace
}  // namespace tandem::test
