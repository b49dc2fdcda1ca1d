// Dense products: the arithmetic of all matrix instructions. Sums run in order of k in float32, because hardware leaves
// the order open. Results have the same bits on every CPU, if no product of two elements over- or underflows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {

struct Products {
  const char* target;
  // d[m][n] (+)= sum of a[m][k] * b[k][n] with k <= 64. NaN becomes 0x7fffffff. Rows of a, b and d have pitches of
  // a_pitch, b_pitch and d_pitch elements.
  void (*f32)(int m, int n, int k, const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, float* d,
              int64_t d_pitch, bool accumulate);
  // saturate: the final sum is clamped to int32, otherwise it wraps. Elements have 8 bits.
  void (*s32)(int m, int n, int k, const int32_t* a, int64_t a_pitch, const int32_t* b, int64_t b_pitch, int32_t* d,
              int64_t d_pitch, bool accumulate, bool saturate);
  // Unpacks 16-byte chunks at these offsets of the window into rows of `to` with this pitch, or into columns (across).
  // A chunk has 4, 8 or 16 elements. 16 elements of 4 and 6 bits are in its first 8 or 12 bytes.
  void (*unpack_f32)(Format format, const std::byte* window, const uint32_t* offsets, int count, bool across,
                     int64_t pitch, float* to);
  void (*unpack_s32)(Format format, const std::byte* window, const uint32_t* offsets, int count, bool across,
                     int64_t pitch, int32_t* to);
};

const Products& products();
std::span<const Products* const> all_products();

}  // namespace tandem::vgpu::units
