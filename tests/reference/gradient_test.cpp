// The reference's gradients against differences of its forward, in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "support/instance.h"

namespace tandem::test {
namespace {

class Differences {
 public:
  explicit Differences(const Case& c) : instance_(c), outputs_(instance_.exact_outputs(TANDEM_FORWARD)) {
    forward_ = instance_.exact_problem(TANDEM_FORWARD, &outputs_);
    dout_ = instance_.dout.values();
    if (instance_.dlse) dlse_ = instance_.dlse.values();
  }

  void check() {
    loss();
    instance_.give_results(&outputs_);
    Outputs gradients = instance_.exact_outputs(TANDEM_BACKWARD);
    reference::backward(instance_.exact_problem(TANDEM_BACKWARD, &gradients));
    compare("dq", instance_.q, gradients.dq);
    compare("dk", instance_.k, gradients.dk);
    compare("dv", instance_.v, gradients.dv);
    compare("dbias", instance_.bias, gradients.dbias);
    compare("dsink", instance_.sink, gradients.dsink);
  }

 private:
  // The function whose gradients backward gives: sum(dout * out) + sum(dlse * lse).
  double loss() {
    reference::forward(forward_);
    double sum = 0;
    for (size_t n = 0; n < dout_.size(); ++n) {
      const double out = outputs_.out.get(static_cast<int64_t>(n));
      if (!std::isnan(dout_[n])) sum += dout_[n] * out;  // NaN: an unused row
    }
    for (size_t n = 0; n < dlse_.size(); ++n) {
      const double lse = outputs_.lse.get(static_cast<int64_t>(n));
      if (!std::isnan(dlse_[n]) && std::isfinite(lse)) sum += dlse_[n] * lse;
    }
    return sum;
  }

  double difference(Tensor& input, int64_t n, double step) {
    const double x = input.get(n);
    input.set(n, x + step);
    const double up = loss();
    input.set(n, x - step);
    const double down = loss();
    input.set(n, x);
    size_ = std::max(std::fabs(up), std::fabs(down));
    return (up - down) / (2 * step);
  }

  // Returns the error of a derivative relative to the allowed error.
  double off(Tensor& input, int64_t n, double derivative, double step) {
    const double coarse = difference(input, n, 2 * step), fine = difference(input, n, step);
    // Central differences have an error c step^2, and two of them determine c. The extrapolation has a much smaller
    // error. Each loss has an error of a few units in the last place.
    const double best = (4 * fine - coarse) / 3;
    const double allowed = 0.1 * std::fabs(fine - coarse) + 100 * 0x1p-52 * (1 + size_) / step;
    const double by = std::fabs(derivative - best) - allowed;
    return by <= 0 ? 0 : std::isnan(by) ? INFINITY : by;
  }

  void compare(const char* name, Tensor& input, const Tensor& gradient) {
    if (!gradient) return;
    for (int64_t n = 0; n < input.size(); ++n) {
      if (std::isnan(input.get(n))) {  // poison: in an unused row or page
        ASSERT_EQ(gradient.get(n), 0) << name << " element " << n;
        continue;
      }
      // A modification's text may have a kink. If a step crosses the kink, the shorter step decides.
      const double by = gradient.get(n), long_step = off(input, n, by, 1e-4);
      if (long_step <= 0) continue;
      ASSERT_LE(off(input, n, by, 1e-6), 0)
          << name << " element " << n << ": " << by << ", by differences of 1e-4 off by " << long_step << " too much";
    }
  }

