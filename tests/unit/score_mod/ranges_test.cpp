// Compares interval arithmetic with all elements of boxes. An expression's values must be in its range, and ranges must
// decide block masks.
#include "score_mod/ranges.h"

#include <cmath>

#include "unit/score_mod/random_texts.h"
#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

IntRange box(std::mt19937_64& random, int most) {
  const int low = static_cast<int>(random() % static_cast<unsigned>(most));
  return {low, low + static_cast<int>(random() % 4)};
}

// Compares every node's value at every element, in float32.
void expect_within(const Mod& mod, uint64_t seed, const std::string& text) {
  const Bound bound(seed);
  std::vector<NodeId> all;
  for (NodeId id = 0; id < mod.graph.size(); ++id) all.push_back(id);
  std::mt19937_64 random(seed);
  const PositionRange at{box(random, 3), box(random, 4), box(random, 9), box(random, 9), {9, 9}, {11, 11}};
  RangeEvaluator ranges(mod.graph, all, bound.values);
  ranges.run(at);
  Evaluator<float> evaluator(mod.graph, all);
  const float scores[] = {0, -1.25f, 3, INFINITY, NAN};
  for (int batch = at.batch.low; batch <= at.batch.high; ++batch) {
    for (int head = at.head.low; head <= at.head.high; ++head) {
      for (int q = at.q.low; q <= at.q.high; ++q) {
        for (int k = at.k.low; k <= at.k.high; ++k) {
          evaluator.run(scores[random() % 5], {batch, head, q, k, 9, 11}, bound.values);
          for (const NodeId id : all) {
            const auto& value = evaluator[id];
            const IntRange i = ranges.integers(id);
            const FloatRange f = ranges.reals(id);
            const bool within = mod.graph[id].type == Type::real
                                    ? (std::isnan(value.real) ? f.nan : f.low <= value.real && value.real <= f.high)
                                    : i.low <= value.integer && value.integer <= i.high;
            ASSERT_TRUE(within) << text << "\n"
                                << name_of(mod.graph[id].op) << ": " << value.real << " or " << value.integer
                                << " is not within " << f.low << " to " << f.high << " or " << i.low << " to "
                                << i.high;
          }
        }
      }
    }
  }
}

TEST(Ranges, hold_what_random_texts_give) {
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    Writer writer(seed);
    const std::string text = "1.5 if " + writer.boolean(1 + static_cast<int>(seed % 5)) + " else -0.5";
    expect_within(parsed(text), seed, text);
  }
}

// The result's range for queries [q, q + 128) and keys [k, k + 128).
IntRange of_block(const std::string& text, int q, int k) {
  const Mod mod = parsed(text, Signature::Result::mask);
  const Bound bound;
  RangeEvaluator ranges(mod.graph, {&mod.result, 1}, bound.values);
  ranges.run({{0, 0}, {0, 0}, {q, q + 127}, {k, k + 127}, {1024, 1024}, {1024, 1024}});
  return ranges.integers(mod.result);
}

TEST(Ranges, decide_blocks) {
  const struct {
    const char* text;
    int q, k;
    IntRange seen;
  } cases[] = {
      {"k <= q", 256, 128, {1, 1}},
      {"k <= q", 128, 128, {0, 1}},
      {"k <= q", 128, 256, {0, 0}},
      {"0 <= q - k < 300", 512, 256, {0, 1}},
      {"0 <= q - k < 500", 512, 256, {1, 1}},
      {"0 <= q - k < 100", 512, 256, {0, 0}},
      {"float(q - k) < 128.5 * 4", 512, 256, {1, 1}},
      {"k <= q or k < 256", 0, 128, {1, 1}},
      {"abs(q // 32 - k // 32) <= 3", 0, 256, {0, 0}},
      {"q // 128 == k // 128", 256, 256, {1, 1}},
      {"q // 128 == k // 128 and (q & 127) >= 0", 256, 256, {1, 1}},
      {"(q >> 7) == (k >> 7)", 256, 384, {0, 0}},
      {"q % 128 >= 128", 256, 384, {0, 0}},
      {"doc[0, q] == doc[0, k]", 512, 768, {1, 1}},  // beyond the tensor, both read its last element
      {"not (k <= q)", 256, 128, {0, 0}},
      {"select(k <= q, 3, 5) > 4", 0, 128, {1, 1}},
      {"min(q, 100) < max(k, 200)", 0, 0, {1, 1}},
  };
  for (const auto& c : cases) {
    const IntRange seen = of_block(c.text, c.q, c.k);
    EXPECT_TRUE(seen.low == c.seen.low && seen.high == c.seen.high)
        << c.text << " of " << c.q << ", " << c.k << ": " << seen.low << " to " << seen.high;
  }
}

}  // namespace
}  // namespace tandem::score_mod::test
