// Memory of a GPU that later calls reuse, because freeing memory waits for the GPU.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "gpu/device.h"

namespace tandem {

// A released block serves only its own stream, so that the stream's order separates two uses. Several threads may use a
// pool at once.
class DevicePool {
 public:
  struct Block {
    void* address = nullptr;
    size_t bytes = 0;
    gpu::Stream stream = nullptr;
  };

  explicit DevicePool(gpu::Device& device) : device_(device) {}
  DevicePool(const DevicePool&) = delete;
  ~DevicePool() { free_all(); }

  // Returns a block of at least `bytes` bytes. Throws std::runtime_error with the message of the device.
  Block take(size_t bytes, gpu::Stream stream);
  void release(const Block& block) noexcept;

  gpu::Device& device() const { return device_; }

 private:
  void free_all() noexcept;

  gpu::Device& device_;
  std::mutex mutex_;
  std::multimap<std::pair<gpu::Stream, size_t>, void*> free_;
};

}  // namespace tandem
