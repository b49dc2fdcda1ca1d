// A hash of words. The order of the words matters.
#pragma once

#include <bit>
#include <cstdint>

namespace tandem::context_parallel {

class WordHash {
 public:
  void add(int64_t word) {
    state_ = (state_ ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    state_ ^= state_ >> 29;
  }
  void add(double number) { add(std::bit_cast<int64_t>(number)); }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x243F6A8885A308D3u;
};

}  // namespace tandem::context_parallel
