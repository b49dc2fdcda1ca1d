// Names for what warps do, from the functions that their code was inlined from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vgpu/src/machine/machine.h"

namespace tandem::vgpu {

class Roles {
 public:
  explicit Roles(const Program& program) : program_(program) {}

  // counts[warp][instruction]: how often. The name of each warp is that of the function in which it spends its time, on
  // the level of calls where the warps of the block part; "" where nothing tells, and of warps that do nothing much.
  std::vector<std::string> of_warps(const std::vector<std::vector<uint32_t>>& counts);

  // Of an instruction: the function called there by a role's own, "Softmax::step"; without line information what it
  // starts or waits for, "wgmma.mma_async", or just "code". Valid after of_warps.
  std::string activity_at(int32_t instruction) const;

 private:
  const Program& program_;
  size_t level_ = 0;  // of the roles' functions among those around an instruction
};

}  // namespace tandem::vgpu
