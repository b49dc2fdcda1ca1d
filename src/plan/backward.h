// The backward pass on GPUs.
#pragma once

#include "plan/plan.h"

namespace tandem::plan {

// Indices into Plan::kernels after the main kernel. The dbias kernel exists only if that gradient is computed.
inline constexpr uint8_t kPrepostKernel = 1, kDbiasKernel = 2;

class BackwardPass final : public Pass {
 public:
  Status check(const Problem& problem, const gpu::Properties& device, const Tuning& tuning) const override;
  void plan(const Problem& problem, const gpu::Properties& device, const Tuning& tuning, Plan* plan) const override;
  void bind(const Problem& problem, const Plan& plan, std::byte* workspace, Arguments* arguments) const override;
  std::vector<gpu::NamedBuffer> tensors_of(const Problem& problem, const Plan& plan, size_t launch) const override;
  std::string summary(const Plan& plan) const override;
};

}  // namespace tandem::plan
