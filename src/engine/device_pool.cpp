#include "engine/device_pool.h"

#include <stdexcept>

#include "base/text.h"

namespace tandem {
namespace {

// Sizes are rounded up by at most an eighth, so that calls of similar sizes share blocks.
size_t rounded(size_t bytes) {
  size_t step = 512;
  while (bytes > 8 * step) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace

DevicePool::Block DevicePool::take(size_t bytes, gpu::Stream stream) {
  Block block{nullptr, rounded(bytes), stream};
  {
    const std::lock_guard lock(mutex_);
    const auto found = free_.find({stream, block.bytes});
    if (found != free_.end()) {
      block.address = found->second;
      free_.erase(found);
      return block;
    }
  }
  if (device_.allocate(block.bytes, &block.address).ok()) return block;
  free_all();
  const Status status = device_.allocate(block.bytes, &block.address);
  if (!status.ok()) throw std::runtime_error(status.message);
  return block;
}

void DevicePool::release(const Block& block) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    free_.insert({{block.stream, block.bytes}, block.address});
  } catch (const std::bad_alloc&) {
    (void)device_.free(block.address);
  }
}

void DevicePool::free_all() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, address] : free_) (void)device_.free(address);
  free_.clear();
}

}  // namespace tandem
