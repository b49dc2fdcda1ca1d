// Row functions: a function of one lane, mapped over 32. Each instruction set includes this header once.
//
// A 16-bit value has a place of 32 bits, and its upper half is zero. Destination and source may be the same row, but
// rows of different widths never overlap. Lanes are independent, and the loops declare so.
#pragma once

#include <cstdint>
#include <type_traits>

#include "vgpu/src/machine/lanes/lanes.h"

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"  // not every lane function can be vectorised
#define TANDEM_LANES _Pragma("clang loop vectorize(assume_safety)") for (int i = 0; i < kLanes; ++i)
#else
#define TANDEM_LANES _Pragma("GCC ivdep") for (int i = 0; i < kLanes; ++i)
#endif

namespace tandem::vgpu::machine {
namespace TANDEM_TARGET {
namespace {

using u8 = uint8_t;
using s8 = int8_t;
using u16 = uint16_t;
using s16 = int16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

// The type of a value in a row, and the unsigned type of the same width.
template <class T, bool kReal = std::is_floating_point_v<T>>
struct TypeOf {
  using Place = std::conditional_t<sizeof(T) == 8, u64, u32>;
  using Unsigned = std::make_unsigned_t<T>;
};
template <class T>
struct TypeOf<T, true> {
  using Place = T;
  using Unsigned = T;
};

template <class T>
using Place = typename TypeOf<T>::Place;
template <class T>
using Unsigned = typename TypeOf<T>::Unsigned;

template <class T>
inline const Place<T>* from(const void* row) {
  return static_cast<const Place<T>*>(row);
}
template <class T>
inline Place<T>* to(void* row) {
  return static_cast<Place<T>*>(row);
}
template <class T, class V>
inline Place<T> kept(V value) {
  return static_cast<Place<T>>(static_cast<Unsigned<T>>(value));
}

// Computes D f(A), D f(A, B), ... over all lanes. F is a type with a static function `of`.
template <class F, class D, class A>
void one(const void* a, void* d) {
  const auto* x = from<A>(a);
  auto* z = to<D>(d);
  TANDEM_LANES z[i] = kept<D>(F::of(static_cast<A>(x[i])));
}
template <class F, class D, class A, class B>
void two(const void* a, const void* b, void* d) {
  const auto* x = from<A>(a);
  const auto* y = from<B>(b);
  auto* z = to<D>(d);
  TANDEM_LANES z[i] = kept<D>(F::of(static_cast<A>(x[i]), static_cast<B>(y[i])));
}
template <class F, class D, class A, class B, class C>
void three(const void* a, const void* b, const void* c, void* d) {
  const auto* x = from<A>(a);
  const auto* y = from<B>(b);
  const auto* w = from<C>(c);
  auto* z = to<D>(d);
  TANDEM_LANES z[i] = kept<D>(F::of(static_cast<A>(x[i]), static_cast<B>(y[i]), static_cast<C>(w[i])));
}
template <class F, class D, class A, class B, class C, class E>
void four(const void* a, const void* b, const void* c, const void* e, void* d) {
  const auto* x = from<A>(a);
  const auto* y = from<B>(b);
  const auto* w = from<C>(c);
  const auto* v = from<E>(e);
  auto* z = to<D>(d);
  TANDEM_LANES z[i] =
      kept<D>(F::of(static_cast<A>(x[i]), static_cast<B>(y[i]), static_cast<C>(w[i]), static_cast<E>(v[i])));
}

// Computes a predicate: bit i is f of lane i.
template <class F, class A, class B>
void test_two(const void* a, const void* b, void* d) {
  const auto* x = from<A>(a);
  const auto* y = from<B>(b);
  u32 bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= F::of(static_cast<A>(x[i]), static_cast<B>(y[i])) ? 1u << i : 0u;
  *static_cast<u32*>(d) = bits;
}
template <class F, class A>
void test_one(const void* a, void* d) {
  const auto* x = from<A>(a);
  u32 bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= F::of(static_cast<A>(x[i])) ? 1u << i : 0u;
  *static_cast<u32*>(d) = bits;
}

}  // namespace
}  // namespace TANDEM_TARGET
}  // namespace tandem::vgpu::machine
