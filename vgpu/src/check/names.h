// Names of memory and threads in findings.
#pragma once

#include <string>
#include <string_view>

#include "vgpu/src/check/memory.h"
#include "vgpu/src/machine/machine.h"
#include "vgpu/src/observer/observer.h"

namespace tandem::vgpu::check {

// "k + 0x1200 (shared 0x1600)": an offset in the shared window.
std::string shared_name(const Program& program, uint64_t offset);
// "q + 0x40", or, outside all buffers, "0x7f... (64 bytes beyond q)".
std::string global_name(const GlobalMemory& memory, uint64_t address);
// "tensor memory, lane 32, column 128".
std::string tensor_name(uint64_t lane, uint64_t column);

// "wgmma", "bulk load".
std::string_view name_of(AsyncKind kind);

// "warp 3 lane 0", "warps 4 to 7", with the block if it differs from `from`.
std::string name_of(const Accessor& party, int32_t from);

}  // namespace tandem::vgpu::check
