#include "support/merge_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "problem/convert.h"
#include "reference/reference.h"
#include "support/random.h"
#include "support/rounded.h"

namespace tandem::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The reference of errors: the same formula in float32, each step rounded, for one row of elements.
struct PlainRow {
  std::vector<double> out;
  double lse = -kInfinity;

  PlainRow(const MergeProblem& m, int64_t b, int64_t i, int64_t h) : out(static_cast<size_t>(m.head_dim), 0.0) {
    float largest = -std::numeric_limits<float>::infinity(), sum = 0;
    const auto lse_of = [&](const MergeProblem::Part& p) {
      return static_cast<float>(load(p.lse.dtype, p.lse.at(b, i, h)));
    };
    for (int64_t n = 0; n < m.parts; ++n) largest = std::max(largest, lse_of(m.part(n)));
    for (int64_t n = 0; n < m.parts; ++n) {
      const MergeProblem::Part part = m.part(n);
      if (std::isinf(lse_of(part))) continue;
      const float weight = std::exp(lse_of(part) - largest);
      sum += weight;
      for (size_t c = 0; c < out.size(); ++c) {
        const double x = load(part.out.dtype, part.out.at(b, i, h) + static_cast<int64_t>(c) * size_of(part.out.dtype));
        out[c] = static_cast<float>(out[c] + static_cast<float>(weight * x));
      }
    }
    for (double& x : out) x = sum > 0 ? rounded(m.out.dtype, static_cast<float>(x / sum)) : 0;
    if (sum > 0) lse = static_cast<float>(largest + std::log(sum));
  }
};

// Errors of all elements of a result: the engine's, standard attention's, and the allowed one.
struct Errors {
  double own = 0, plain = 0, slack = 0;
  std::string wrong;

  void add(DType type, double got, double exact, double by_plain, const std::string& where) {
    const double expected = rounded(type, exact);
    if (!std::isfinite(expected)) {
      const bool same = std::isnan(expected) ? std::isnan(got) : got == expected;
      if (!same) wrong = where + ": " + std::to_string(got) + ", expected " + std::to_string(expected);
      return;
    }
    if (std::isnan(got)) wrong = where + " is NaN";
    own = std::max(own, std::fabs(got - exact));
    plain = std::max(plain, std::fabs(by_plain - exact));
    slack = std::max(slack, 2 * std::fabs(rounded(type, rounded(type, expected + 0.3) - 0.3) - expected));
  }
  std::string verdict(const char* name) const {
    if (!wrong.empty()) return wrong;
    if (own <= 2 * plain + slack) return "";
    std::ostringstream text;
    text << name << ": max error " << own << ", standard attention " << plain << ", slack " << slack;
    return text.str();
  }
};

}  // namespace

std::ostream& operator<<(std::ostream& stream, const MergeCase& c) {
  stream << c.parts << " parts, " << c.batch << " x " << c.seqlen << " x " << c.heads << " x " << c.head_dim
         << (c.packed ? " packed" : "") << ", types";
  for (const DType t : c.types) stream << " " << name_of(t);
  return stream << " to " << name_of(c.out) << (c.lse ? "" : ", no lse") << ", layout " << c.layout
                << (c.in_place ? ", in place" : "") << (c.undefined ? ", undefined" : "");
}

MergeInstance::MergeInstance(const MergeCase& wanted) : c(wanted) {
  Random r(static_cast<uint64_t>(c.parts * 1000 + c.head_dim));
  const std::vector<int64_t> shape = c.packed ? std::vector<int64_t>{c.seqlen, c.heads, c.head_dim}
                                              : std::vector<int64_t>{c.batch, c.seqlen, c.heads, c.head_dim};
  const std::vector<int64_t> lse_shape =
      c.packed ? std::vector<int64_t>{c.heads, c.seqlen} : std::vector<int64_t>{c.batch, c.heads, c.seqlen};
  const auto tensor = [&](DType type) { return Tensor(type, shape, c.layout, 32, c.gap); };
  for (int64_t n = 0; n < c.parts; ++n) {
    Tensor out = tensor(c.types[static_cast<size_t>(n) % c.types.size()]);
    Tensor lse(c.out == DType::f64 ? DType::f64 : DType::f32, lse_shape, c.layout);
    for (int64_t e = 0; e < lse.size(); ++e) lse.set(e, r.chance(0.33) ? -kInfinity : 3 * r.normal());
    for (int64_t e = 0; c.undefined && e < lse.size(); e += 7) lse.set(e, e % 2 == 0 ? NAN : kInfinity);
    const int64_t rows = c.packed ? c.seqlen : c.batch * c.seqlen;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t b = row / std::max<int64_t>(c.seqlen, 1), i = row % std::max<int64_t>(c.seqlen, 1);
        const bool hidden = lse.get((b * c.heads + h) * c.seqlen + i) == -kInfinity;
        for (int64_t d = 0; d < c.head_dim; ++d) {
          out.set((row * c.heads + h) * c.head_dim + d, hidden ? NAN : r.normal());
        }
      }
    }
    part_out_.push_back(std::move(out));
    part_lse_.push_back(std::move(lse));
  }
  if (c.in_place) return;
  out_ = tensor(c.out);
  if (c.lse) lse_ = Tensor(c.out == DType::f64 ? DType::f64 : DType::f32, lse_shape, c.layout);
}

