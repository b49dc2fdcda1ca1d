// The text of kernels, embedded in the library by cmake/Embed.cmake.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/embedded.h"

namespace tandem::jit {

using tandem::Text;  // its name is what an #include writes
using Sources = std::span<const Text>;

// Everything in kernels/, ordered by name.
Sources kernels();

// One file of it.
std::optional<std::string_view> source(std::string_view name);

// Those of sources that text includes by #include "name", and what these include, each once. What is not among the
// sources is left for the compiler to complain about.
std::vector<Text> included_by(std::string_view text, Sources sources);

}  // namespace tandem::jit
