// Parses PTX text to a Module. Follows the PTX ISA, "Syntax" and "Directives".
#pragma once

#include <string_view>

#include "base/status.h"
#include "vgpu/src/ptx/module.h"

namespace tandem::vgpu::ptx {

// Refuses invalid and unsupported PTX with the line and the text. The parser never skips a construct with a meaning.
// Time and memory are proportional to the text; nesting is bounded.
Status parse(std::string_view text, Module* module);

}  // namespace tandem::vgpu::ptx
