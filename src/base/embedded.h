// Files whose text cmake/Embed.cmake compiles into a library.
#pragma once

#include <span>
#include <string_view>

namespace tandem {

// name: the path inside the embedded folder, such as "device/exp2.cuh".
struct Text {
  std::string_view name, text;
};

}  // namespace tandem
