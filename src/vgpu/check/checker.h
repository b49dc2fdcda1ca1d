// The checker: happens-before over barriers, mbarriers, fences and proxies, for every byte that a kernel touches.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "vgpu/check/observer.h"
#include "vgpu/machine/machine.h"

namespace tandem::vgpu {

// Of one launch.
class Checker : public Observer {
 public:
  struct Options {
    size_t max_findings = 20;  // errors, and as many warnings; one of a kind at a place: (rule, both instructions)
  };
  // buffers: all global memory the kernel may touch. Empty: global memory is not checked for bounds.
  static std::unique_ptr<Checker> create(const LaunchDescription& launch, const Model& model,
                                         std::span<const Buffer> buffers, Options options);
  // Sorted by place in the source; complete once run() has returned.
  virtual std::vector<Finding> findings() const = 0;
};

// Lines of a report: rule, kernel, source line, thread, subject, the other party, advice.
std::string report(const Program& program, const Finding& finding);

}  // namespace tandem::vgpu
