// Repeated subexpressions are computed once, and known subexpressions are folded. No result changes.
#include <cmath>

#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

// Returns true if both expressions give one node, so that `select` has nothing to select.
bool are_same(const std::string& a, const std::string& b) {
  const Mod mod = parsed("select(on, " + a + ", " + b + ")");
  Node node = mod.graph[mod.result];
  if (node.op == Op::to_real) node = mod.graph[node.operands[0]];  // conversion of an int
  return node.op != Op::select || mod.graph[node.operands[0]].op != Op::scalar;
}
void expect_same(const std::string& a, const std::string& b) { EXPECT_TRUE(are_same(a, b)) << a << " is not " << b; }
void expect_different(const std::string& a, const std::string& b) { EXPECT_FALSE(are_same(a, b)) << a << " is " << b; }

TEST(Simplify, equal_expressions_are_one) {
  expect_same("abs(q - k) * slope[head]", "slope[head] * abs(q - k)");
  expect_same("score + 0.5", "0.5 + score");
  expect_different("min(score, c)", "min(c, score)");  // zeroes of either sign
}

TEST(Simplify, what_is_exact) {
  expect_same("2 + 3 * 4", "14");
  expect_same("0.5 * 4", "2.0");
  expect_same("score * 1", "score");
  expect_same("score / 1", "score");
  expect_same("score / 4", "score * 0.25");
  expect_same("score - 0.0", "score");
  expect_same("--score", "score");
  expect_same("q * 0 + k", "k");
  expect_same("q // 8", "q >> 3");
  expect_same("q % 8", "q & 7");
  expect_same("q - q", "0");
  expect_same("1 if not k < q else 0", "1 if q <= k else 0");
  expect_same("1 if not (not seen[k]) else 0", "1 if seen[k] else 0");
  expect_same("1 if seen[k] and true else 0", "1 if seen[k] or false else 0");
  expect_same("min(score, score)", "score");
  expect_same("1 if k <= q and (seen[k] and k <= q) else 0", "1 if seen[k] and k <= q else 0");
  expect_same("(q | k) | q", "q | k");
}

TEST(Simplify, leaves_what_is_not) {
  expect_different("score + 0", "score");  // differs for -0
  expect_different("score * 0", "0.0");    // differs for NaN and infinity
  expect_different("score - score", "0.0");
  expect_different("score / 3", "score * (1.0 / 3)");
  expect_different("1 if not score < c else 0", "1 if c <= score else 0");
  expect_different("score / c * c", "score");
  expect_different("q & (q | k)", "q | k");
  expect_different("q ^ (q ^ k)", "q ^ k");
  // 2^24 + 1 is no float32, so float64 and float32 give different results.
  const Mod mod = parsed("16777216.0 + 1 - 16777216");
  EXPECT_NE(mod.graph[mod.result].op, Op::constant);
}

}  // namespace
}  // namespace tandem::score_mod::test
