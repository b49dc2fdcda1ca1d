// Registers that may be read before they are written.
#pragma once

#include <vector>

#include "vgpu/src/machine/code.h"
#include "vgpu/src/machine/decode/builder.h"

namespace tandem::vgpu::machine {

// Records registers that some path reaches unwritten in Code::may_be_unwritten, and the ops that access them in
// Code::uses. The pass runs before registers are allocated. Compilers read unwritten registers harmlessly, so these
// uses are no reads: copies, selections, shuffles, some words of a wider store, accumulators that a product overwrites.
void find_unwritten(Code* code, const std::vector<VirtualRegister>& registers, int32_t always);

}  // namespace tandem::vgpu::machine
