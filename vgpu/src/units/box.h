// A bulk tensor copy: a box of a tensor in global memory and its image in a block's shared memory. PTX ISA,
// "cp.async.bulk.tensor" and "cp.reduce.async.bulk.tensor".
//
// The image is packed, dimension 0 fastest. A swizzle exchanges its 16-byte chunks by bits of the absolute shared
// address. window: the position of offset 0 of the block's shared window. Offsets are absolute (user data begins at
// 0x400).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "gpu/device.h"
#include "vgpu/src/units/ranges.h"

namespace tandem::vgpu::units {

enum class BoxMode : uint8_t {
  tile,   // coordinates of the first element, one per dimension
  rows4,  // gather4 and scatter4, rank 2: {column, row, row, row, row}
};

struct BoxCopy {
  gpu::TensorMapSpec map;  // decoded
  BoxMode mode = BoxMode::tile;
  int32_t coordinates[gpu::kMaxTensorRank] = {};
  uint32_t shared = 0;  // absolute offset of the image
};

enum class Reduction : uint8_t { add, min, max, inc, dec, bit_and, bit_or, bit_xor };

// Checks that the instruction can execute: rank and mode fit the map, and the image is aligned.
Status check(const BoxCopy& copy, int32_t rank, bool is_load);
Status check_reduction(Reduction reduction, gpu::TensorType type);

// Returns the bytes of the image, including elements beyond the tensor.
uint32_t image_bytes(const BoxCopy& copy);
// The bytes that a load completes on its mbarrier: the image without padding between packed numbers.
uint32_t transaction_bytes(const BoxCopy& copy);

void load_box(const BoxCopy& copy, std::byte* window);  // elements beyond the tensor become the map's fill
// Chunks of 16 bytes beyond the tensor are not written. A chunk that begins inside is written whole.
void store_box(const BoxCopy& copy, const std::byte* window);
void reduce_box(const BoxCopy& copy, Reduction reduction, const std::byte* window);  // atomic, element by element

// Lists the bytes that the copy accesses: global bytes inside the tensor, and the image. A load writes all of the
// image, and a store reads some of its chunks. Either list may be null.
void list_ranges(const BoxCopy& copy, bool is_load, std::vector<Range>* global, std::vector<Range>* shared);

// Computes to[i] = to[i] (reduction) from[i], each atomic. cp.reduce.async.bulk uses it too. bytes: the size of all
// elements.
void reduce_elements(Reduction reduction, gpu::TensorType type, void* to, const void* from, size_t bytes);

// Maps the image's absolute offset to the swizzled offset.
uint32_t swizzled(gpu::Swizzle swizzle, uint32_t address);

}  // namespace tandem::vgpu::units
