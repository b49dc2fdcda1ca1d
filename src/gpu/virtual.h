// Virtual GPUs, devices "vgpu" and "vgpu:MODEL": the CPU executes the kernels. They are a library of their own,
// libtandem_vgpu.so, which is loaded when the first of them is opened: it is larger than all the rest of Tandem, and
// most programs never ask for one.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "gpu/device.h"

namespace tandem::gpu {

// Whether a device's name is a virtual GPU's; known without the library, which alone knows the models.
bool is_virtual(std::string_view name);

// Opens it by the library that TANDEM_VGPU_LIBRARY names; without, by the one in the folder of the library (or program)
// that this code is in; else by the one that the system's loader finds. It is never unloaded.
Status open_virtual(std::string_view name, std::unique_ptr<Device>* device);

// Where that library was found; loads it.
Status find_virtual(std::string* path);

// Lets open_virtual() call this function and load nothing. For programs that have the virtual GPU linked in because
// they use more of it than a Device shows (the tandem command), so that they do not hold it twice. Such a program says
// so itself, in main(): a registration that happened by itself while the program is loaded, or by which object files
// the linker took, would make the same call mean one thing in one program and another in the next.
using OpenVirtual = Status (*)(std::string_view name, std::unique_ptr<Device>* device);
void use_linked_virtual(OpenVirtual open);

}  // namespace tandem::gpu
