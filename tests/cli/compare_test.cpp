#include "cli/compare.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tandem::tool {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

Inputs inputs_of(DType dtype, const std::vector<int64_t>& q, const std::vector<int64_t>& k) {
  Random random(3);
  Inputs in;
  in.q = random_buffer(random, dtype, q);
  in.k = random_buffer(random, dtype, k);
  in.v = random_buffer(random, dtype, k);
  in.dout = random_buffer(random, dtype, q);
  return in;
}

Buffer filled(DType dtype, const std::vector<double>& values) {
  Buffer buffer(dtype, {1, static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) buffer.set(static_cast<int64_t>(i), values[i]);
  return buffer;
}

bool accepted(const std::vector<double>& engine, const std::vector<double>& plain, const std::vector<double>& exact) {
  const Buffer own = filled(DType::f32, engine), formula = filled(DType::f32, plain), truth = filled(DType::f64, exact);
  return check_accuracy(DType::f32, {"x", &own, 0}, {&formula}, truth).good();
}

TEST(JudgeTest, AllowsTwiceTheErrorOfThePlainFormula) {
  const std::vector<double> exact = {1, 2, 3, 4}, plain = {1.01, 2, 3, 4.01};
  EXPECT_TRUE(accepted(exact, plain, exact));
  EXPECT_TRUE(accepted({1.019, 2, 3, 4}, plain, exact));
  EXPECT_FALSE(accepted({1.021, 2, 3, 4}, plain, exact)) << "more than twice at one place";
  EXPECT_FALSE(accepted({1.01, 2.01, 3.01, 4.01}, plain, exact)) << "twice in the mean";
}

TEST(JudgeTest, InfinitiesMustMatch) {
  EXPECT_TRUE(accepted({-infinity, 1}, {-infinity, 1}, {-infinity, 1}));
  EXPECT_FALSE(accepted({infinity, 1}, {-infinity, 1}, {-infinity, 1}));
  EXPECT_FALSE(accepted({0, 1}, {-infinity, 1}, {-infinity, 1}));
  EXPECT_FALSE(accepted({NAN, 1}, {0, 1}, {0, 1}));
}

TEST(JudgeTest, OneBadHeadIsSeen) {
  Machine machine("cpu", 1);
  const Given given(inputs_of(DType::f32, {1, 33, 4, 16}, {1, 33, 4, 16}), false);
  const Inputs& in = given.original;
  Results results(in, true, false);
  Progress progress("test", 1);
  EXPECT_TRUE(all_good(check_exactness(machine, given, {}, true, results, progress)));

  const Results exact(in, true, true);
  const Attention call = with_results(in.attention({}), results);
  truth(call, exact, true, machine.threads, nullptr);
  std::vector<Results> formula;
  formula.emplace_back(in, true, false);
  plain::Plain plain(machine.threads, plain::Blas::best(), plain::Rounding::intermediates);
  plain.forward(problem_of(call, formula[0], TANDEM_FORWARD));
  plain.backward(problem_of(call, formula[0], TANDEM_BACKWARD));
  for (int64_t i = 0; i < 33 * 16; ++i) {  // head 2 of dk, wrong in the fifth digit
    const int64_t at = (i / 16 * 4 + 2) * 16 + i % 16;
    results.dk.set(at, results.dk.get(at) * 1.00001);
  }
  for (const AccuracyCheck& one : check_accuracy(DType::f32, TANDEM_BACKWARD, results, formula, exact)) {
    EXPECT_EQ(one.good(), one.name != "dk") << one.why;
    EXPECT_EQ(one.why.starts_with("head 2: "), one.name == "dk") << one.why;
  }
}

// Standard attention must be right for every option of verify and both ways of rounding, because its error is the
// bound.
class PlainTest : public testing::TestWithParam<plain::Rounding> {
 protected:
  void expect_close(const Inputs& in, const Attention& options) {
    Machine machine("cpu", 2);
    const Results formula(in, true, false), exact(in, true, true), shapes(in, true, false);
    const Attention call = with_results(in.attention(options), shapes);
    truth(call, exact, true, machine.threads, nullptr);
    plain::Plain plain(machine.threads, plain::Blas::best(), GetParam());
    plain.forward(problem_of(call, formula, TANDEM_FORWARD));
    plain.backward(problem_of(call, formula, TANDEM_BACKWARD));
    for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
      const auto own = formula.all(pass), truths = exact.all(pass);
      for (size_t n = 0; n < own.size(); ++n) {
        for (int64_t i = 0; i < own[n].buffer->count(); ++i) {
          const double got = own[n].buffer->get(i), expected = truths[n].buffer->get(i);
          if (got == expected) continue;
          // This bound checks the formula, not its precision: a missing option exceeds it by far.
          ASSERT_LT(std::fabs(got - expected), 1e-4 * (1 + std::fabs(expected))) << own[n].name << " at " << i;
        }
      }
    }
  }
};

