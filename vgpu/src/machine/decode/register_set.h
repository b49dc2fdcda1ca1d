// A set of virtual registers, one bit each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::vgpu::machine {

class RegisterSet {
 public:
  explicit RegisterSet(size_t n = 0) : words_((n + 63) / 64, 0) {}
  bool operator[](int32_t i) const { return words_[static_cast<size_t>(i) / 64] >> (i % 64) & 1; }
  void set(int32_t i) { words_[static_cast<size_t>(i) / 64] |= uint64_t{1} << (i % 64); }
  void clear(int32_t i) { words_[static_cast<size_t>(i) / 64] &= ~(uint64_t{1} << (i % 64)); }
  bool add(const RegisterSet& other) {  // true: changed
    bool changed = false;
    for (size_t i = 0; i < words_.size(); ++i) {
      const uint64_t sum = words_[i] | other.words_[i];
      changed = changed || sum != words_[i];
      words_[i] = sum;
    }
    return changed;
  }
  void keep(const RegisterSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
  }
  void remove(const RegisterSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= ~other.words_[i];
  }
  template <class F>
  void each(F f) const {
    for (size_t i = 0; i < words_.size(); ++i)
      for (uint64_t w = words_[i]; w != 0; w &= w - 1) f(static_cast<int32_t>(64 * i) + __builtin_ctzll(w));
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace tandem::vgpu::machine