  Instance instance_;
  Outputs outputs_;
  Problem forward_;
  std::vector<double> dout_, dlse_;
  double size_ = 0;
};

const char* const kCases[] = {
    "--batch 2 --seqlen-q 3 --seqlen-k 4 --heads-q 2 --heads-k 2 --head-dim 3 --head-dim-v 2",
    "--batch 2 --seqlen-q 3 --seqlen-k 5 --heads-q 6 --heads-k 2 --head-dim 2 --head-dim-v 3 --dlse 1",
    "--seqlen-q 5 --seqlen-k 2 --head-dim 2 --causal 1 --dlse 1",
    "--seqlen-q 5 --seqlen-k 2 --head-dim 2 --causal 1 --dlse 1 --sink same",
    "--seqlen-q 2 --seqlen-k 5 --head-dim 2 --causal 1 --top-left 1",
    "--seqlen-q 6 --seqlen-k 6 --head-dim 2 --left 2 --right 1 --dlse 1",
    "--seqlen-q 6 --seqlen-k 6 --head-dim 2 --left -1 --right 3 --softcap 2",
    "--seqlen-q 4 --seqlen-k 4 --head-dim 3 --softcap 1 --scale 0.7 --dlse 1",
    "--batch 2 --heads-q 2 --heads-k 1 --seqlen-q 4 --seqlen-k 4 --head-dim 3 --alibi batch --causal 1",
    "--batch 2 --heads-q 2 --heads-k 2 --seqlen-q 3 --seqlen-k 4 --head-dim 2 --bias same --dlse 1",
    "--batch 2 --heads-q 2 --heads-k 2 --seqlen-q 3 --seqlen-k 4 --head-dim 2 --bias same --bias-shape 1h1j",
    "--batch 2 --heads-q 2 --heads-k 2 --seqlen-q 3 --seqlen-k 4 --head-dim 2 --bias same --bias-shape b1i1 --softcap "
    "3",
    "--batch 2 --heads-q 2 --heads-k 2 --seqlen-q 3 --seqlen-k 4 --head-dim 2 --bias same --bias-shape 1111 --bias-inf "
    "1",
    "--batch 2 --heads-q 2 --heads-k 2 --seqlen-q 4 --seqlen-k 4 --head-dim 2 --bias bool --sink same --dlse 1",
    "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 3 --seqlen-k 4 --head-dim 2 --sink same --dlse 1 --dropout 0.25",
    "--batch 2 --heads-q 2 --heads-k 2 --seqlen-q 4 --seqlen-k 9 --head-dim 2 --dropout 0.5 --dlse 1",
    "--batch 3 --seqlen-q 4 --seqlen-k 5 --head-dim 2 --used-q 4,0,2 --used-k 0,3,5 --causal 1 --dlse 1 --sink same",
    "--packed 1 --lengths-q 3,0,2,4 --lengths-k 2,3,0,4 --heads-q 2 --heads-k 1 --head-dim 3 --causal 1 --dlse 1",
    "--packed 1 --lengths-q 3,4 --lengths-k 4,4 --used-q 2,4 --used-k 3,1 --head-dim 2 --left 1 --softcap 2",
    "--batch 2 --seqlen-q 3 --seqlen-k 6 --page-size 2 --used-k 5,3 --heads-q 2 --heads-k 1 --head-dim 2 --dlse 1",
};

TEST(ReferenceGradients, EveryOption) {
  for (const char* flags : kCases) {
    SCOPED_TRACE(flags);
    Differences(from_flags(std::string(flags) + " --dtype f64")).check();
    if (HasFatalFailure()) return;
  }
}

// Random combinations of the options, at small sizes.
// Sanitizers make float64 slow, so they get few problems.
#ifdef TANDEM_SANITIZED
constexpr uint64_t kProblems = 50;
#else
constexpr uint64_t kProblems = 150;
#endif

TEST(ReferenceGradients, RandomProblems) {
  const auto shrink = [](std::vector<int64_t>& list, int64_t limit) {
    for (int64_t& x : list) x = std::min(x, limit);
  };
  for (uint64_t seed = 1; seed <= kProblems; ++seed) {
    Case c = random_case(seed);
    c.dtype = "f64";
    c.gradients = "qkvbs";
    c.head_dim = 1 + c.head_dim % 3;
    c.head_dim_v = 1 + c.head_dim_v % 3;
    if (c.bias == "f32") c.bias = "same";  // differences need more digits
    if (c.sink == "f32") c.sink = "same";
    c.accumulate = false;  // results would depend on the earlier values
    c.seqlen_q = std::min<int64_t>(c.seqlen_q, 5);
    c.page_size = std::min<int64_t>(c.page_size, 3);
    c.seqlen_k = std::min<int64_t>(c.seqlen_k, 6);
    for (auto* lengths : {&c.lengths_q, &c.lengths_k}) shrink(*lengths, 5);
    for (size_t b = 0; b < c.used_q.size(); ++b)
      c.used_q[b] = std::min(c.used_q[b], c.length_q(static_cast<int64_t>(b)));
    if (c.page_size) c.seqlen_k = 2 * c.page_size;
    for (size_t b = 0; b < c.used_k.size(); ++b)
      c.used_k[b] = std::min(c.used_k[b], c.length_k(static_cast<int64_t>(b)));
    SCOPED_TRACE(to_flags(c));
    Differences(c).check();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tandem::test
