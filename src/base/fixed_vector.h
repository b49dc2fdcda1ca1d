// A list of at most N plain values without heap memory, for data that every call builds.
#pragma once

#include <cstddef>
#include <new>
#include <stdexcept>
#include <type_traits>

namespace tandem {

template <class T, size_t N>
class FixedVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  FixedVector() {}  // NOLINT(modernize-use-equals-default): room for values is left as it is, not zeroed

  T& push_back(const T& value) { return *new (room()) T(value); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() { return std::launder(reinterpret_cast<T*>(memory_)); }
  T* end() { return begin() + size_; }
  const T* begin() const { return std::launder(reinterpret_cast<const T*>(memory_)); }
  const T* end() const { return begin() + size_; }
  T& operator[](size_t i) { return begin()[i]; }
  const T& operator[](size_t i) const { return begin()[i]; }
  T& back() { return begin()[size_ - 1]; }
  const T& back() const { return begin()[size_ - 1]; }

 private:
  std::byte* room() {
    if (size_ == N) [[unlikely]]
      throw std::length_error("a FixedVector is full: its capacity is too small");
    return memory_ + size_++ * kBytes;
  }

  static constexpr size_t kBytes = sizeof(T);  // NOLINT(bugprone-sizeof-expression): T may be a pointer

  size_t size_ = 0;
  alignas(T) std::byte memory_[N * kBytes];
};

}  // namespace tandem
