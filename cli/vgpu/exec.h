// tandem vgpu exec: runs a CUDA program on a virtual GPU.
#pragma once

#include <string>
#include <vector>

#include "cli/command_line.h"

namespace tandem::tool {

inline constexpr char kAboutMaxInstructions[] =
    "Warp instructions that a block may execute, a quarter of them without a store or barrier; 0: no limit";

// Removes the "--" between exec's options and the program, because CLI11 treats it as the end of all commands.
std::vector<std::string> without_mark(std::vector<std::string> words);

void add_exec(Command vgpu);

}  // namespace tandem::tool
