#include "plan/serving.h"

#include <algorithm>
#include <unordered_set>

#include "base/text.h"
#include "plan/arithmetic.h"
#include "plan/forward.h"

namespace tandem::plan {
namespace {

// Lengths 0 to 32, then in steps of an eighth, with the neighbours of the marks, up to `most`.
std::vector<int64_t> lengths_up_to(int64_t most, std::initializer_list<int64_t> marks) {
  std::vector<int64_t> list;
  for (int64_t n = 0; n < most; n += n < 32 ? 1 : n / 8) list.push_back(n);
  list.push_back(most);
  for (const int64_t mark : marks) {
    for (int64_t n = mark - 1; n <= mark + 2; ++n) {
      if (n >= 0 && n < most) list.push_back(n);
    }
  }
  std::ranges::sort(list);
  list.erase(std::ranges::unique(list).begin(), list.end());
  return list;
}

// Powers of two, and `most`.
std::vector<int64_t> doubled(int64_t least, int64_t most) {
  std::vector<int64_t> list;
  for (int64_t n = std::max<int64_t>(least, 1); n < most; n *= 2) list.push_back(n);
  list.push_back(most);
  return list;
}

class ServingPlans {
 public:
  ServingPlans(const Problem& most, const gpu::Properties& device, const Tuning& tuning)
      : most_(most), device_(device), tuning_(tuning), p_(most) {}

  std::vector<PlannedKernel> kernels() {
    // A mask that hides nothing for short lengths has another kernel. The bounds and the diagonal mark these lengths.
    const int64_t offset = clamp_diagonal(most_.diagonal_offset);
    const int64_t left = mark_of(most_.window_left), right = mark_of(most_.window_right);
    const auto keys = lengths_up_to(most_.seqlen_k, {left, right + offset});
    for (const int64_t seqlen_q : lengths_up_to(most_.seqlen_q, {right, left - offset})) {
      if (seqlen_q == 0) continue;
      p_.seqlen_q = seqlen_q;
      for (const int64_t seqlen_k : keys) {
        p_.seqlen_k = seqlen_k;
        most_.packed_q() ? plan_packed() : plan_dense();
      }
    }
    return std::move(kernels_);
  }

 private:
  static int64_t mark_of(int64_t bound) { return bound == TANDEM_UNBOUNDED ? -2 : clamp_diagonal(bound); }

  void plan_dense() {
    for (int64_t batch = 1;; batch = std::min(most_.batch, batch + 1 + batch / 4)) {
      p_.total_q = batch * p_.seqlen_q;
      plan_batch(batch);
      if (batch == most_.batch) return;
    }
  }

  void plan_packed() {
    for (const int64_t total : doubled(p_.seqlen_q, most_.total_q)) {
      p_.total_q = total;
      const int64_t least = ceil_div(total, p_.seqlen_q);
      if (least > most_.batch) continue;
      for (const int64_t batch : doubled(least, most_.batch)) plan_batch(batch);
    }
  }

  void plan_batch(int64_t batch) {
    p_.batch = batch;
    p_.total_k = most_.page_table ? most_.total_k : batch * p_.seqlen_k;
    if (most_.packed_k()) p_.total_k = std::min(p_.total_k, most_.total_k);
    for (const PlannedKernel& kernel : make_plan(p_, device_, tuning_).kernels) {
      if (seen_.insert(kernel.id).second) kernels_.push_back(kernel);
    }
  }

  const Problem& most_;
  const gpu::Properties& device_;
  const Tuning& tuning_;
  Problem p_;
  std::unordered_set<uint64_t> seen_;
  std::vector<PlannedKernel> kernels_;
};

}  // namespace

Status check_serving(const Problem& p) {
  for (const auto& [name, present] :
       {std::pair("bias", p.bias.present), std::pair("kv_indices", p.block_mask.partial.present)}) {
    if (!present) continue;
    return Status::unsupported(
        str_cat(name, " must be NULL, because its shape has lengths: call tandem_prepare for each shape"));
  }
  return {};
}

std::vector<PlannedKernel> serving_kernels(const Problem& most, const gpu::Properties& device, const Tuning& tuning) {
  return ServingPlans(most, device, tuning).kernels();
}

}  // namespace tandem::plan
