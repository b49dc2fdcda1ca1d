// Operands of matrix products in shared memory: the 64-bit descriptors of wgmma and tcgen05 and the layouts that they
// describe. PTX ISA, "Matrix Descriptor Format", "Shared Memory Matrix Layout", "Canonical Layouts".
//
// mn counts rows of A or columns of B, k the dimension that the product sums over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "vgpu/src/units/numbers.h"
#include "vgpu/src/units/ranges.h"

namespace tandem::vgpu::units {

enum class MatrixSwizzle : uint8_t { none, b32, b64, b128, b128_atom_32b };

struct MatrixDescriptor {
  uint32_t start = 0;    // absolute offset in the block's shared window
  uint32_t leading = 0;  // byte offsets, as the canonical layouts use them
  uint32_t stride = 0;
  uint32_t base_offset = 0;  // phase of a swizzle pattern, 0 to 7
  MatrixSwizzle swizzle = MatrixSwizzle::none;
};

// Decodes a descriptor. Refuses fields that the instruction does not have.
Status decode_wgmma(uint64_t bits, MatrixDescriptor* descriptor);
Status decode_tcgen05(uint64_t bits, MatrixDescriptor* descriptor);

// The layout of elements in chunks. Elements of 4 and 6 bits are padded (16 of them in 8 or 12 of 16 bytes:
// kind::f8f6f4 and mxf8f6f4) or packed (mxf4).
struct MatrixTile {
  MatrixDescriptor descriptor;
  Format format = Format::bf16;
  bool packed4 = false;   // e2m1: two per byte (kinds mxf4, mxf4nvf4)
  bool mn_major = false;  // "transposed"
  int32_t mn = 0, k = 0;
};

// Checks that the layout exists for the format, the offsets are possible and the tile ends inside the window of
// window_bytes bytes.
Status check(const MatrixTile& tile, uint32_t window_bytes);

// Returns the absolute, swizzled offset of the byte that holds the lowest bit of an element. *bit: the index of that
// bit.
uint32_t element_address(const MatrixTile& tile, int32_t mn, int32_t k, int32_t* bit = nullptr);

// Copies the whole tile as float32: to[mn * pitch + k], or to[k * pitch + mn] with k_rows. Integers become their
// values.
void gather(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, float* to);
void gather_s32(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, int32_t* to);

// Lists the bytes of shared memory that the tile occupies, sorted and merged.
void list_ranges(const MatrixTile& tile, std::vector<Range>* shared);

}  // namespace tandem::vgpu::units
