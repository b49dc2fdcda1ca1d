// Images that programs load: PTX text, or a fat binary that contains PTX.
#pragma once

#include <string>

#include "base/status.h"

namespace tandem::vgpu::driver {

// Extracts the PTX for a GPU of that compute capability (10 * major + minor). If there are several, the latest suitable
// one is used.
Status ptx_of(const void* image, int capability, std::string* text);

}  // namespace tandem::vgpu::driver
