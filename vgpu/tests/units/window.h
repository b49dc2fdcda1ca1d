// A block's shared memory for tests, and plain models of its contents: element by element, from the formulas of the PTX
// ISA's canonical layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "support/random.h"
#include "vgpu/src/units/matrix.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {

inline constexpr uint32_t kWindowBytes = 232448 + 1024;

// A canonical layout, in elements of T per 16 bytes; bits of the absolute address are exchanged afterwards.
//   K-major, none               ((8,m),(T,2k))  : ((1T,SBO),(1,LBO))
//   K-major, swizzled           ((8,m),(T,2k))  : ((wT,SBO),(1,T)), w = 2, 4, 8
//   MN-major, none              ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO))
//   MN-major, swizzled          ((T,w,m),(8,k)) : ((1,T,LBO),(wT,SBO))
//   MN-major, atoms of 32 bytes ((T,8,m),(4,k)) : ((1,T,LBO),(8T,SBO))
struct Canonical {
  MatrixSwizzle swizzle = MatrixSwizzle::none;
  bool mn_major = false;
  uint32_t start = 0, leading = 0, stride = 0;

  uint32_t width() const {
    switch (swizzle) {
      case MatrixSwizzle::none: return 1;
      case MatrixSwizzle::b32: return 2;
      case MatrixSwizzle::b64: return 4;
      default: return 8;
    }
  }
  // Returns the 16 bytes that hold element (mn, k). T: elements per 16 bytes.
  uint32_t chunk(uint32_t mn, uint32_t k, uint32_t T) const {
    const uint32_t w = width();
    uint32_t offset = 0;
    if (!mn_major) {
      offset = mn % 8 * (w * 16) + mn / 8 * stride + (swizzle == MatrixSwizzle::none ? k / T * leading : k / T * 16);
    } else if (swizzle == MatrixSwizzle::none) {
      offset = mn / T * stride + k % 8 * 16 + k / 8 * leading;
    } else {
      const uint32_t group = swizzle == MatrixSwizzle::b128_atom_32b ? 4 : 8;
      offset = mn / T % w * 16 + mn / (T * w) * leading + k % group * (w * 16) + k / group * stride;
    }
    return exchanged(start + offset);
  }
  uint32_t exchanged(uint32_t a) const {
    switch (swizzle) {
      case MatrixSwizzle::none: return a;
      case MatrixSwizzle::b32: return a ^ (a >> 7 & 1) << 4;
      case MatrixSwizzle::b64: return a ^ (a >> 7 & 3) << 4;
      case MatrixSwizzle::b128: return a ^ (a >> 7 & 7) << 4;
      default: return a ^ (a >> 7 & 3) << 5;
    }
  }
  uint64_t fields() const {
    return (start >> 4 & 0x3fff) | static_cast<uint64_t>(leading >> 4 & 0x3fff) << 16 |
           static_cast<uint64_t>(stride >> 4 & 0x3fff) << 32;
  }
  uint64_t wgmma() const {
    constexpr uint64_t codes[] = {0, 3, 2, 1};
    return fields() | codes[static_cast<int>(swizzle)] << 62;
  }
  uint64_t tcgen05() const {
    constexpr uint64_t codes[] = {0, 6, 4, 2, 1};
    return fields() | uint64_t{1} << 46 | codes[static_cast<int>(swizzle)] << 61;
  }
};

