// Tensor maps: descriptions of the tensor of a bulk tensor copy. The virtual GPU has a private encoding in the driver's
// 128 bytes, with a mark that distinguishes it from foreign bytes. PTX ISA, "Tensors".
#pragma once

#include <cstdint>

#include "base/status.h"
#include "gpu/device.h"

namespace tandem::vgpu::units {

// Refuses the same maps as cuTensorMapEncodeTiled, with the reason.
Status encode(const gpu::TensorMapSpec& spec, gpu::TensorMap* map);

// Refuses bytes that encode() has not written.
Status decode(const void* map, gpu::TensorMapSpec* spec);

// Bits of an element in global memory, and its share of a row in shared memory. The latter are more, because every 16
// bytes end in padding.
int32_t global_bits(gpu::TensorType type);
int32_t shared_bits(gpu::TensorType type);
int32_t bytes_of(gpu::TensorType type);  // only types that are not packed
const char* name_of(gpu::TensorType type);

// tensormap.replace: sets one field of a map in memory. decode() checks the result when the map is used, because a
// kernel replaces several fields one after the other. index: the dimension, for fields that have one.
enum class MapField : uint8_t {
  global_address,
  rank,
  box_dim,
  global_dim,
  global_stride,
  element_stride,
  elemtype,
  interleave_layout,
  swizzle_mode,
  fill_mode,
  swizzle_atomicity,
};
Status replace(void* map, MapField field, int32_t index, uint64_t value);

}  // namespace tandem::vgpu::units
