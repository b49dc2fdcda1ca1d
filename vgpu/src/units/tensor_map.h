// Tensor maps: what a bulk tensor copy knows of its tensor. Ours are an encoding of our own in the driver's 128 bytes,
// told from foreign bytes by a mark. PTX ISA, "Tensors".
#pragma once

#include <cstdint>

#include "base/status.h"
#include "gpu/device.h"

namespace tandem::vgpu::units {

// Refuses what cuTensorMapEncodeTiled refuses, with the reason.
Status encode(const gpu::TensorMapSpec& spec, gpu::TensorMap* map);

// Refuses bytes that encode() did not make.
Status decode(const void* map, gpu::TensorMapSpec* spec);

// Of an element: in global memory, and of its share of a row in shared memory. More there: every 16 bytes end in
// padding.
int32_t global_bits(gpu::TensorType type);
int32_t shared_bits(gpu::TensorType type);
int32_t bytes_of(gpu::TensorType type);  // of those that are no packed ones
const char* name_of(gpu::TensorType type);

// tensormap.replace: one field of a map in memory. The result is not checked before it is used (decode does): a kernel
// replaces several fields one after the other. index: which dimension, of fields that have one.
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
