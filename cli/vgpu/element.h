// Reads and writes single elements of any type as numbers.
#pragma once

#include <cstddef>

#include "cli/io/tensor.h"

namespace tandem::tool {

double get_element(io::Element type, const std::byte* from);
// Rounds the value to the type; integers wrap.
void set_element(io::Element type, std::byte* to, double value);

}  // namespace tandem::tool
