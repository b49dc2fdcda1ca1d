// The text of the kernels, which cmake/Embed.cmake embeds in the library.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/embedded.h"

namespace tandem::jit {

using tandem::Text;  // its name is the path in an #include
using Sources = std::span<const Text>;

// All files of kernels/, ordered by name.
Sources kernels();

// One file of kernels().
std::optional<std::string_view> source(std::string_view name);

// The sources that text includes by #include "name", directly and indirectly, each once. Unknown names are skipped, so
// that the compiler reports them.
std::vector<Text> included_by(std::string_view text, Sources sources);

}  // namespace tandem::jit
