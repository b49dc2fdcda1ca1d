// The virtual GPU's memory: allocations of host memory, and a flag whether a program has written to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "vgpu/src/machine/machine.h"

namespace tandem::vgpu {

// Several threads may use this object at once. The destructor frees all remaining allocations.
class Allocator {
 public:
  explicit Allocator(int64_t capacity) : capacity_(capacity) {}
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;
  ~Allocator();

  Status allocate(size_t bytes, void** address);
  // Registers memory of the program. free() forgets it without freeing it. The memory counts as written.
  void adopt(void* address, size_t bytes);
  Status free(void* address);
  // Refuses a range that begins in an allocation and ends after it. Memory outside all allocations is not checked.
  Status check(const char* what, const void* address, size_t bytes) const;
  void written(const void* address, size_t bytes);

  // Returns all allocations, for a launch that does not name its buffers. Afterwards these allocations count as
  // written.
  std::vector<Buffer> buffers();

 private:
  struct Allocation {
    int number = 0;  // counted from 0, for names
    size_t bytes = 0;
    bool written = false;
    bool is_own = true;  // false: adopted
  };
  using Allocations = std::map<uintptr_t, Allocation>;
  Allocations::const_iterator around(const void* address) const;  // or end()

  const int64_t capacity_;
  mutable std::mutex mutex_;  // guards the members below
  Allocations allocations_;
  int64_t in_use_ = 0;
  int made_ = 0;
};

}  // namespace tandem::vgpu
