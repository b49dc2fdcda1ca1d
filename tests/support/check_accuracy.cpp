#include "support/check_accuracy.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <span>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "problem/bound_expression.h"
#include "problem/convert.h"
#include "reference/reference.h"
#include "support/plain.h"
#include "support/rounded.h"

namespace tandem::test {
namespace {

double half_unit_of_float32(double x) {
  const float magnitude = std::fabs(static_cast<float>(x));
  return (static_cast<double>(std::nextafter(magnitude, INFINITY)) - magnitude) / 2;
}

// The allowed error of a log-sum-exp because of its exponentials, or of a float32 result in units of itself.
double exponential_slack(DType input) { return input == DType::bf16 || input == DType::f16 ? 0x1p-13 : 0; }

// The place of one head of one result, in any of the compared problems.
struct Part {
  std::string name;
  std::function<void(const Problem&, const std::function<void(DType, const std::byte*)>&)> each;

  std::vector<double> values(const Problem& p) const {
    std::vector<double> all;
    each(p, [&](DType t, const std::byte* at) { all.push_back(load(t, at)); });
    return all;
  }
  // Returns true if the result has the unit of scores.
  bool is_lse() const { return name.starts_with("lse") || name.starts_with("max_scores"); }
};

std::string head_name(const char* tensor, int64_t b, int64_t h) {
  return std::string(tensor) + " of sequence " + std::to_string(b) + ", head " + std::to_string(h);
}

void add_view(std::vector<Part>& parts, const char* tensor, const Problem& p, View Problem::*view, int64_t heads,
              bool keys, int64_t dim) {
  if (!(p.*view)) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    const int64_t begin = keys ? s.k_begin : s.q_begin, rows = keys ? s.k_rows : s.q_rows;
    for (int64_t h = 0; h < heads; ++h) {
      parts.push_back({head_name(tensor, b, h), [=](const Problem& any, const auto& f) {
                         const View& at = any.*view;
                         for (int64_t i = begin; i < begin + rows; ++i) {
                           for (int64_t c = 0; c < dim; ++c) f(at.dtype, at.at(b, i, h) + c * size_of(at.dtype));
                         }
                       }});
    }
  }
}

void add_pages(std::vector<Part>& parts, const char* tensor, const Problem& p, View Problem::*view, int64_t dim) {
  if (!(p.*view)) return;
  for (int64_t h = 0; h < p.heads_k; ++h) {
    parts.push_back({std::string(tensor) + " of head " + std::to_string(h), [=](const Problem& any, const auto& f) {
                       const View& at = any.*view;
                       for (int64_t page = 0; page < any.page_table.pages; ++page) {
                         for (int64_t j = 0; j < any.page_table.page_size; ++j) {
                           for (int64_t c = 0; c < dim; ++c) f(at.dtype, at.at(page, j, h) + c * size_of(at.dtype));
                         }
                       }
                     }});
  }
}

// The gradients of the tensors that a score_mod reads.
void add_captured(std::vector<Part>& parts, const Problem& p) {
  for (size_t n = 0; p.score_mod && n < p.score_mod->gradients.size(); ++n) {
    if (!p.score_mod->gradients[n].to) continue;
    parts.push_back(
        {"gradient of " + p.score_mod->program->mod.signature.tensors[n].name, [n](const Problem& any, const auto& f) {
           const BiasView& at = any.score_mod->gradients[n].to;
           for (int64_t i = 0; i < at.shape[0]; ++i) {
             for (int64_t j = 0; j < at.shape[1]; ++j) f(at.dtype, at.at(i, j, 0, 0));
           }
         }});
  }
}

std::vector<Part> parts_of(const Problem& p) {
  std::vector<Part> parts;
  if (p.pass == TANDEM_FORWARD) {
    add_view(parts, "out", p, &Problem::out, p.heads_q, false, p.head_dim_v);
    add_view(parts, "lse", p, &Problem::lse, p.heads_q, false, 1);
    add_view(parts, "max_scores", p, &Problem::max_scores, p.heads_q, false, 1);
    return parts;
  }
  add_view(parts, "dq", p, &Problem::dq, p.heads_q, false, p.head_dim);
  if (p.page_table) {
    add_pages(parts, "dk", p, &Problem::dk, p.head_dim);
    add_pages(parts, "dv", p, &Problem::dv, p.head_dim_v);
  } else {
    add_view(parts, "dk", p, &Problem::dk, p.heads_k, true, p.head_dim);
    add_view(parts, "dv", p, &Problem::dv, p.heads_k, true, p.head_dim_v);
  }
  for (int64_t h = 0; p.dsink && h < p.heads_q; ++h) {
    parts.push_back({"dsink of head " + std::to_string(h),
                     [=](const Problem& any, const auto& f) { f(any.dsink.dtype, any.dsink.at(0, h)); }});
  }
  for (int64_t b = 0; p.dbias && b < p.dbias.shape[0]; ++b) {
    for (int64_t h = 0; h < p.dbias.shape[1]; ++h) {
      parts.push_back({head_name("dbias", b, h), [=](const Problem& any, const auto& f) {
                         for (int64_t i = 0; i < any.dbias.shape[2]; ++i) {
                           for (int64_t j = 0; j < any.dbias.shape[3]; ++j)
                             f(any.dbias.dtype, any.dbias.at(b, h, i, j));
                         }
                       }});
    }
  }
  add_captured(parts, p);
  return parts;
}

DType dtype_of(const Part& part, const Problem& p) {
  DType type = DType::f32;
  part.each(p, [&](DType t, const std::byte*) { type = t; });
  return type;
}

struct Errors {
  double largest = 0, mean = 0, finite = 0;
  size_t where = 0;
};

Errors errors(const std::vector<double>& got, const std::vector<double>& reference) {
  Errors e;
  for (size_t n = 0; n < got.size(); ++n) {
    if (!std::isfinite(reference[n])) continue;
    ++e.finite;
    const double error = std::fabs(got[n] - reference[n]);
    e.mean += error;
    if (error > e.largest) {
      e.largest = error;
      e.where = n;
    }
  }
  e.mean /= std::max(e.finite, 1.0);
  return e;
}

// The first runs give a bound that no further run lowers. The largest error only grows with runs. Let r of at most 10 r
// runs have means of at least m. Then m exceeds the mean of all runs by at most 3 of their standard deviations.
enum class Runs { first, all };
constexpr int kRunsForOne = 10;

// The errors of standard attention, estimated from its runs.
struct PlainErrors {
  double largest = 0, mean = 0;

