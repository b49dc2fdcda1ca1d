#include "vgpu/src/allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/text.h"

namespace tandem::vgpu {
namespace {

constexpr size_t kAlignment = 256;  // alignment of the CUDA driver's memory

uintptr_t place_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

Allocator::~Allocator() {
  for (const auto& [address, allocation] : allocations_)
    if (allocation.is_own) std::free(reinterpret_cast<void*>(address));
}

Status Allocator::allocate(size_t bytes, void** address) {
  const std::lock_guard lock(mutex_);
  const auto left = static_cast<size_t>(capacity_ - in_use_);
  const size_t rounded = (bytes + kAlignment - 1) & ~(kAlignment - 1);
  *address = bytes > left ? nullptr : std::aligned_alloc(kAlignment, std::max(rounded, kAlignment));
  if (*address == nullptr) {
    return {TANDEM_DEVICE_ERROR,
            str_cat("bytes (", bytes, ") must be at most the ", left,
                    " bytes left of the virtual GPU's memory, and fit into the host's memory: free some memory")};
  }
  std::memset(*address, 0xff, rounded);  // NaN in every format: unwritten memory shows in results
  allocations_[place_of(*address)] = {made_++, bytes, false, true};
  in_use_ += static_cast<int64_t>(bytes);
  return {};
}

void Allocator::adopt(void* address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  allocations_[place_of(address)] = {made_++, bytes, true, false};
}

Status Allocator::free(void* address) {
  if (address == nullptr) return {};
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(place_of(address));
  if (found == allocations_.end()) {
    return Status::invalid(str_cat("address (", place_of(address),
                                   ") must be an allocation that has not been freed: correct the address"));
  }
  const Allocation freed = found->second;
  allocations_.erase(found);
  if (!freed.is_own) return {};
  in_use_ -= static_cast<int64_t>(freed.bytes);
  std::free(address);
  return {};
}

Allocator::Allocations::const_iterator Allocator::around(const void* address) const {
  const uintptr_t at = place_of(address);
  auto next = allocations_.upper_bound(at);
  if (next == allocations_.begin()) return allocations_.end();
  --next;
  return at - next->first < next->second.bytes ? next : allocations_.end();
}

Status Allocator::check(const char* what, const void* address, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto found = around(address);
  if (found == allocations_.end()) return {};
  const size_t left = found->second.bytes - (place_of(address) - found->first);
  if (bytes <= left) return {};
  return Status::invalid(str_cat(what, " (", bytes, " bytes) must end within its allocation, which has ", left,
                                 " bytes from there on: allocate more or copy less"));
}

void Allocator::written(const void* address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = around(address);
  if (bytes > 0 && found != allocations_.end()) allocations_[found->first].written = true;
}

std::vector<Buffer> Allocator::buffers() {
  const std::lock_guard lock(mutex_);
  std::vector<Buffer> buffers;
  for (auto& [address, allocation] : allocations_) {
    buffers.push_back({.name = str_cat("allocation ", allocation.number),
                       .address = reinterpret_cast<void*>(address),
                       .bytes = allocation.bytes,
                       .writable = true,
                       .initialised = allocation.written});
    allocation.written = true;
  }
  return buffers;
}

}  // namespace tandem::vgpu
