#include "plan/plan.h"

#include <cstring>
#include <stdexcept>

#include "plan/arguments.h"
#include "plan/backward.h"
#include "plan/forward.h"

namespace tandem::plan {

namespace {
constexpr ForwardPass kForward;
constexpr BackwardPass kBackward;
}  // namespace

const Pass* pass_of(tandem_pass pass) {
  if (pass == TANDEM_FORWARD) return &kForward;
  return &kBackward;
}

// Not inline: memset() of a size that the compiler does not know is the fastest way to zero a kilobyte.
void* Arguments::zeroed(size_t bytes) {
  const size_t begin = (used_ + kAlignment - 1) / kAlignment * kAlignment;
  if (begin + bytes > kBytes) throw std::length_error("kernel parameters: Arguments::kBytes is too small");
  used_ = begin + bytes;
  return of_kernel_.push_back(std::memset(memory_ + begin, 0, bytes));
}

Plan make_plan(const Problem& problem, const gpu::Properties& device) {
  Plan plan;
  plan.pass = pass_of(problem.pass);
  plan.pass->plan(problem, device, &plan);
  return plan;
}

}  // namespace tandem::plan
