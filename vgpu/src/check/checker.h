// The checker. The checker follows the happens-before order over barriers, mbarriers, fences and proxies, for every
// byte that a kernel accesses.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/observer/observer.h"

namespace tandem::vgpu {

struct CheckerOptions {
  size_t max_findings = 20;  // limit for each grade; one for each rule and line
  bool letter = true;        // false: findings by the letter are dropped
};

// The checker of one launch.
class Checker : public Observer {
 public:
  // buffers: all global memory the kernel may touch. If the list is empty, global memory is not checked for bounds.
  static std::unique_ptr<Checker> create(const LaunchDescription& launch, const Model& model,
                                         std::span<const Buffer> buffers, CheckerOptions options);
  // The findings are sorted by place in the source, and complete once run() has returned.
  virtual std::vector<Finding> findings() const = 0;
};

// The source line of an instruction, with the calls that led there. Without line information the result is the PTX
// line. -1: "".
std::string place_of(const Program& program, int32_t instruction);

// Lines of a report: rule, kernel, source line, thread, subject, the other party, advice.
std::string report(const Program& program, const Finding& finding);

}  // namespace tandem::vgpu
