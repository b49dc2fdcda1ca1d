// GPUs reached through NVIDIA's driver: devices "cuda" (the first one) and "cuda:N".
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "gpu/device.h"

namespace tandem::gpu::cuda {

// Whether a device's name is ours to judge.
bool is_cuda(std::string_view name);

// The device's primary context is retained until the device and its modules are gone: memory, streams and events are
// shared with whoever else uses the GPU in this process. library: what to load in place of the installed driver.
Status open(std::string_view name, std::unique_ptr<Device>* device, const std::string& library = "libcuda.so.1");

}  // namespace tandem::gpu::cuda
