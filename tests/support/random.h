// Seeded random numbers, the same on every machine.
#pragma once

#include <cmath>
#include <cstdint>

namespace tandem::test {

struct Random {
  uint64_t state;

  explicit Random(uint64_t seed) : state(seed) { state = next(); }  // neighbouring seeds share nothing

  // splitmix64
  uint64_t next() {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }

  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  int64_t between(int64_t low, int64_t high) {                              // inclusive
    return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double p) { return uniform() < p; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
};

}  // namespace tandem::test