// Returns a random place, large enough for mn x (32 bytes of k), with separate groups of rows.
inline Canonical random_canonical(test::Random& random, MatrixSwizzle swizzle, bool mn_major, uint32_t chunks_along,
                                  uint32_t across) {
  Canonical c;
  c.swizzle = swizzle;
  c.mn_major = mn_major;
  c.start = 0x400 + 1024 * static_cast<uint32_t>(random.between(0, 3));
  const uint32_t w = c.width(), group = swizzle == MatrixSwizzle::b128_atom_32b && mn_major ? 4 : 8;
  const uint32_t groups = (across + group - 1) / group, blocks = (chunks_along + w - 1) / w;
  const uint32_t core = group * w * 16, gap = 1024 * static_cast<uint32_t>(random.between(0, 1));
  // Selects the outer one of the two directions.
  const bool groups_inside = random.chance(0.5);
  const uint32_t between_groups = (groups_inside ? core : core * blocks) + gap;
  const uint32_t between_blocks = groups_inside ? between_groups * groups : core;
  if (swizzle == MatrixSwizzle::none) {
    c.leading = mn_major ? between_groups : between_blocks;
    c.stride = mn_major ? between_blocks : between_groups;
  } else {
    c.leading = mn_major ? between_blocks : 16;
    c.stride = between_groups;
  }
  return c;
}

// Bits [bit, bit + count) of the 16 bytes at `chunk`.
inline uint32_t read_bits(const std::vector<std::byte>& window, uint32_t chunk, uint32_t bit, uint32_t count) {
  uint32_t x = 0;
  for (uint32_t i = 0; i < count; ++i)
    x |= (static_cast<uint32_t>(window[chunk + (bit + i) / 8]) >> ((bit + i) % 8) & 1) << i;
  return x;
}
inline void write_bits(std::vector<std::byte>* window, uint32_t chunk, uint32_t bit, uint32_t count, uint32_t x) {
  for (uint32_t i = 0; i < count; ++i) {
    std::byte& b = (*window)[chunk + (bit + i) / 8];
    const auto mask = static_cast<std::byte>(1u << ((bit + i) % 8));
    b = (x >> i & 1) != 0 ? b | mask : b & ~mask;
  }
}

// Returns the number of elements in 16 bytes.
inline uint32_t elements_per_chunk(Format format, bool packed4) {
  const int bits = bits_of(format);
  return packed4 ? 32 : bits < 8 ? 16 : static_cast<uint32_t>(128 / bits);
}

// A matrix of values that the format holds exactly and whose products have exact sums: small integers, or their
// quarters.
struct Plain {
  int mn = 0, k = 0;
  std::vector<double> value;
  double& at(int i, int j) { return value[static_cast<size_t>(i * k + j)]; }
  double at(int i, int j) const { return value[static_cast<size_t>(i * k + j)]; }
};
inline Plain random_plain(test::Random& random, Format format, int mn, int k) {
  Plain p{mn, k, std::vector<double>(static_cast<size_t>(mn * k))};
  for (double& x : p.value) {
    switch (format) {
      case Format::u8: x = static_cast<double>(random.between(0, 255)); break;
      case Format::s8: x = static_cast<double>(random.between(-128, 127)); break;
      case Format::e2m1: x = decode(static_cast<uint32_t>(random.between(0, 15)), format); break;
      default: x = static_cast<double>(random.between(-7, 7)) * 0.5; break;
    }
  }
  return p;
}
inline uint32_t code_of(Format format, double x) {
  if (format == Format::u8 || format == Format::s8) return static_cast<uint32_t>(static_cast<int>(x)) & 0xff;
  return encode(static_cast<float>(x), format);
}

inline void put(std::vector<std::byte>* window, const Canonical& layout, Format format, bool packed4, const Plain& p) {
  const uint32_t T = elements_per_chunk(format, packed4);
  const auto bits = static_cast<uint32_t>(bits_of(format));
  for (int i = 0; i < p.mn; ++i)
    for (int j = 0; j < p.k; ++j) {
      const auto mn = static_cast<uint32_t>(i), k = static_cast<uint32_t>(j);
      const uint32_t within = (layout.mn_major ? mn : k) % T * bits;
      write_bits(window, layout.chunk(mn, k, T), within, bits, code_of(format, p.at(i, j)));
    }
}

inline std::vector<std::byte> random_bytes(test::Random& random, size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}

}  // namespace tandem::vgpu::units
