// Floating point, shared by the decoders of arithmetic and of conversions.
#pragma once

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::machine {

// The floating-point forms of opcodes that integers have too (add, mul, min, ...).
Status decode_real(Builder& b, const ptx::Instruction& i);
Status decode_cvt(Builder& b, const ptx::Instruction& i);

// A register with the value as float32, of an f16, bf16 or f32 register.
int32_t to_f32(Builder& b, int32_t reg, ptx::Type type);
void encode(Builder& b, units::Format format, units::Fit fit, int32_t d, int32_t a);

// As emit(), with the host's floating-point environment rounding so while the op is executed.
void emit_rounded(Builder& b, units::Rounding rounding, Action action, int32_t d,
                  std::initializer_list<int32_t> sources);

// .rn .rz .rm .rp; default rn.
units::Rounding take_rounding(Modifiers& words);

}  // namespace tandem::vgpu::machine
