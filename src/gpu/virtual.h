// Virtual GPUs, devices "vgpu" and "vgpu:MODEL": the CPU executes the kernels. The devices are in a separate library,
// libtandem_vgpu.so, because it is larger than the rest of Tandem and few programs need it. The first open loads the
// library.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "gpu/device.h"

namespace tandem::gpu {

// Returns true if the name is a virtual GPU's. This function does not load the library, although only the library knows
// the models.
bool is_virtual(std::string_view name);

// Opens a virtual GPU. TANDEM_VGPU_LIBRARY names the library. Without the variable, the folder of this code and then
// the system's loader are searched. The library is never unloaded.
Status open_virtual(std::string_view name, std::unique_ptr<Device>* device);

// Loads the library and returns its path.
Status find_virtual(std::string* path);

// Replaces the library in open_virtual() by this function. Programs that link the virtual GPU (the tandem command) use
// it. main() calls it explicitly, so that the behaviour does not depend on link order.
using OpenVirtual = Status (*)(std::string_view name, std::unique_ptr<Device>* device);
void use_linked_virtual(OpenVirtual open);

}  // namespace tandem::gpu
