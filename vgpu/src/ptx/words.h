// The words that PTX defines: instructions and special registers.
#pragma once

#include <string_view>

namespace tandem::vgpu::ptx {

bool is_opcode(std::string_view word);  // the first part of a name: "mov", "cp", "tcgen05"
// Returns true for "%laneid"; components ("%tid.x") are passed without their suffix.
bool is_special_register(std::string_view word);
bool has_components(std::string_view special_register);

}  // namespace tandem::vgpu::ptx
