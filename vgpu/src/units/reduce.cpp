// Reductions in global memory. Each element is atomic, because other host threads execute blocks concurrently.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "vgpu/src/units/box.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::units {
namespace {

// Applies f(old) until no other thread has changed the value in between.
template <class T, class F>
void update(void* to, F&& f) {
  std::atomic_ref<T> target(*static_cast<T*>(to));
  T old = target.load(std::memory_order_relaxed);
  while (!target.compare_exchange_weak(old, f(old), std::memory_order_relaxed)) {
  }
}

template <class T, class F>
void for_each(void* to, const void* from, size_t bytes, F&& f) {
  for (size_t i = 0; i < bytes; i += sizeof(T)) {
    T x;
    std::memcpy(&x, static_cast<const std::byte*>(from) + i, sizeof x);
    update<T>(static_cast<std::byte*>(to) + i, [&](T old) { return f(old, x); });
  }
}

template <class T>
T integer(Reduction reduction, T old, T x) {
  using U = std::make_unsigned_t<T>;
  const auto a = static_cast<U>(old), b = static_cast<U>(x);
  switch (reduction) {
    case Reduction::add: return static_cast<T>(a + b);
    case Reduction::min: return std::min(old, x);
    case Reduction::max: return std::max(old, x);
    case Reduction::inc: return static_cast<T>(a >= b ? 0 : a + 1);
    case Reduction::dec: return static_cast<T>(a == 0 || a > b ? b : a - 1);
    case Reduction::bit_and: return static_cast<T>(a & b);
    case Reduction::bit_or: return static_cast<T>(a | b);
    case Reduction::bit_xor: break;
  }
  return static_cast<T>(a ^ b);
}

float flush(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  return (u & 0x7f800000) != 0 ? x : std::bit_cast<float>(u & 0x80000000);
}

// Subnormal numbers are kept unless the tensor map's type flushes them. The ISA flushes subnormal numbers, but an H200
// does not.
template <bool Ftz>
uint32_t add_f32(uint32_t a, uint32_t b) {
  const auto x = std::bit_cast<float>(a), y = std::bit_cast<float>(b);
  const float sum = Ftz ? flush(flush(x) + flush(y)) : x + y;
  return sum != sum ? 0x7fffffff : std::bit_cast<uint32_t>(sum);
}

// f16 and bf16: a sum in float32 is exact enough for a single further rounding.
uint16_t half(Reduction reduction, Format format, uint16_t a, uint16_t b) {
  const float x = decode(a, format), y = decode(b, format);
  if (reduction == Reduction::add) return static_cast<uint16_t>(encode(x + y, format));
  if (x != x || y != y) return x != x && y != y ? 0x7fff : x != x ? b : a;
  const bool first =
      reduction == Reduction::min ? x < y || (x == y && (a & 0x8000) != 0) : x > y || (x == y && (b & 0x8000) != 0);
  return first ? a : b;
}

}  // namespace

void reduce_elements(Reduction reduction, gpu::TensorType type, void* to, const void* from, size_t bytes) {
  const auto integers = [&]<class T>(T) {
    for_each<T>(to, from, bytes, [&](T old, T x) { return integer(reduction, old, x); });
  };
  switch (type) {
    case gpu::TensorType::u32: return integers(uint32_t{});
    case gpu::TensorType::s32: return integers(int32_t{});
    case gpu::TensorType::u64: return integers(uint64_t{});
    case gpu::TensorType::s64: return integers(int64_t{});
    case gpu::TensorType::f16:
    case gpu::TensorType::bf16: {
      const Format format = type == gpu::TensorType::f16 ? Format::f16 : Format::bf16;
      return for_each<uint16_t>(to, from, bytes, [&](uint16_t a, uint16_t b) { return half(reduction, format, a, b); });
    }
    case gpu::TensorType::f64:
      return for_each<uint64_t>(to, from, bytes, [](uint64_t a, uint64_t b) {
        return std::bit_cast<uint64_t>(std::bit_cast<double>(a) + std::bit_cast<double>(b));
      });
    case gpu::TensorType::f32_ftz: return for_each<uint32_t>(to, from, bytes, add_f32<true>);
    default: return for_each<uint32_t>(to, from, bytes, add_f32<false>);
  }
}

}  // namespace tandem::vgpu::units
