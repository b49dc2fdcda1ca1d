// Compares derivatives with finite differences, and checks their values where no derivative exists.
#include <cmath>

#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

// Returns d expression / d score.
double slope_of(const std::string& text, double score) {
  Mod mod = parsed(text);
  const Bound bound;
  mod.result = differentiate(mod.graph, mod.result).score;
  return evaluate(mod, score, kSomewhere, bound.values);
}

void expect_difference_quotient(double derivative, double above, double below, double step, const std::string& what) {
  const double quotient = (above - below) / (2 * step);
  const double size = std::fabs(derivative) + std::fabs(quotient) + 1e-3;
  EXPECT_LE(std::fabs(derivative - quotient), 1e-5 * size) << what << ": " << derivative << ", not " << quotient;
}

TEST(Differentiate, every_operation_by_the_score) {
  const char* texts[] = {"-score",
                         "abs(score)",
                         "exp(score)",
                         "exp2(score)",
                         "log(abs(score) + 1)",
                         "log2(score * score + 1)",
                         "tanh(score)",
                         "sin(score) * cos(2 * score)",
                         "erf(score)",
                         "expm1(score)",
                         "log1p(score * score)",
                         "sigmoid(score)",
                         "sqrt(score * score + 1)",
                         "score + c",
                         "c - score",
                         "score * c",
                         "score * score",
                         "score / c",
                         "c / (score + 5)",
                         "score % 0.7",
                         "4.0 % (abs(score) + 0.3)",
                         "score // 0.7",
                         "min(score, c)",
                         "max(c, score)",
                         "clamp(score, -1, 1)",
                         "clamp(0.1, score, 1)",
                         "clamp(0.3, -1, score)",
                         "select(score > 0.2, score * 3, exp(score))",
                         "floor(score)",
                         "round(score) * score",
                         "sign(score) * score",
                         "table[1, int(score)] * score",
                         "c if score < 0 else score * score * temperature"};
  for (const std::string text : texts) {
    for (const double score : {-2.13, -0.77, 0.11, 0.93, 2.47}) {
      const double step = 1e-6;
      expect_difference_quotient(slope_of(text, score), value_of(text, score + step), value_of(text, score - step),
                                 step, text + " at " + std::to_string(score));
    }
  }
}

TEST(Differentiate, captured_scalars_and_tensors) {
  const char* texts[] = {"score - slope[head] * abs(q - k)",
                         "c * tanh(score / c)",
                         "score * temperature + table[head, k] * table[2, 4]",
                         "exp(slope[q % 4] * c) + slope[q % 4] * slope[0]",
                         "select(k < q, slope[1] * c, slope[2] / c)",
                         "max(slope[head], min(c, score)) + clamp(c, slope[0], temperature)"};
  for (const std::string text : texts) {
    Mod mod = parsed(text);
    const NodeId result = mod.result;
    const Gradient gradient = differentiate(mod.graph, result);
    ASSERT_FALSE(gradient.captured.empty()) << text;
    for (const Derivative& derivative : gradient.captured) {
      const Node leaf = mod.graph[derivative.with_respect_to];
      Bound bound;
      // The values are float64, because float32 would lose the step.
      std::vector<double> wide[5];
      const std::vector<float>* narrow[5] = {&bound.slope, &bound.table, nullptr, nullptr, &bound.temperature};
      for (size_t i : {0, 1, 4}) {
        wide[i].assign(narrow[i]->begin(), narrow[i]->end());
        bound.values.tensors[i].data = reinterpret_cast<const std::byte*>(wide[i].data());
        bound.values.tensors[i].element = Element::f64;
      }
      mod.result = derivative.value;
      const double value = evaluate(mod, 0.3, kSomewhere, bound.values);
      // A single gather reads its element, at indices that are evaluated in the same way.
      double* at = nullptr;
      double others = 0;
      if (leaf.op == Op::scalar) {
        at = &bound.values.scalars[static_cast<size_t>(leaf.index)];
      } else {
        const auto offset = [&](const Node& gather) {
          int32_t indices[kMaxRank];
          const int rank = gather.operand_count();
          for (int i = 0; i < rank; ++i) {
            mod.result = gather.operands[static_cast<size_t>(i)];
            indices[i] = static_cast<int32_t>(evaluate(mod, 0.3, kSomewhere, bound.values));
          }
          return offset_of(bound.values.tensors[static_cast<size_t>(gather.index)],
                           {indices, static_cast<size_t>(rank)});
        };
        at = &wide[leaf.index][static_cast<size_t>(offset(leaf))];
        for (const Derivative& other : gradient.captured) {  // other gathers of the same element
          const Node node = mod.graph[other.with_respect_to];
          if (other.with_respect_to == derivative.with_respect_to || node.op != Op::gather || node.index != leaf.index)
            continue;
          if (offset(node) != offset(leaf)) continue;
          mod.result = other.value;
          others += evaluate(mod, 0.3, kSomewhere, bound.values);
        }
      }
      mod.result = result;
      const double step = 1e-6, before = *at;
      *at = before + step;
      const double above = evaluate(mod, 0.3, kSomewhere, bound.values);
      *at = before - step;
      const double below = evaluate(mod, 0.3, kSomewhere, bound.values);
      expect_difference_quotient(value + others, above, below, step,
                                 text + " by node " + std::to_string(derivative.with_respect_to));
    }
  }
}

