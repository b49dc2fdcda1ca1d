// Packs two floats as elements of the kernel's type into one register.
#pragma once
#include "ptx/base.cuh"

template <bool f16>
TANDEM_DEVICE u32 pack_as(float low, float high) {
  u32 both;
  if constexpr (f16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}
template <auto T>
TANDEM_DEVICE u32 pack(float low, float high) {
  return pack_as<T.options.f16>(low, high);
}
