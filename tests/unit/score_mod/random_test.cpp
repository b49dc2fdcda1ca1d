// Random expressions and their derivatives: compares a tile at a time with one element at a time.
#include <bit>
#include <cmath>

#include "score_mod/tile.h"
#include "unit/score_mod/random_texts.h"
#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

// The loops round differently from the C library. Each node of the graph is therefore compared alone, from the
// tile's values of its operands.
void compare(const Mod& mod, uint64_t seed, const std::string& text) {
  const Bound bound(seed);
  std::vector<NodeId> all;
  for (NodeId id = 0; id < mod.graph.size(); ++id) all.push_back(id);
  constexpr int n = 37;
  float score[n];
  int32_t head[n], q[n], k[n];
  std::mt19937_64 random(seed);
  for (int i = 0; i < n; ++i) {
    const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 1e38f};
    score[i] =
        random() % 3 == 0 ? special[random() % 6] : static_cast<float>(static_cast<double>(random() % 4000) / 1000 - 2);
    head[i] = static_cast<int32_t>(random() % 4), q[i] = static_cast<int32_t>(random() % 9),
    k[i] = static_cast<int32_t>(random() % 11);
  }
  Position position = kSomewhere;
  const TileProgram all_nodes(mod.graph, all), result(mod.graph, {mod.result});
  std::vector<float> memory(all_nodes.floats()), memory_of_one(result.floats());
  TileRun every(all_nodes, bound.values, memory.data()), only(result, bound.values, memory_of_one.data());
  every.begin(position);
  every.run({n, score, head, q, k});
  only.begin(position);
  only.run({n, score, head, q, k});
  // Values of queries are kept from one tile to the next, for any tile between them.
  const int32_t elsewhere[n] = {};
  only.run({n, score, head, q, elsewhere, true});
  only.run({n, score, head, q, k, true});
  for (int i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(i);
    const auto value = [&](NodeId id) -> Value<float> {
      const auto out = static_cast<size_t>(id);
      if (mod.graph[id].type == Type::real) return {every.reals(out)[at], 0};
      return {0, every.integers(out)[at]};
    };
    for (const NodeId id : all) {
      const Node& node = mod.graph[id];
      const int count = operands_of(node.op);
      if (count == 0) continue;
      Value<float> operands[3];
      for (int o = 0; o < count; ++o) operands[o] = value(node.operands[static_cast<size_t>(o)]);
      const Value<float> wanted =
          apply(node.op, mod.graph[node.operands[static_cast<size_t>(count - 1)]].type, operands);
      const float a = value(id).real, b = wanted.real;
      const bool near =
          (std::isnan(a) && std::isnan(b)) || a == b ||
          (node.op >= Op::exp && node.op <= Op::sigmoid && std::fabs(a - b) <= 1e-6f * std::fabs(b) + 1e-44f);
      ASSERT_TRUE(near && value(id).integer == wanted.integer) << text << "\n"
                                                               << name_of(node.op) << ": " << a << ", not " << b;
    }
    const float both[] = {every.reals(static_cast<size_t>(mod.result))[at], only.reals(0)[at]};
    ASSERT_TRUE(both[0] == both[1] || (std::isnan(both[0]) && std::isnan(both[1]))) << text;
  }
}

TEST(Random, tiles_are_elements) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    Writer writer(seed);
    const std::string text = writer.real(1 + static_cast<int>(seed % 5));
    Mod mod = parsed(text);
    compare(mod, seed, text);
    const Gradient gradient = differentiate(mod.graph, mod.result);
    mod.result = gradient.score;
    compare(mod, seed, text + ", its derivative");
    for (const Derivative& derivative : gradient.captured) {
      mod.result = derivative.value;
      compare(mod, seed, text + ", a captured derivative");
    }
  }
}

// If an expression is smooth around a score, its derivative is the difference quotient.
TEST(Random, derivatives_are_difference_quotients) {
  int compared = 0;
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    Writer writer(seed);
    const std::string text = writer.real(1 + static_cast<int>(seed % 4));
    const Mod mod = parsed(text);
    Mod derivative = mod;
    derivative.result = differentiate(derivative.graph, mod.result).score;
    const Bound bound(seed);
    for (const double score : {-1.37, -0.41, 0.29, 1.83}) {
      const auto at = [&](const Mod& of, double x) { return evaluate(of, x, kSomewhere, bound.values); };
      const double step = 1e-5, left = at(derivative, score - step), here = at(derivative, score),
                   right = at(derivative, score + step);
      const double above = at(mod, score + step), below = at(mod, score - step), middle = at(mod, score);
      if (!std::isfinite(here) || !std::isfinite(above) || !std::isfinite(below)) continue;
      // The expression is not smooth: it has a kink or a jump within the step, or is so large that the quotient has no
      // digits.
      if (std::fabs(left - here) + std::fabs(right - here) > 1e-2 * (1e-6 + std::fabs(here))) continue;
      if (std::fabs(above - middle) + std::fabs(middle - below) > 1e3 * step * (1 + std::fabs(here))) continue;
      if (std::fabs(middle) > 1e4 * (1e-2 + std::fabs(here))) continue;
      const double quotient = (above - below) / (2 * step);
      // A saw with teeth narrower than the step has a different quotient for each step.
      const double narrower = (at(mod, score + step / 3) - at(mod, score - step / 3)) / (2 * step / 3);
      if (std::fabs(narrower - quotient) > 1e-3 * (1e-2 + std::fabs(quotient))) continue;
      EXPECT_LE(std::fabs(quotient - here), 1e-3 * (1e-2 + std::fabs(here))) << text << " at " << score;
      ++compared;
    }
  }
  EXPECT_GT(compared, 1500);
}

}  // namespace
}  // namespace tandem::score_mod::test
