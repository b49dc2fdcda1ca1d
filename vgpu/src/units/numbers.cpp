#include "vgpu/src/units/numbers.h"

#include "vgpu/src/units/formats.h"

namespace tandem::vgpu::units {

int bits_of(Format format) {
  switch (format) {
    case Format::f32:
    case Format::tf32: return 32;
    case Format::f16:
    case Format::bf16: return 16;
    case Format::e2m3:
    case Format::e3m2: return 6;
    case Format::e2m1: return 4;
    default: return 8;
  }
}

const char* name_of(Format format) {
  constexpr const char* names[] = {"f32",  "tf32", "f16",   "bf16",  "e4m3", "e5m2", "e2m3",
                                   "e3m2", "e2m1", "ue8m0", "ue4m3", "s8",   "u8"};
  return names[static_cast<int>(format)];
}

uint32_t encode(float x, Format format, Fit fit) {
  return with_format(format, [&](auto f) -> uint32_t {
    constexpr Format F = decltype(f)::format;
    if constexpr (F == Format::f32 || F == Format::s8 || F == Format::u8) {
      return bits(x);
    } else {
      return encode_one<F>(x, masks_of(fit));
    }
  });
}

float decode(uint32_t x, Format format) {
  return with_format(format, [&](auto f) { return decode_one<decltype(f)::format>(x); });
}

uint32_t encode_stochastic(float x, Format format, uint32_t random, int random_bits, Fit fit) {
  return with_format(format, [&](auto f) -> uint32_t {
    constexpr Format F = decltype(f)::format;
    const uint32_t negative = mask((bits(x) & kSign) != 0);
    const uint32_t magnitude = bits(x) & ~kSign;
    const Aligned a = align<F>(magnitude);
    const uint32_t discarded = (a.significand & ((1u << a.dropped) - 1)) << (32 - a.dropped);
    const uint32_t carry = discarded + (random << (32 - random_bits)) < discarded ? 1 : 0;
    return finish<F>((a.significand >> a.dropped) + carry, magnitude, negative, ~0u, masks_of(fit));
  });
}

}  // namespace tandem::vgpu::units
