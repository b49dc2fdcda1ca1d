// The results that .ftz flushes: values that are below the smallest normal number after rounding to 24 bits with an
// unlimited exponent. A subnormal number has fewer bits. Two doubles may narrow to the smallest normal number although
// only one of them is flushed.
#pragma once

#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {

template <Rounding R>
constexpr bool is_tiny(double x) {
  const bool outward = R == (x < 0 ? Rounding::rm : Rounding::rp);
  const double magnitude = x < 0 ? -x : x;
  if (outward) return magnitude <= 0x1.fffffep-127;
  return magnitude < (R == Rounding::rn ? 0x1.ffffffp-127 : 0x1p-126);
}

}  // namespace tandem::vgpu::units
