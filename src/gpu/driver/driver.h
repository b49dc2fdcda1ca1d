// GPUs of NVIDIA's driver: devices "cuda" (the first GPU) and "cuda:N".
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "gpu/device.h"

namespace tandem::gpu::cuda {

// Returns true if a device with this name belongs to this file.
bool is_cuda(std::string_view name);

// Retains the device's primary context until the device and its modules are destroyed. Other libraries of this process
// that use the GPU share memory, streams and events. library: a path that replaces the installed driver.
Status open(std::string_view name, std::unique_ptr<Device>* device, const std::string& library = "libcuda.so.1");

}  // namespace tandem::gpu::cuda
