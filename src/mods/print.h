// A graph as CUDA C++: one line for each operation, a call of kernels/tile/mod_functions.cuh.
#pragma once

#include <span>
#include <string>

#include "mods/parser.h"

namespace tandem::mods {

// The body of a function of `score`, `at` (a ModPlace) and `names` (a ModNames), which ends by returning result.
std::string print(const Mod& mod, NodeId result);

}  // namespace tandem::mods
