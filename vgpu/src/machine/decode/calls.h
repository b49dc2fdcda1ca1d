// Functions that a kernel may call without their code, and the end of a thread.
#pragma once

#include <string>

#include "vgpu/src/machine/decode/builder.h"

namespace tandem::vgpu::machine {

// vprintf, malloc, free, __assertfail: the functions that the CUDA runtime provides.
Status call_builtin(Builder& b, const ptx::Instruction& i, const std::string& name);

void emit_exit(Builder& b);

}  // namespace tandem::vgpu::machine
