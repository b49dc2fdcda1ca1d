#include "problem/merge.h"

#include <cmath>
#include <limits>
#include <vector>

#include "problem/convert.h"
#include "reference/reference.h"

//   lse = log(sum_n exp(lse_n)),   out = sum_n exp(lse_n - lse) out_n
//
// A part whose lse is -inf is skipped, so that its out cannot affect the result.

namespace tandem::reference {
namespace {

void merge_row(const MergeProblem& m, int64_t b, int64_t i, int64_t h) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  double largest = -infinity, sum = 0;
  bool defined = true;
  for (int64_t n = 0; n < m.parts; ++n) {
    const View from = m.part(n).lse;
    const double lse = load(from.dtype, from.at(b, i, h));
    defined = defined && lse < infinity;
    largest = std::fmax(largest, lse);
  }
  std::vector<double> out(static_cast<size_t>(m.head_dim), defined ? 0.0 : std::numeric_limits<double>::quiet_NaN());
  for (int64_t n = 0; n < m.parts && defined; ++n) {
    const MergeProblem::Part part = m.part(n);
    const double lse = load(part.lse.dtype, part.lse.at(b, i, h));
    if (lse == -infinity) continue;
    const double weight = std::exp(lse - largest);
    sum += weight;
    for (size_t c = 0; c < out.size(); ++c)
      out[c] += weight * load(part.out.dtype, part.out.at(b, i, h) + static_cast<int64_t>(c) * size_of(part.out.dtype));
  }
  for (size_t c = 0; c < out.size(); ++c) {
    store(m.out.dtype, m.out.at(b, i, h) + static_cast<int64_t>(c) * size_of(m.out.dtype),
          sum > 0 ? out[c] / sum : out[c]);
  }
  if (m.lse) {
    const double lse = !defined ? out[0] : sum > 0 ? largest + std::log(sum) : -infinity;
    store(m.lse.dtype, m.lse.at(b, i, h), lse);
  }
}

}  // namespace

void merge(const MergeProblem& m, const ParallelFor& parallel_for) {
  parallel_for(m.batch * m.seqlen, [&m](int64_t task) {
    for (int64_t h = 0; h < m.heads; ++h) merge_row(m, task / m.seqlen, task % m.seqlen, h);
  });
}

}  // namespace tandem::reference
