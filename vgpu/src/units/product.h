// Dense products: the arithmetic of all matrix instructions. Sums run in order of k in float32, because hardware leaves
// the order open. Results have the same bits on every CPU, if no product of two elements over- or underflows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {

// d[m][n] (+)= sum of a[m][k] * b[k][n] with k <= 64. A pitch is the distance of two rows, in elements.
template <class T>
struct DenseProduct {
  int m = 0, n = 0, k = 0;
  const T* a = nullptr;
  int64_t a_pitch = 0;
  const T* b = nullptr;
  int64_t b_pitch = 0;
  T* d = nullptr;
  int64_t d_pitch = 0;
  bool accumulate = false;
};

// 16-byte chunks at these offsets of a window. A chunk has 4, 8 or 16 elements. 16 elements of 4 and 6 bits lie in its
// first 8 or 12 bytes.
struct ChunkList {
  Format format = Format::f32;
  const std::byte* window = nullptr;
  const uint32_t* offsets = nullptr;
  int count = 0;
};

struct Products {
  const char* target;
  void (*f32)(const DenseProduct<float>& product);  // NaN becomes 0x7fffffff
  // saturate: the final sum goes to the nearest end of int32, otherwise it wraps. Elements have 8 bits.
  void (*s32)(const DenseProduct<int32_t>& product, bool saturate);
  // Unpacks chunks into rows of `to` with this pitch, or into its columns (across).
  void (*unpack_f32)(const ChunkList& chunks, bool across, int64_t pitch, float* to);
  void (*unpack_s32)(const ChunkList& chunks, bool across, int64_t pitch, int32_t* to);
};

const Products& products();
std::span<const Products* const> all_products();

}  // namespace tandem::vgpu::units