TEST_P(PlainTest, MasksAndScores) {
  Inputs in = inputs_of(DType::f32, {2, 9, 4, 8}, {2, 13, 2, 8});
  Random random(5);
  expect_close(in, {.causal = true});
  expect_close(
      in, {.softmax_scale = 0.3, .softcap = 2, .alignment = Alignment::top_left, .window_left = 3, .window_right = -1});
  in.bias = random_buffer(random, DType::f32, {1, 4, 1, 13});
  in.sink = random_buffer(random, DType::f32, {4});
  in.dlse = random_buffer(random, DType::f32, {2, 4, 9});
  in.alibi_slopes = random_buffer(random, DType::f32, {4});
  expect_close(in, {.softcap = 3, .dropout_p = 0.25, .dropout_seed = 7});
}

TEST_P(PlainTest, PaddingAndPackedSequences) {
  Inputs in = inputs_of(DType::f32, {2, 9, 2, 8}, {2, 13, 2, 8});
  in.seqused_q = Buffer(DType::i32, {2});
  in.seqused_k = Buffer(DType::i32, {2});
  for (int64_t b = 0; b < 2; ++b) in.seqused_q.set(b, 9 * b), in.seqused_k.set(b, 13 - 4 * b);
  expect_close(in, {});

  Inputs packed = inputs_of(DType::f32, {11, 2, 8}, {12, 2, 8});
  packed.cu_seqlens_q = Buffer(DType::i32, {4});
  packed.cu_seqlens_k = Buffer(DType::i32, {4});
  for (const auto& [at, q, k] : {std::tuple{0, 0, 0}, {1, 4, 7}, {2, 4, 9}, {3, 11, 12}})
    packed.cu_seqlens_q.set(at, q), packed.cu_seqlens_k.set(at, k);
  expect_close(packed, {.causal = true});
}

INSTANTIATE_TEST_SUITE_P(Rounding, PlainTest, testing::Values(plain::Rounding::none, plain::Rounding::intermediates));

TEST(BlasTest, AgreesWithTheSimpleLoop) {
  // op(a) is 2 x 3, op(b) is 3 x 2; every way of transposing gives the same product.
  const float a[] = {1, 2, 3, 4, 5, 6}, a_turned[] = {1, 4, 2, 5, 3, 6};
  const float b[] = {7, 8, 9, 10, 11, 12}, b_turned[] = {7, 9, 11, 8, 10, 12};
  const plain::Blas none;
  for (const plain::Blas* blas : {&none, &plain::Blas::best()}) {
    for (const bool turn_a : {false, true}) {
      for (const bool turn_b : {false, true}) {
        float c[] = {1, 1, 1, 1};
        blas->sgemm(turn_a, turn_b, 2, 2, 3, 2, turn_a ? a_turned : a, turn_a ? 2 : 3, turn_b ? b_turned : b,
                    turn_b ? 3 : 2, 1, c, 2);
        EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{117, 129, 279, 309})) << blas->name();
      }
    }
  }
}

}  // namespace
}  // namespace tandem::tool
