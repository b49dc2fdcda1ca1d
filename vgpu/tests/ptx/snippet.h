// Short texts of PTX, and what is in them.
#pragma once

#include <string>
#include <string_view>

#include "vgpu/src/ptx/parser.h"

namespace tandem::test {

std::string with_preamble(std::string_view text);  // .version, .target, .address_size in a line before it
std::string in_kernel(std::string_view body);      // ".entry f()", and the body from line 2 on
// Expect that it parses.
vgpu::ptx::Module parsed(std::string_view text);
vgpu::ptx::Function parsed_body(std::string_view body);

// An operand as PTX writes it, with the names of registers, variables and labels, and constants in decimal; labels with
// their targets: "L@3".
std::string text_of(const vgpu::ptx::Function& function, const vgpu::ptx::Operand& operand);
std::string text_of(const vgpu::ptx::Function& function, const vgpu::ptx::Instruction& instruction);
// The last instruction of a kernel with this body.
std::string last_of(std::string_view body);

std::string sample_ptx();

}  // namespace tandem::test