  PlainErrors(const std::vector<std::vector<double>>& runs, const std::vector<double>& reference, Runs which) {
    const auto count = static_cast<double>(runs.size());
    double square_of_means = 0, least_mean = std::numeric_limits<double>::infinity();
    for (const std::vector<double>& run : runs) {
      const Errors one = errors(run, reference);
      largest = std::max(largest, one.largest);
      least_mean = std::min(least_mean, one.mean);
      mean += one.mean / count;
      square_of_means += one.mean * one.mean / count;
    }
    if (which == Runs::first) {
      mean = least_mean;
      return;
    }
    // Few numbers, or few with large errors, may all be accurate by chance: the bound is 3 deviations of the hardest
    // number.
    for (size_t n = 0; n < reference.size(); ++n) {
      double square = 0;
      for (const std::vector<double>& run : runs) square += (run[n] - reference[n]) * (run[n] - reference[n]) / count;
      if (std::isfinite(reference[n])) largest = std::max(largest, 3 * std::sqrt(square));
    }
    mean += 3 * std::sqrt(std::max(square_of_means - mean * mean, 0.0));
  }
};

std::string describe(const std::string& what, size_t n, double got, double reference) {
  std::ostringstream text;
  text.precision(9);
  text << what << " at element " << n << ": " << got << ", expected " << reference;
  return text.str();
}

// Compares infinities, NaN and structural zeros. A number that overflows the result's type counts as an infinity.
std::string compare_special(const std::vector<double>& got, const std::vector<double>& reference,
                            const std::vector<std::vector<double>>& plain, DType type) {
  for (size_t n = 0; n < got.size(); ++n) {
    const double expected = rounded(type, reference[n]);
    if (std::isnan(expected) != std::isnan(got[n])) return describe("NaN", n, got[n], expected);
    if ((std::isinf(expected) || std::isinf(got[n])) && expected != got[n]) {
      return describe("infinity", n, got[n], expected);
    }
    const bool zero =
        reference[n] == 0 && std::all_of(plain.begin(), plain.end(), [n](const auto& run) { return run[n] == 0; });
    if (zero && got[n] != 0) return describe("not exactly zero", n, got[n], 0);
  }
  return "";
}

// Returns true if the errors are too large, according to these runs of standard attention.
bool compare(const Part& part, const Problem& got_problem, const Problem& reference_problem,
             std::span<const Problem> plain_problems, Runs which, Verdict& verdict) {
  const std::vector<double> got = part.values(got_problem);
  std::vector<double> reference = part.values(reference_problem);
  if (got.empty()) return false;
  const DType type = dtype_of(part, got_problem);
  std::vector<std::vector<double>> plain_runs;
  for (const Problem& p : plain_problems) plain_runs.push_back(part.values(p));
  if (std::string special = compare_special(got, reference, plain_runs, type); !special.empty()) {
    verdict.failure = part.name + ": " + special;
    return false;
  }
  for (double& x : reference) {
    if (std::isinf(rounded(type, x))) x = rounded(type, x);  // no error is measured
  }
  const PlainErrors plain(plain_runs, reference, which);
  // The rounding of the result's type around the values, and half a unit of float32, in which every sum is computed.
  // Subnormal numbers may be flushed to zero.
  double slack = 0, mean_slack = std::numeric_limits<float>::min();
  for (const double exact : reference) {
    const double x = rounded(type, exact);
    if (!std::isfinite(x)) continue;
    const double lost = std::fabs(rounded(type, rounded(type, rounded(type, x + 0.3) - 0.3) - x));
    slack = std::max(slack, 2 * lost);
    const double half_unit = type == DType::f64 ? std::fabs(x) * 0x1p-53 : half_unit_of_float32(x);
    mean_slack += half_unit / static_cast<double>(reference.size());
  }
  const bool lse = part.is_lse(), out = part.name.starts_with("out");
  if (lse || (out && type == DType::f32)) {
    double largest = 1;
    for (const double x : reference) largest = lse || !std::isfinite(x) ? largest : std::max(largest, std::fabs(x));
    slack += exponential_slack(got_problem.dtype) * largest;
    mean_slack += exponential_slack(got_problem.dtype) * largest;
  }
  const Errors own = errors(got, reference);
  const double allowed = 2 * plain.largest + slack, allowed_mean = 1.5 * plain.mean + mean_slack;
  const bool mean_counts = own.finite >= 16;
  if (own.largest > 0) verdict.worst = std::max(verdict.worst, own.largest / allowed);
  if (own.mean > 0 && mean_counts) verdict.worst = std::max(verdict.worst, own.mean / allowed_mean);
  if (own.largest <= allowed && (own.mean <= allowed_mean || !mean_counts)) return false;
  std::ostringstream text;
  text << part.name << ": max error " << own.largest << " (allowed " << allowed << "; standard attention "
       << plain.largest << "), mean error " << own.mean << " (allowed " << allowed_mean << "; standard attention "
       << plain.mean << "); " << describe("worst", own.where, got[own.where], reference[own.where]);
  verdict.failure = text.str();
  return true;
}

// Runs of standard attention on one problem.
class PlainRuns {
 public:
  PlainRuns(Instance& instance, const Problem& problem) : instance_(instance), p_(problem) {
    const int64_t work = p_.total_q * p_.seqlen_k * p_.heads_q * (p_.head_dim + p_.head_dim_v) + 1;
    full_ = static_cast<size_t>(std::clamp<int64_t>(8'000'000 / work, 6, kMaxRuns));
    run((full_ + kRunsForOne - 1) / kRunsForOne);
  }

