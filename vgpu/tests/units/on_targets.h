// Runs rows of 32 over whole lists of values, on every instruction set of this machine.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/random.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {

inline float as_float(uint32_t x) {
  float f;
  std::memcpy(&f, &x, sizeof f);
  return f;
}
inline uint32_t as_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

// Calls f(row of a, row of b, ..., row of d) for 32 values at a time. The first values fill up the last row.
template <class D, class F, class... Lists>
std::vector<D> on_rows(F&& f, const Lists&... lists) {
  const size_t count = std::get<0>(std::tie(lists...)).size();
  std::vector<D> result(count);
  for (size_t i = 0; i < count; i += kLanes) {
    D d[kLanes];
    const auto row = [&](const auto& list) {
      std::vector<std::decay_t<decltype(list[0])>> lanes(kLanes);
      for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = list[i + lane < count ? i + lane : lane % count];
      return lanes;
    };
    f(row(lists).data()..., d);
    for (size_t lane = 0; lane < kLanes && i + lane < count; ++lane) result[i + lane] = d[lane];
  }
  return result;
}

// Adversarial numbers: signs of zero, the ends of every range, ties, infinities, NaN. Random bits follow.
inline std::vector<float> hostile_floats(uint64_t seed, size_t count) {
  std::vector<float> list;
  for (const uint32_t u :
       {0u,          1u,          2u,          0x3fffffu,   0x400000u,   0x400001u,   0x7fffffu,   0x800000u,
        0x800001u,   0xffffffu,   0x1000000u,  0x33000000u, 0x33800000u, 0x3f7fffffu, 0x3f800000u, 0x3f800001u,
        0x3fc00000u, 0x40000000u, 0x40490fdbu, 0x42fe0000u, 0x43000000u, 0x477fe000u, 0x477fefffu, 0x477ff000u,
        0x4b7fffffu, 0x4b800000u, 0x7e800000u, 0x7e800001u, 0x7f000000u, 0x7f7effffu, 0x7f7f7fffu, 0x7f7f8000u,
        0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
    list.push_back(as_float(u));
    list.push_back(as_float(u | 0x80000000u));
  }
  test::Random random(seed);
  for (size_t i = 0; i < count; ++i) list.push_back(as_float(static_cast<uint32_t>(random.next())));
  return list;
}

inline std::string hex(uint32_t x) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", x);
  return text;
}

}  // namespace tandem::vgpu::units
