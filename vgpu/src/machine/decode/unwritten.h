// Registers that may be read before they are written.
#pragma once

#include <vector>

#include "vgpu/src/machine/code.h"
#include "vgpu/src/machine/decode/builder.h"

namespace tandem::vgpu::machine {

// Notes them in Code::may_be_unwritten, and in Code::uses the ops that read or write them: those that some path from
// the kernel's begin reaches without a write. Before registers are allocated. Compilers read unwritten registers where
// it does not matter, and that counts as no read: copies and selections, shuffles, some words of a wider store, and
// sums that a product overwrites.
void find_unwritten(Code* code, const std::vector<VirtualRegister>& registers, int32_t always);

}  // namespace tandem::vgpu::machine
