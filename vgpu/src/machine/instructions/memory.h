// Qualifiers that the families of memory instructions share.
#pragma once

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/run/resolve.h"

namespace tandem::vgpu::machine {

void take_order(Modifiers& words, AccessForm* form);  // .relaxed.gpu and the like
void take_space(Modifiers& words, AccessForm* form);
void take_cache_hints(Modifiers& words);
uint32_t take_vector(Modifiers& words);  // 1, 2, 4 or 8

Status decode_atomic(Builder& b, const ptx::Instruction& i);    // atom and red
Status decode_st_async(Builder& b, const ptx::Instruction& i);  // st.async, st.bulk
Status decode_red_async(Builder& b, const ptx::Instruction& i);

}  // namespace tandem::vgpu::machine
