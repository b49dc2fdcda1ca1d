// What .ftz flushes of a result: what remains below the smallest normal number when rounded to 24 bits whatever its
// exponent, not to the fewer of a subnormal number. Of two doubles that narrow to the smallest normal number, one can
// be.
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
