// What programs load: PTX text, or a fat binary that has some.
#pragma once

#include <string>

#include "base/status.h"

namespace tandem::vgpu::driver {

// The PTX of an image for a GPU of that compute capability (10 * major + minor). Of several the latest that it can
// take.
Status ptx_of(const void* image, int capability, std::string* text);

}  // namespace tandem::vgpu::driver
