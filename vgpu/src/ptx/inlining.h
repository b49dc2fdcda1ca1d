// Call sites of inlined code. Compilers with line information name them after .loc.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "vgpu/src/ptx/module.h"

namespace tandem::vgpu::ptx {

// Fills Module::inlinings and Location::inlining of all instructions of a module that was parsed from text. This
// function is parse()'s last step.
void read_inlining(std::string_view text, Module* module);

// Returns "kernels/sm90/forward.cuh:420", or "PTX line 57" for code without .loc.
std::string place_text(const Module& module, int32_t file, int32_t line, int32_t ptx_line);

// Returns the same, and the calls that led there, from inner to outer: "kernels/ptx/mbarrier.cuh:44 in mbarrier_wait,
// from kernels/sm90/forward.cuh:230 in compute".
std::string place_text(const Module& module, const Location& location);

// Returns the functions that an instruction is inlined from, the outermost first, without arguments: "compute",
// "Softmax::step".
std::vector<std::string> functions_around(const Module& module, const Location& location);

}  // namespace tandem::vgpu::ptx
