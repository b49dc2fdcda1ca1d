#pragma once

#include <algorithm>
#include <cstdio>

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/run/warpgroup.h"
#include "vgpu/src/units/wgmma.h"

namespace tandem::vgpu::machine {

Status decode_wgmma(Builder& b, const ptx::Instruction& i);
Status decode_mma(Builder& b, const ptx::Instruction& i);

// in: registers or the descriptor of A, descriptor of B, scale-d, registers of D; out: registers of D.
struct WgmmaDetail : Detail {
  units::WgmmaForm form;
  size_t a_count = 0;  // registers of A
  int32_t b_at = 0;
};

}  // namespace tandem::vgpu::machine