tandem_merge_args MergeInstance::args() {
  out_list_.clear();
  lse_list_.clear();
  for (Tensor& t : part_out_) out_list_.push_back(t.describe());
  for (Tensor& t : part_lse_) lse_list_.push_back(t.describe());
  tandem_merge_args a{};
  a.size = sizeof a;
  a.parts = c.parts;
  a.part_out = out_list_.data();
  a.part_lse = lse_list_.data();
  a.out = out().describe();
  if (c.lse) a.lse = lse().describe();
  return a;
}

std::vector<Tensor*> MergeInstance::tensors() {
  std::vector<Tensor*> all;
  for (Tensor& t : part_out_) all.push_back(&t);
  for (Tensor& t : part_lse_) all.push_back(&t);
  if (!c.in_place) all.push_back(&out_);
  if (!c.in_place && c.lse) all.push_back(&lse_);
  return all;
}

std::string check_merge_accuracy(const MergeCase& c, const std::function<void(MergeInstance&)>& merge) {
  MergeInstance instance(c), before(c);  // before: the unmerged parts
  merge(instance);
  const tandem_merge_args args = before.args();
  MergeProblem m;
  const Status status = make_merge_problem(&args, {TANDEM_CPU, 0}, &m);
  if (!status.ok()) return status.message;
  Tensor out(DType::f64, before.out().shape());
  Tensor lse(DType::f64,
             c.packed ? std::vector<int64_t>{c.heads, c.seqlen} : std::vector<int64_t>{c.batch, c.heads, c.seqlen});
  MergeProblem exact = m;
  const int64_t row = c.heads * c.head_dim;
  exact.out = {out.element(0), DType::f64, c.seqlen * row, row, c.head_dim, true};
  exact.lse = {lse.element(0), DType::f64, c.heads * c.seqlen, 1, c.seqlen, true};
  reference::merge(exact);
  Errors of_out, of_lse;
  for (int64_t n = 0; n < m.rows(); ++n) {
    const int64_t h = n % c.heads, i = n / c.heads % c.seqlen, b = n / c.heads / c.seqlen;
    const PlainRow plain(m, b, i, h);
    const std::string where = " of query " + std::to_string(i) + ", head " + std::to_string(h);
    for (int64_t d = 0; d < c.head_dim; ++d) {
      of_out.add(c.out, instance.out().get(n * c.head_dim + d), out.get(n * c.head_dim + d),
                 plain.out[static_cast<size_t>(d)], "out" + where);
    }
    if (!c.lse) continue;
    const int64_t at = (b * c.heads + h) * c.seqlen + i;
    of_lse.add(instance.lse().dtype(), instance.lse().get(at), lse.get(at), plain.lse, "lse" + where);
  }
  for (Tensor* t : instance.tensors()) {
    if (!t->guards_intact()) return "a tensor was written to outside its elements";
  }
  const std::vector<Tensor*> now = instance.tensors(), then = before.tensors();
  for (size_t n = c.in_place ? 1 : 0; n < now.size(); ++n) {
    const bool result = now[n] == &instance.out() || (c.lse && now[n] == &instance.lse());
    if (!result && now[n]->fingerprint() != then[n]->fingerprint()) return "a part was written to";
  }
  const std::string verdict = of_out.verdict("out");
  return verdict.empty() ? of_lse.verdict("lse") : verdict;
}

std::vector<MergeCase> merge_cases() {
  const std::vector<DType> all = {DType::bf16, DType::f32, DType::f16};
  std::vector<MergeCase> cases;
  for (const DType out : all) {
    cases.push_back({.out = out});
    cases.push_back({.parts = 1, .types = {out}, .out = out});
    cases.push_back({.parts = 3, .batch = 2, .seqlen = 37, .heads = 3, .head_dim = 64, .types = all, .out = out});
    cases.push_back({.parts = 5, .seqlen = 19, .heads = 4, .head_dim = 128, .packed = true, .types = all, .out = out});
    cases.push_back({.parts = 2, .seqlen = 9, .head_dim = 200, .types = {out}, .out = out, .in_place = true});
    cases.push_back({.seqlen = 7, .heads = 3, .head_dim = 33, .types = all, .out = out, .layout = kGaps});
    cases.push_back({.batch = 2, .seqlen = 11, .head_dim = 80, .types = {out}, .out = out, .layout = kHeadsFirst});
    cases.push_back({.parts = 4, .seqlen = 30, .head_dim = 7, .out = out, .undefined = true});
  }
  cases.push_back({.parts = 3, .seqlen = 6, .head_dim = 512, .lse = false, .layout = kGaps | kHeadsFirst});
  cases.push_back({.parts = 59, .seqlen = 6, .types = all});
  cases.push_back({.parts = 60, .seqlen = 6, .out = DType::bf16});
  cases.push_back({.parts = 61, .seqlen = 6, .types = all});
  cases.push_back({.parts = 150, .seqlen = 4, .head_dim = 40});
  cases.push_back({.batch = 0});
  cases.push_back({.seqlen = 0, .heads = 0});
  return cases;
}

}  // namespace tandem::test
