// The text of the kernels, which cmake/Embed.cmake embeds in the library.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/embedded.h"

namespace tandem::jit {

using tandem::Text;  // Text::name is the path in an #include
using Sources = std::span<const Text>;

// Returns all files of kernels/, ordered by name.
Sources kernels();

// Returns one file of kernels().
std::optional<std::string_view> source(std::string_view name);

// The sources that text includes by #include "name", directly and indirectly, each once. Unknown names are skipped; the
// compiler reports them.
std::vector<Text> included_by(std::string_view text, Sources sources);

}  // namespace tandem::jit
