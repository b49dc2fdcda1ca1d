// Tensor maps that a thread has encoded recently. The driver needs 0.1 us for each map, and most callers use the same
// tensors repeatedly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/device.h"

namespace tandem::gpu::cuda {

class MapCache {
 public:
  struct MapEntry {
    uint64_t device = 0;  // counted from 1 in this process; 0: empty
    TensorMapSpec spec;
    TensorMap map;

    bool holds(uint64_t its_device, const TensorMapSpec& its_spec) const {
      return device == its_device && spec == its_spec;
    }
  };

  // The only entry that may hold the map of this spec.
  MapEntry& place(uint64_t device, const TensorMapSpec& spec) {
    uint64_t hash = device;
    const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15u; };
    mix(reinterpret_cast<uintptr_t>(spec.address));
    mix(spec.dims[0] ^ spec.box[2] << 16);
    mix(spec.dims[2] ^ spec.dims[1] << 32);
    mix(spec.byte_strides[2] ^ spec.box[1] << 20);
    return entries_[hash >> (64 - kBits)];
  }

 private:
  static constexpr int kBits = 6;

  MapEntry entries_[size_t{1} << kBits] = {};
};

}  // namespace tandem::gpu::cuda
