// Converts a record to rows.
#pragma once

#include <vector>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/trace/record.h"
#include "vgpu/src/trace/timeline.h"

namespace tandem::vgpu::trace {

// Draws without a title. warps: of all blocks in order; first_block: the name of the first of several blocks. Marks
// name rows by numbers: the warps' numbers, then kUnits for each block.
Timeline draw(const Program& program, const std::vector<TracedWarp>& warps,
              const std::vector<TracedOperation>& operations, int32_t first_block, int32_t blocks);

}  // namespace tandem::vgpu::trace