  static constexpr size_t kMaxRuns = 32;
  // Small problems are repeated more often, because with few numbers chance decides the largest error of a single run.
  size_t full() const { return full_; }
  std::span<const Problem> done() const { return problems_; }
  void run(size_t runs) {
    while (problems_.size() < runs) {
      outputs_.push_back(instance_.exact_outputs(p_.pass));
      problems_.push_back(with_outputs(p_, &outputs_.back()));
      plain(problems_.back(), p_, problems_.size() - 1);
    }
  }

 private:
  Instance& instance_;
  const Problem& p_;
  size_t full_;
  std::deque<Outputs> outputs_;
  std::vector<Problem> problems_;
};

// Runs standard attention until the runs decide as all runs would.
Verdict check_part(const Part& part, const Problem& p, const Problem& reference, bool first_alone, PlainRuns& runs) {
  const auto check = [&](Runs which, bool* too_large) {
    Verdict one;
    *too_large = compare(part, p, reference, first_alone ? runs.done().first(1) : runs.done(), which, one);
    return one;
  };
  bool too_large = false;
  for (; !first_alone && runs.done().size() < runs.full(); runs.run(std::min(2 * runs.done().size(), runs.full()))) {
    const Verdict one = check(Runs::first, &too_large);
    if (one.failure.empty()) return one;
  }
  Verdict one = check(Runs::all, &too_large);
  if (too_large && runs.done().size() < PlainRuns::kMaxRuns) {
    runs.run(PlainRuns::kMaxRuns);
    one = check(Runs::all, &too_large);
  }
  return one;
}

std::string check_memory(Instance& instance, uint64_t before, Outputs& outputs) {
  if (instance.fingerprint() != before) return "an input was written to";
  static constexpr const char* kNames[] = {"out",   "lse",    "dq",     "dk",           "dv",        "dbias",
                                           "dsink", "dslope", "dtable", "dtemperature", "max_scores"};
  const std::vector<Tensor*> all = outputs.all();
  for (size_t n = 0; n < all.size(); ++n) {
    if (*all[n] && !all[n]->guards_intact()) return std::string(kNames[n]) + " was written to outside its elements";
  }
  return "";
}

void run_engine(const EngineCall& call, const Engine& engine, Verdict& verdict) {
  const auto fingerprint = [&] {
    uint64_t sum = 0;
    for (const Tensor* t : call.outputs->all()) sum = sum * 31 + t->fingerprint();
    return sum;
  };
  const uint64_t before = call.instance->fingerprint(), outputs_before = fingerprint();
  try {
    engine(call);
  } catch (const Refused& refused) {
    verdict.refusal = refused.what();
    if (fingerprint() != outputs_before) verdict.failure = "written to before it was refused: " + verdict.refusal;
  } catch (const std::exception& error) {
    verdict.failure = error.what();
  }
  if (verdict.failure.empty()) verdict.failure = check_memory(*call.instance, before, *call.outputs);
}

// Runs one pass of the engine into *own. Leaves the reference's results in *exact.
void run_pass(Instance& instance, tandem_pass pass, const Engine& engine, const Supports& supports, Outputs* own,
              Outputs* exact, Verdict& verdict) {
  *own = instance.outputs(pass);
  Outputs& outputs = *own;
  Problem p;
  try {
    p = instance.problem(pass, &outputs);
  } catch (const std::runtime_error& error) {
    verdict.refusal = error.what();
    return;
  }
  const EngineCall call(p, &instance, &outputs);
  if (supports) verdict.refusal = supports(call);
  if (verdict.refusal.empty()) run_engine(call, engine, verdict);
  if (!verdict.refusal.empty() || !verdict.failure.empty()) return;

  *exact = instance.exact_outputs(pass);
  const Problem reference = with_outputs(p, exact);
  if (pass == TANDEM_FORWARD) {
    reference::forward(reference);
  } else {
    reference::backward(reference);
  }
  PlainRuns plain_runs(instance, p);
  // A weight of one has no error, but noise would add one. The score that equals its row's log-sum-exp has an error.
  const bool first_alone = instance.c.sharp() && pass == TANDEM_FORWARD;
  for (const Part& part : parts_of(p)) {
    const Verdict one = check_part(part, p, reference, first_alone && !part.is_lse(), plain_runs);
    verdict.worst = std::max(verdict.worst, one.worst);
    verdict.failure = one.failure;
    if (!verdict.failure.empty()) return;
  }
}

// Computes only the reference's forward.
void make_forward(Instance& instance, Outputs* exact, Verdict& verdict) {
  Outputs outputs = instance.outputs(TANDEM_FORWARD);
  try {
    const Problem p = instance.problem(TANDEM_FORWARD, &outputs);
    *exact = instance.exact_outputs(TANDEM_FORWARD);
    reference::forward(with_outputs(p, exact));
  } catch (const std::runtime_error& error) {
    verdict.refusal = error.what();
  }
}

}  // namespace

Verdict run_case(const Case& c, const Engine& engine, const Supports& supports,
                 const std::function<void(Instance&)>& adjust, const std::string& flags, Passes passes) {
  Verdict verdict;
  Instance instance(c);
  if (adjust) adjust(instance);
  Outputs own, exact;
  if (passes == Passes::backward && !c.gradients.empty()) {
    make_forward(instance, &exact, verdict);
  } else {
    run_pass(instance, TANDEM_FORWARD, engine, supports, &own, &exact, verdict);
  }
  if (verdict.failure.empty() && verdict.refusal.empty() && !c.gradients.empty()) {
    const DType type = c.type();
    const bool gives_own = own.out && own.lse && (type == DType::f32 || type == DType::f64);
    instance.give_results(gives_own ? &own : &exact);
    Outputs own_gradients, gradients;
    run_pass(instance, TANDEM_BACKWARD, engine, supports, &own_gradients, &gradients, verdict);
  }
  if (!verdict.failure.empty()) verdict.failure += "\n  repeat: tandem_fuzz " + flags + "--case '" + to_flags(c) + "'";
  return verdict;
}

}  // namespace tandem::test
