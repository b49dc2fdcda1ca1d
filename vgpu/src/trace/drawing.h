// From a record to rows.
#pragma once

#include <vector>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/trace/record.h"
#include "vgpu/src/trace/timeline.h"

namespace tandem::vgpu::trace {

// Without a title. warps: of all blocks, one after the other; first_block: what the first of so many is called, where
// there are several. Marks name rows by numbers: those of warps, then kUnits of each block.
Timeline draw(const Program& program, const std::vector<TracedWarp>& warps, const std::vector<Operation>& operations,
              int32_t first_block, int32_t blocks);

}  // namespace tandem::vgpu::trace
