// The chips that a virtual GPU can be.
#pragma once

#include <string>

namespace tandem::tool {

std::string models_table();

}  // namespace tandem::tool
