// Assigns places in the register file to virtual registers.
#pragma once

#include <vector>

#include "vgpu/src/machine/code.h"
#include "vgpu/src/machine/decode/builder.h"

namespace tandem::vgpu::machine {

// Replaces virtual registers by byte offsets, in ops and details: linear scan over liveness. Registers whose values
// never live at once share a place, but never with one that an asynchronous operation may still hold. Marks ops whose
// operands may be held.
void allocate_registers(Code* code, const std::vector<VirtualRegister>& registers, int32_t always);

}  // namespace tandem::vgpu::machine
