// Names warps after the functions that their code was inlined from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vgpu/src/machine/machine.h"

namespace tandem::vgpu {

class Roles {
 public:
  explicit Roles(const Program& program) : program_(program) {}

  // counts[warp][instruction]: executions. A warp's name is the function in which it spends its time. The call level is
  // the level at which the block's warps diverge. "": no line information, or an idle warp.
  std::vector<std::string> of_warps(const std::vector<std::vector<uint32_t>>& counts);

  // The function that a role's own function calls at an instruction, "Softmax::step". Without line information, the
  // operation that it starts or waits for, "wgmma.mma_async", or "code". The name is valid after of_warps.
  std::string activity_at(int32_t instruction) const;

 private:
  const Program& program_;
  size_t level_ = 0;  // call level of the roles' functions
};

}  // namespace tandem::vgpu
