// Expressions, the names that they may use, and values for those names.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "score_mod/differentiate.h"
#include "score_mod/evaluate.h"
#include "score_mod/parser.h"

namespace tandem::score_mod::test {

inline Signature signature(Signature::Result result = Signature::Result::score) {
  return {.result = result,
          .scalars = {{"c", Type::real}, {"n", Type::integer}, {"on", Type::boolean}},
          .tensors = {{"slope", Type::real, 1},
                      {"table", Type::real, 2},
                      {"doc", Type::integer, 2},
                      {"seen", Type::boolean, 1},
                      {"temperature", Type::real, 0}}};
}

// Values for those names, with their memory. Tensors are dense, with elements of float32, int32 and bytes.
struct Bound {
  Values values;
  std::vector<float> slope, table, temperature;
  std::vector<int32_t> doc;
  std::vector<uint8_t> seen;

  explicit Bound(uint64_t seed = 1) : slope(4), table(15), temperature(1), doc(12), seen(8) {
    std::mt19937_64 random(seed);
    const auto uniform = [&] { return static_cast<float>(std::uniform_real_distribution<double>(-2, 2)(random)); };
    for (auto* list : {&slope, &table, &temperature}) {
      for (float& x : *list) x = uniform();
    }
    for (int32_t& x : doc) x = static_cast<int32_t>(random() % 7) - 3;
    for (uint8_t& x : seen) x = random() % 2;
    values.scalars = {uniform(), static_cast<double>(random() % 9) - 4, static_cast<double>(random() % 2)};
    values.tensors = {view(slope.data(), Element::f32, {4}), view(table.data(), Element::f32, {3, 5}),
                      view(doc.data(), Element::i32, {2, 6}), view(seen.data(), Element::boolean, {8}),
                      view(temperature.data(), Element::f32, {})};
  }
  Bound(const Bound&) = delete;

  static TensorView view(const void* data, Element element, std::initializer_list<int32_t> sizes) {
    TensorView tensor{.data = static_cast<const std::byte*>(data), .element = element};
    tensor.rank = static_cast<int32_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), tensor.size);
    int64_t stride = 1;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      tensor.stride[i] = stride;
      stride *= tensor.size[i];
    }
    return tensor;
  }
};

inline Mod parsed(const std::string& text, Signature::Result result = Signature::Result::score) {
  Mod mod;
  const Status status = parse(text, signature(result), &mod);
  EXPECT_TRUE(status.ok()) << text << "\n" << status.message;
  if (!status.ok()) mod.result = mod.graph.real(0);
  return mod;
}

inline double evaluate(const Mod& mod, double score, const Position& position, const Values& values) {
  Evaluator<double> evaluator(mod.graph, {&mod.result, 1});
  evaluator.run(score, position, values);
  const auto& value = evaluator[mod.result];
  return mod.graph[mod.result].type == Type::real ? value.real : value.integer;
}

inline constexpr Position kSomewhere{.batch = 1, .head = 2, .q = 7, .k = 5, .seqlen_q = 9, .seqlen_k = 11};

// Returns the value of a complete expression.
inline double value_of(const std::string& text, double score = 0.5) {
  static const Bound bound;
  return evaluate(parsed(text), score, kSomewhere, bound.values);
}

}  // namespace tandem::score_mod::test
