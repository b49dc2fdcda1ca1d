// Repeatable choices of one schedule.
#pragma once

#include <cstdint>

namespace tandem::vgpu::machine {

class Random {
 public:
  Random() = default;
  Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9e3779b97f4a7c15u + stream * 0xbf58476d1ce4e5b9u + 1) {}
  uint64_t next() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }

 private:
  uint64_t state_ = 0;
};

}  // namespace tandem::vgpu::machine