TEST(Differentiate, kinks_and_ties_are_torchs) {
  EXPECT_EQ(slope_of("abs(score)", 0), 0);
  EXPECT_EQ(slope_of("abs(score)", NAN), 0);
  EXPECT_EQ(slope_of("max(score, 1)", 1), 0.5);
  EXPECT_EQ(slope_of("min(1, score)", 1), 0.5);
  EXPECT_EQ(slope_of("max(score, 0)", 0), 0.5);
  EXPECT_EQ(slope_of("clamp(score, 0, 1)", 0), 1);
  EXPECT_EQ(slope_of("clamp(score, 0, 1)", 1), 1);
  EXPECT_EQ(slope_of("clamp(score, 0, 1)", 1.5), 0);
  EXPECT_EQ(slope_of("clamp(2, 0, score)", 1.5), 1);
  EXPECT_EQ(slope_of("clamp(2, 3, score)", 1.5), 1);  // bounds in the wrong order: the upper bound wins
  EXPECT_EQ(slope_of("clamp(2, score, 1)", 1.5), 0);
  EXPECT_EQ(slope_of("clamp(score, 1, 1)", 1), 1);
  EXPECT_EQ(slope_of("clamp(0, score, 1)", 1), 0);  // equal bounds: the lower one receives no gradient
  EXPECT_EQ(slope_of("clamp(2, 1, score)", 1), 1);
  EXPECT_EQ(slope_of("score % 2", 2), 1);
  EXPECT_EQ(slope_of("score // 2", 1), 0);
  EXPECT_EQ(slope_of("floor(score) + round(score) + sign(score)", 1), 0);
  EXPECT_EQ(slope_of("sqrt(score)", 0), INFINITY);
  EXPECT_EQ(slope_of("k - q", 0), 0);
}

TEST(Differentiate, branches_not_taken_leave_no_nan) {
  EXPECT_EQ(slope_of("select(score > 0, sqrt(score), 0)", 0), 0);
  EXPECT_EQ(slope_of("select(score > 0, log(score), score)", -1), 1);
  EXPECT_EQ(slope_of("select(score > 0, sqrt(score), sqrt(-score))", 4), 0.25);
  EXPECT_EQ(slope_of("x = sqrt(score); select(score > 0, x, 0) + select(score > 1, x * x, score)", 0), 1);
  EXPECT_EQ(slope_of("select(k > q, score / 0, score)", 1), 1);
  EXPECT_EQ(slope_of("max(score, log(score - 3))", 5), 1);
  EXPECT_EQ(slope_of("clamp(sqrt(score), -1, 0) if score > 1 else 2 * score", 0), 2);
  EXPECT_EQ(slope_of("select(k <= q, score, -inf)", 1), 1);
  EXPECT_EQ(slope_of("select(k > q, score, -inf)", 1), 0);
}

}  // namespace
}  // namespace tandem::score_mod::test
