// Dense products, the arithmetic inside all matrix instructions. Sums are made in order of k, one after the other, in
// float32: hardware leaves the order open. The same bits on every CPU, as long as no product of two elements over- or
// underflows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {

struct Products {
  const char* target;
  // k <= 64. NaN becomes 0x7fffffff. d[m][n] (+)= sum of a[m][k] * b[k][n]; rows of a, b and d are a_pitch, b_pitch and
  // d_pitch elements apart.
  void (*f32)(int m, int n, int k, const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, float* d,
              int64_t d_pitch, bool accumulate);
  // saturate: the final sum goes to the nearest end of int32, otherwise it wraps. Elements of 8 bits.
  void (*s32)(int m, int n, int k, const int32_t* a, int64_t a_pitch, const int32_t* b, int64_t b_pitch, int32_t* d,
              int64_t d_pitch, bool accumulate, bool saturate);
  // Chunks of 16 bytes of shared memory, at these offsets of the window, one element after the other (4, 8 or 16;
  // elements of 4 and 6 bits: 16, in the first 8 or 12 bytes), become rows of `to`, pitch elements apart; or its
  // columns, with across.
  void (*unpack_f32)(Format format, const std::byte* window, const uint32_t* offsets, int count, bool across,
                     int64_t pitch, float* to);
  void (*unpack_s32)(Format format, const std::byte* window, const uint32_t* offsets, int count, bool across,
                     int64_t pitch, int32_t* to);
};

const Products& products();
std::span<const Products* const> all_products();

}  // namespace tandem::vgpu::units
