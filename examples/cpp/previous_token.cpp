// Trains attention to attend to the previous token, by gradient descent through Tandem's backward pass, in C++.
//
// Four query heads share two key heads. The loss is the squared distance between row i of the output and value i - 1;
// queries and keys are trained. At the end every row should put nearly all its weight on its predecessor.
//
// Build it from any folder:
//   cmake -S examples/cpp -B /tmp/example && cmake --build /tmp/example     (CMAKE_PREFIX_PATH: Tandem's prefix)
//   c++ -std=c++20 examples/cpp/previous_token.cpp $(pkg-config --cflags --libs tandem)    (PKG_CONFIG_PATH: see C)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "tandem/tandem.hpp"

namespace {

constexpr int rows = 48, heads_q = 4, heads_k = 2, dim = 32;

// A trained tensor, its gradient, and Adam's two moments.
struct Parameter {
  explicit Parameter(size_t n) : value(n), gradient(n), mean(n), square(n) {}

  void step(int t) {
    const float rate = 0.1f, b1 = 0.9f, b2 = 0.99f;
    const float c1 = 1 - std::pow(b1, static_cast<float>(t)), c2 = 1 - std::pow(b2, static_cast<float>(t));
    for (size_t i = 0; i < value.size(); ++i) {
      mean[i] += (1 - b1) * (gradient[i] - mean[i]);
      square[i] += (1 - b2) * (gradient[i] * gradient[i] - square[i]);
      value[i] -= rate * (mean[i] / c1) / (std::sqrt(square[i] / c2) + 1e-8f);
    }
  }

  std::vector<float> value, gradient, mean, square;
};

std::vector<float> normal(size_t n, float deviation, std::mt19937& random) {
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<float> x(n);
  for (float& e : x) e = distribution(random);
  return x;
}

// Half the mean squared distance from out[i] to v[i - 1] over rows and heads; writes its gradient to dout.
float loss_of(const std::vector<float>& out, const std::vector<float>& v, std::vector<float>& dout) {
  const float count = (rows - 1) * heads_q * dim;
  float loss = 0;
  for (int i = 1; i < rows; ++i) {
    for (int h = 0; h < heads_q; ++h) {
      for (int d = 0; d < dim; ++d) {
        const int at = (i * heads_q + h) * dim + d;
        const int wanted = ((i - 1) * heads_k + h / (heads_q / heads_k)) * dim + d;
        const float difference = out[at] - v[wanted];
        dout[at] = difference / count;
        loss += 0.5f * difference * difference / count;
      }
    }
  }
  return loss;
}

int train() {
  std::mt19937 random(1);
  Parameter q(rows * heads_q * dim), k(rows * heads_k * dim);
  q.value = normal(q.value.size(), 0.1f, random);
  k.value = normal(k.value.size(), 0.1f, random);
  const std::vector<float> v = normal(k.value.size(), 1, random);
  std::vector<float> out(q.value.size()), lse(heads_q * rows), dout(q.value.size());

  tandem::Attention attention{
      .q = tandem::Tensor(q.value, {1, rows, heads_q, dim}),
      .k = tandem::Tensor(k.value, {1, rows, heads_k, dim}),
      .v = tandem::Tensor(v, {1, rows, heads_k, dim}),
      .out = tandem::Tensor(out, {1, rows, heads_q, dim}),
      .lse = tandem::Tensor(lse, {1, heads_q, rows}),
      .dout = tandem::Tensor(dout, {1, rows, heads_q, dim}),
      .dq = tandem::Tensor(q.gradient, {1, rows, heads_q, dim}),
      .dk = tandem::Tensor(k.gradient, {1, rows, heads_k, dim}),
      .causal = true,
  };

  const tandem::Context context;
  std::printf("Tandem %s on: %s\n\nstep      loss\n", tandem_version(), context.description().c_str());
  float loss = 0;
  for (int t = 1; t <= 40; ++t) {
    tandem::forward(attention, context);
    loss = loss_of(out, v, dout);
    if (t == 1 || t % 10 == 0) std::printf("%4d  %.6f\n", t, loss);
    tandem::backward(attention, context);
    q.step(t);
    k.step(t);
  }
  tandem::forward(attention, context);

  // exp(score - lse) is an attention weight.
  float least = 1;
  for (int i = 1; i < rows; ++i) {
    for (int h = 0; h < heads_q; ++h) {
      float score = 0;
      for (int d = 0; d < dim; ++d) {
        score += q.value[(i * heads_q + h) * dim + d] * k.value[((i - 1) * heads_k + h / 2) * dim + d];
      }
      least = std::min(least, std::exp(score / std::sqrt(static_cast<float>(dim)) - lse[h * rows + i]));
    }
  }
  std::printf("\nEvery row now gives its predecessor at least %.1f %% of its attention.\n", 100 * least);

  // An unsupported call returns an error message and writes nothing.
  attention.k = tandem::Tensor(k.value, {1, rows, 1, heads_k * dim});
  if (const auto refusal = tandem::check(attention)) std::printf("A wrong shape is refused:\n  %s\n", refusal->what());
  return loss < 1e-3f && least > 0.9f ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return train();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
