#include "cli/check_accuracy.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "cli/terminal.h"
#include "problem/convert.h"

namespace tandem::tool {
namespace {

double rounded(DType type, double x) {
  std::byte bytes[8];
  store(type, bytes, x);
  return load(type, bytes);
}

class Sum {
 public:
  void add(double got, double exact) {
    const double error = std::fabs(got - exact);
    errors_.largest = std::max(errors_.largest, error);
    errors_.mean += error;
    ++count_;
  }
  Errors errors() const { return {errors_.largest, count_ > 0 ? errors_.mean / count_ : 0}; }

 private:
  Errors errors_;
  double count_ = 0;
};

// Returns the rounding error of the type around a value.
double lost(DType type, double exact) {
  const double x = rounded(type, exact);
  return std::fabs(rounded(type, rounded(type, x + 0.3) - 0.3) - x);
}

// Maps an element of a tensor to its head.
struct Heads {
  int64_t count, inner;

  explicit Heads(const Results::Named& named) : count(named.buffer->shape()[named.head_axis]), inner(1) {
    const auto& shape = named.buffer->shape();
    for (size_t axis = named.head_axis + 1; axis < shape.size(); ++axis) inner *= shape[axis];
  }
  size_t of(int64_t n) const { return static_cast<size_t>(n / inner % count); }
};

// Returns the errors of a tensor, then of each head, over the finite numbers.
std::vector<Errors> errors_of(const Heads& heads, const Buffer& got, const Buffer& exact) {
  std::vector<Sum> sums(static_cast<size_t>(heads.count) + 1);
  for (int64_t n = 0; n < got.count(); ++n) {
    const double value = got.get(n), truth = exact.get(n);
    if (!std::isfinite(value) || !std::isfinite(truth)) continue;
    sums[0].add(value, truth);
    sums[heads.of(n) + 1].add(value, truth);
  }
  std::vector<Errors> errors;
  for (const Sum& sum : sums) errors.push_back(sum.errors());
  return errors;
}

// Returns the largest and the mean rounding error of any head.
Errors slack_of(const Heads& heads, DType type, const Buffer& exact) {
  std::vector<Sum> sums(static_cast<size_t>(heads.count));
  for (int64_t n = 0; n < exact.count(); ++n) {
    if (std::isfinite(rounded(type, exact.get(n)))) sums[heads.of(n)].add(lost(type, exact.get(n)), 0);
  }
  Errors slack;
  for (const Sum& sum : sums) {
    slack.largest = std::max(slack.largest, 2 * sum.errors().largest);
    slack.mean = std::max(slack.mean, sum.errors().mean);
  }
  return slack;
}

// Returns the allowed error of a log-sum-exp because of its exponentials.
double lse_slack(DType input) { return input == DType::bf16 || input == DType::f16 ? 0x1p-13 : 0; }

// Returns the first number that is an infinity or NaN where it must not be, or is finite where it must not be.
std::string misplaced_infinity(const Buffer& got, const Buffer& exact) {
  for (int64_t n = 0; n < got.count(); ++n) {
    const double value = got.get(n), expected = rounded(got.dtype(), exact.get(n));
    if (std::isfinite(value) && std::isfinite(expected)) continue;
    if (value == expected || (std::isnan(value) && std::isnan(expected))) continue;
    return "element " + std::to_string(n) + " is " + number(value) + " and must be " + number(expected);
  }
  return "";
}

}  // namespace

AccuracyCheck check_accuracy(DType input, const Results::Named& named, const std::vector<const Buffer*>& plain,
                             const Buffer& exact) {
  const Buffer& engine = *named.buffer;
  const Heads heads(named);
  AccuracyCheck result;
  result.name = named.name;
  result.why = misplaced_infinity(engine, exact);
  if (!result.why.empty()) result.worst = INFINITY;
  if (!result.why.empty() || engine.count() == 0) return result;

  const std::vector<Errors> own = errors_of(heads, engine, exact);
  result.engine = own[0];
  Errors allowed;
  for (const Buffer* run : plain) {
    const std::vector<Errors> errors = errors_of(heads, *run, exact);
    if (run == plain.front()) result.plain = errors[0];
    for (size_t h = 1; h < errors.size(); ++h) {
      allowed.largest = std::max(allowed.largest, 2 * errors[h].largest);
      allowed.mean = std::max(allowed.mean, 1.5 * errors[h].mean);
    }
  }
  const Errors slack = slack_of(heads, engine.dtype(), exact);
  const double of_lse = named.name == std::string_view("lse") ? lse_slack(input) : 0;
  allowed.largest += slack.largest + of_lse;
  allowed.mean += slack.mean + of_lse;
  for (size_t h = 1; h < own.size(); ++h) {
    const double used = std::max(own[h].largest > 0 ? own[h].largest / allowed.largest : 0,
                                 own[h].mean > 0 ? own[h].mean / allowed.mean : 0);
    result.worst = std::max(result.worst, used);
    if (used <= 1 || !result.why.empty()) continue;
    result.why = "head " + std::to_string(h - 1) + ": largest error " + number(own[h].largest) + " of " +
                 number(allowed.largest) + " allowed, mean " + number(own[h].mean) + " of " + number(allowed.mean);
  }
  return result;
}

std::vector<AccuracyCheck> check_accuracy(DType input, tandem_pass pass, const Results& engine,
                                          const std::vector<Results>& plain, const Results& exact) {
  std::vector<AccuracyCheck> results;
  const auto own = engine.all(pass), truth = exact.all(pass);
  for (size_t n = 0; n < own.size(); ++n) {
    std::vector<const Buffer*> runs;
    for (const Results& run : plain) runs.push_back(run.all(pass)[n].buffer);
    results.push_back(check_accuracy(input, own[n], runs, *truth[n].buffer));
  }
  return results;
}

}  // namespace tandem::tool
