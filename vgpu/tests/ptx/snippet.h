// Short texts of PTX, and queries of their contents.
#pragma once

#include <string>
#include <string_view>

#include "vgpu/src/ptx/parser.h"

namespace tandem::test {

std::string with_preamble(std::string_view text);  // .version, .target, .address_size in a line before it
std::string in_kernel(std::string_view body);      // ".entry f()", and the body from line 2 on
// Parses a text, which must be valid.
vgpu::ptx::Module parsed(std::string_view text);
vgpu::ptx::Function parsed_body(std::string_view body);

// Returns an operand as PTX writes it, with the names of registers, variables and labels, and constants in decimal.
// Labels have their targets: "L@3".
std::string text_of(const vgpu::ptx::Function& function, const vgpu::ptx::Operand& operand);
std::string text_of(const vgpu::ptx::Function& function, const vgpu::ptx::Instruction& instruction);
// The last instruction of a kernel with this body.
std::string last_of(std::string_view body);

std::string sample_ptx();

}  // namespace tandem::test
