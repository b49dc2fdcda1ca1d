// Detects whether two strided views share a byte.
#include <algorithm>
#include <functional>

#include "problem/operands.h"

namespace tandem {
namespace {

// The bytes of a view: [0, unit) moved by every sum of steps. Steps have falling strides.
struct Comb {
  OperandStep steps[kMaxRank];
  int count;
  int64_t unit;

  explicit Comb(const Operand& o) : count(steps_of(o, steps)), unit(size_of(o.dtype)) {
    while (count > 0 && steps[count - 1].stride == 0) --count;
    for (OperandStep& step : steps) step.stride *= unit;
  }

  int64_t extent(int from) const {
    int64_t bytes = unit;
    for (int i = from; i < count; ++i) bytes += steps[i].stride * (steps[i].count - 1);
    return bytes;
  }
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// Returns true if positions of a (from its step ia on) and of b (moved by shift) coincide, or if budget runs out. The
// function removes the largest stride S of both, and compares the remaining dimensions at shift + k * S for every index
// difference k. If these are shorter than S, at most two k remain, so that nested views cost a few steps.
bool meet(const Comb& a, int ia, const Comb& b, int ib, int64_t shift, int* budget) {
  if (--*budget < 0) return true;
  if (shift >= a.extent(ia) || -shift >= b.extent(ib)) return false;
  if (ia == a.count && ib == b.count) return true;
  const int64_t stride = std::max(ia < a.count ? a.steps[ia].stride : 0, ib < b.count ? b.steps[ib].stride : 0);
  const bool in_a = ia < a.count && a.steps[ia].stride == stride, in_b = ib < b.count && b.steps[ib].stride == stride;
  const int64_t rest_a = a.extent(ia + in_a), rest_b = b.extent(ib + in_b);
  // Condition: -rest_b < shift + k * stride < rest_a, where k is a difference of two indices.
  const int64_t low = std::max(floor_div(-rest_b - shift, stride) + 1, in_a ? 1 - a.steps[ia].count : 0);
  const int64_t high = std::min(-floor_div(shift - rest_a, stride) - 1, in_b ? b.steps[ib].count - 1 : 0);
  for (int64_t k = low; k <= high; ++k) {
    if (meet(a, ia + in_a, b, ib + in_b, shift + k * stride, budget)) return true;
  }
  return false;
}

}  // namespace

bool overlap(const Operand& a, const Operand& b) {
  if (!a.present || !b.present || a.empty || b.empty) return false;
  if (!std::less<>{}(a.first(), b.first() + b.bytes) || !std::less<>{}(b.first(), a.first() + a.bytes)) return false;
  int budget = 4096;
  return meet(Comb(a), 0, Comb(b), 0, b.first() - a.first(), &budget);
}

}  // namespace tandem
