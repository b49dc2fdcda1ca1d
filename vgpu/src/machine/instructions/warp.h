#pragma once

#include "vgpu/src/machine/decode/builder.h"

namespace tandem::vgpu::machine {

Status decode_warp_sync(Builder& b, const ptx::Instruction& i);  // bar.warp.sync

}  // namespace tandem::vgpu::machine
