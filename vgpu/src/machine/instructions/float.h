// Floating-point code that the decoders of arithmetic and of conversions share.
#pragma once

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::machine {

// Decodes the floating-point forms of opcodes that integers also have (add, mul, min, ...).
Status decode_real(Builder& b, const ptx::Instruction& i);
Status decode_cvt(Builder& b, const ptx::Instruction& i);

// Returns a register with the float32 value of an f16, bf16 or f32 register.
int32_t to_f32(Builder& b, int32_t reg, ptx::Type type);
void encode(Builder& b, units::Format format, units::Fit fit, int32_t d, int32_t a);

// Appends an op like emit(). The host's floating-point environment has this rounding while the op is executed.
void emit_rounded(Builder& b, units::Rounding rounding, Action action, int32_t d,
                  std::initializer_list<int32_t> sources);

// Consumes .rn .rz .rm .rp; the default is rn.
units::Rounding take_rounding(Modifiers& words);

}  // namespace tandem::vgpu::machine
