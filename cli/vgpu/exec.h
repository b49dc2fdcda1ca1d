// tandem vgpu exec: a program that was made for a GPU, on a virtual one.
#pragma once

#include <string>
#include <vector>

#include "cli/command_line.h"

namespace tandem::tool {

// A command line without the "--" between exec's options and the program, which CLI11 would hand to somebody else.
std::vector<std::string> without_mark(std::vector<std::string> words);

void add_exec(Command vgpu);

}  // namespace tandem::tool
