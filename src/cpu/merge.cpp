// Merges parts. A row is a vector of one query and head. The row is read once from each part with a nonzero weight.
#include "problem/merge.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/schedule.h"

namespace tandem::cpu {
namespace {

using Parts = std::vector<MergeProblem::Part>;

constexpr int64_t kMaxHeadDim = 512;
constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

double lse_at(const View& view, int64_t b, int64_t i, int64_t h) {
  float x;
  std::memcpy(&x, view.at(b, i, h), sizeof x);
  return x;
}

// Returns log(sum exp(lse)) over the parts, or NaN if an lse is NaN or +inf.
double merged_lse(const Parts& parts, int64_t b, int64_t i, int64_t h) {
  double largest = -kInfinity, sum = 0;
  for (const auto& part : parts) {
    const double lse = lse_at(part.lse, b, i, h);
    if (!(lse < kInfinity)) return kNaN;
    largest = std::max(largest, lse);
  }
  if (largest == -kInfinity) return largest;
  for (const auto& part : parts) sum += std::exp(lse_at(part.lse, b, i, h) - largest);
  return largest + std::log(sum);
}

void merge_row(const MergeProblem& m, const Parts& parts, int64_t b, int64_t i, int64_t h) {
  const double lse = merged_lse(parts, b, i, h);
  float out[kMaxHeadDim], from[kMaxHeadDim];
  std::fill_n(out, m.head_dim, std::isnan(lse) ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
  for (const auto& part : parts) {
    const double own = lse_at(part.lse, b, i, h);
    if (own == -kInfinity || std::isnan(lse)) continue;
    const auto weight = static_cast<float>(std::exp(own - lse));
    kernels().load_row(part.out.dtype, part.out.at(b, i, h), m.head_dim, from);
    for (int64_t c = 0; c < m.head_dim; ++c) out[c] += weight * from[c];
  }
  kernels().store_row(m.out.dtype, out, m.head_dim, m.out.at(b, i, h));
  if (!m.lse) return;
  const auto rounded = static_cast<float>(lse);
  std::memcpy(m.lse.at(b, i, h), &rounded, sizeof rounded);
}

// A row of a bias is longer than kMaxHeadDim. A boolean row is a copy.
void sum_row(const MergeProblem& m, const Parts& parts, int64_t b, int64_t i, int64_t h) {
  if (m.out.dtype == DType::boolean) {
    std::memcpy(m.out.at(b, i, h), parts[0].out.at(b, i, h), static_cast<size_t>(m.head_dim));
    return;
  }
  for (int64_t first = 0; first < m.head_dim; first += kMaxHeadDim) {
    const int64_t columns = std::min(kMaxHeadDim, m.head_dim - first);
    float out[kMaxHeadDim] = {}, from[kMaxHeadDim];
    for (const auto& part : parts) {
      const std::byte* at = part.out.at(b, i, h) + first * size_of(part.out.dtype);
      kernels().load_row(part.out.dtype, at, columns, from);
      for (int64_t c = 0; c < columns; ++c) out[c] += from[c];
    }
    kernels().store_row(m.out.dtype, out, columns, m.out.at(b, i, h) + first * size_of(m.out.dtype));
  }
}

}  // namespace

void merge(const MergeProblem& m, Threads& threads) {
  Parts parts;
  for (int64_t n = 0; n < m.parts; ++n) parts.push_back(m.part(n));
  const double work =
      static_cast<double>(m.rows()) * static_cast<double>(m.parts) * static_cast<double>(m.head_dim + 16);
  for_each_item(threads, {Take::kInSections, m.batch * m.seqlen, work}, nullptr, 0, [&](int64_t item, std::byte*) {
    const auto row = m.sum ? sum_row : merge_row;
    for (int64_t h = 0; h < m.heads; ++h) row(m, parts, item / m.seqlen, item % m.seqlen, h);
  });
}

}  // namespace tandem::cpu
