// Links PTX texts of relocatable device code (nvcc -rdc=true) into one text, as the driver does for their objects.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace tandem::vgpu::ptx {

// Definitions replace the .extern declarations of other texts. The first .weak or .common definition of a name is kept.
// Names without linkage are renamed if another text has them too. Refuses names that two texts define.
Status link(const std::vector<std::string>& texts, std::string* linked);

}  // namespace tandem::vgpu::ptx
