// The arguments of a call that are not tensors.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "base/text.h"
#include "problem/builder.h"
#include "problem/philox.h"

namespace tandem {
namespace {

constexpr int32_t kMaxSplits = 1024;
constexpr int64_t kFar = int64_t{1} << 61;  // clamp of a window bound, so that sums stay in int64

// A bound counts if its bit is set. A value without its bit is refused as a mistake.
Status read_bound(const char* name, const char* bit_name, bool set, int64_t value, int64_t* bound) {
  if (!set && value != 0 && value != TANDEM_UNBOUNDED) {
    return Status::invalid(
        str_cat(name, " (", value, ") must be 0 while window lacks ", bit_name, ": set the bit, or zero the bound"));
  }
  *bound = !set || value == TANDEM_UNBOUNDED ? TANDEM_UNBOUNDED : std::clamp(value, -kFar, kFar);
  return {};
}

Status read_pointer(const char* name, const uint64_t* from, uint64_t* to) {
  if (from == nullptr) return {};
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (address % alignof(uint64_t) != 0) {
    return Status::invalid(str_cat(name, " (address ", address % 64, " modulo 64) must be a multiple of ",
                                   alignof(uint64_t), ": align the uint64_t"));
  }
  *to = *from;
  return {};
}

}  // namespace

Status ProblemBuilder::read_options() {
  if (args_.num_splits < 0 || args_.num_splits > kMaxSplits) {
    return Status::invalid(
        str_cat("num_splits (", args_.num_splits, ") must be 0 to ", kMaxSplits, ": pass 0 to let the library choose"));
  }
  if (args_.sm_limit < 0) {
    return Status::invalid(
        str_cat("sm_limit (", args_.sm_limit, ") must be 0 (no limit) or a number of multiprocessors: pass 0 or more"));
  }
  p_.num_splits = args_.num_splits;
  p_.deterministic = args_.deterministic != 0;
  p_.batch_invariant = args_.batch_invariant != 0;
  p_.validate = args_.validate != 0;
  p_.accumulate = backward() && args_.accumulate != 0;
  p_.sm_limit = args_.sm_limit;
  return {};
}

Status ProblemBuilder::read_diagonal() {
  const int32_t alignment = args_.alignment;
  if (alignment < TANDEM_BOTTOM_RIGHT || alignment > TANDEM_EXPLICIT) {
    return Status::invalid(
        str_cat("alignment (", alignment,
                ") must be TANDEM_BOTTOM_RIGHT (0), TANDEM_TOP_LEFT (1) or TANDEM_EXPLICIT (2): choose one of them"));
  }
  p_.bottom_right = alignment == TANDEM_BOTTOM_RIGHT;
  if (alignment == TANDEM_EXPLICIT) {
    // A bound so large that no entry of diagonal_offsets can cancel it, and no sum overflows.
    constexpr int64_t beyond = int64_t{1} << 33;
    p_.diagonal_offset = std::clamp(args_.diagonal_offset, -beyond, beyond);
    return {};
  }
  if (args_.diagonal_offset == 0 && args_.diagonal_offsets == nullptr) return {};
  const std::string which = args_.diagonal_offset != 0
                                ? str_cat("diagonal_offset (", args_.diagonal_offset, ") must be 0")
                                : "diagonal_offsets must be NULL";
  return Status::invalid(
      str_cat(which, " unless alignment (", alignment, ") is TANDEM_EXPLICIT (2): pass this alignment, or no offset"));
}

Status ProblemBuilder::read_window() {
  const int32_t window = args_.window;
  if ((window & ~(TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT)) != 0) {
    return Status::invalid(str_cat("window (", window,
                                   ") must be a sum of TANDEM_WINDOW_LEFT (1) and TANDEM_WINDOW_RIGHT ",
                                   "(2): add the bit of each bound that the call sets"));
  }
  TANDEM_TRY(read_bound("window_left", "TANDEM_WINDOW_LEFT", (window & TANDEM_WINDOW_LEFT) != 0, args_.window_left,
                        &p_.window_left));
  TANDEM_TRY(read_bound("window_right", "TANDEM_WINDOW_RIGHT", (window & TANDEM_WINDOW_RIGHT) != 0, args_.window_right,
                        &p_.window_right));
  const bool lowered = args_.causal != 0 && p_.window_right > 0;
  if (lowered) p_.window_right = 0;
  if (p_.window_left == TANDEM_UNBOUNDED || p_.window_right == TANDEM_UNBOUNDED) return {};
  // The caller's numbers, because kFar has replaced the bounds of the problem.
  const int64_t left = args_.window_left, right = lowered ? 0 : args_.window_right;
  if (right >= 0 ? left >= -right : left >= 0 && left + right >= 0) return {};
  return Status::invalid(str_cat("window_left (", left, ") + window_right (", right,
                                 args_.causal != 0 ? ", as causal is set" : "",
                                 ") must be at least 0: swap or widen the bounds, because the window has no keys"));
}

// Engines compute scores in float32 unless the tensors are float64.
Status ProblemBuilder::read_scale() {
  const double scale = args_.softmax_scale, cap = args_.softcap;
  const bool f64 = p_.dtype == DType::f64;
  const double largest = f64 ? DBL_MAX : FLT_MAX, least = f64 ? DBL_MIN : FLT_MIN;
  if (!(std::fabs(scale) <= largest)) {
    return Status::invalid(str_cat("softmax_scale (", scale, ") must be a finite ", f64 ? "float64" : "float32",
                                   ": pass 0 for 1/sqrt(head_dim)"));
  }
  if (cap != 0 && !(cap >= least && cap <= largest)) {
    return Status::invalid(str_cat("softcap (", cap, ") must be 0 (off) or a positive normal ",
                                   f64 ? "float64" : "float32", ": pass 0, or the bound of the capped scores"));
  }
  p_.softmax_scale = scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(p_.head_dim));
  p_.softcap = cap;
  return {};
}

Status ProblemBuilder::read_dropout() {
  const double p = args_.dropout_p;
  if (!(p >= 0 && p < 1)) {
    return Status::invalid(
        str_cat("dropout_p (", p, ") must be at least 0 and below 1: pass the probability that an entry becomes 0"));
  }
  if (p == 0) return {};
  if (p_.batch * p_.heads_q > int64_t{1} << 32) {
    return Status::invalid(str_cat("batch (", p_.batch, ") * q.heads (", p_.heads_q,
                                   ") must be at most 2^32 with dropout: ", "split the call over batch"));
  }
  p_.dropout = {.p = rounded_dropout(p), .seed = args_.dropout_seed, .offset = args_.dropout_offset};
  if (!on_cpu()) {
    p_.dropout.seed_ptr = args_.dropout_seed_ptr;
    p_.dropout.offset_ptr = args_.dropout_offset_ptr;
  }
  if (!mode_.with_data || !on_cpu()) return {};
  TANDEM_TRY(read_pointer("dropout_seed_ptr", args_.dropout_seed_ptr, &p_.dropout.seed));
  return read_pointer("dropout_offset_ptr", args_.dropout_offset_ptr, &p_.dropout.offset);
}

}  // namespace tandem
