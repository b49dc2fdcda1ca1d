// From a record to rows.
#pragma once

#include <vector>

#include "vgpu/machine/machine.h"
#include "vgpu/trace/record.h"
#include "vgpu/trace/timeline.h"

namespace tandem::vgpu::trace {

// Without a title.
Timeline draw(const Program& program, const std::vector<Warp>& warps, const std::vector<Operation>& operations);

}  // namespace tandem::vgpu::trace
