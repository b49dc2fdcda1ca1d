// Types and qualifiers of device code. Device headers include only each other, because foreign headers alone would take
// NVRTC as long as a kernel.
#pragma once

using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

#define TANDEM_DEVICE __device__ __forceinline__

// Converts a pointer to a 32-bit shared memory address.
TANDEM_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

// Returns true in one lane of a converged warp, always the same lane. PTX ISA "elect.sync".
TANDEM_DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

// The first of two types if `first`, else the second.
template <bool first, class A, class B>
struct OneOf {
  using Type = A;
};
template <class A, class B>
struct OneOf<false, A, B> {
  using Type = B;
};

// Broadcasts lane 0's value, so that the compiler keeps the results in uniform registers.
TANDEM_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
// Returns true in all lanes if x is true in any lane. A loop that ends by this result keeps slots and descriptors in
// uniform registers.
TANDEM_DEVICE bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }

// Returns x, but hides its value from the compiler. Code that uses the result is not hoisted out of a loop.
TANDEM_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Returns x if bit n is set, else `otherwise`. The function is PTX, because one instruction then tests up to seven
// bits, bit 0 included.
TANDEM_DEVICE float where_bit(u32 bits, int n, float x, float otherwise) {
  float y;
  asm("{.reg .pred p; .reg .b32 bit;\n"
      "and.b32 bit, %2, %3; setp.ne.b32 p, bit, 0; selp.f32 %0, %1, %4, p;}"
      : "=f"(y)
      : "f"(x), "r"(bits), "r"(1u << n), "f"(otherwise));
  return y;
}

// Keeps the compiler from moving uses of these registers across a wait or an issue.
template <int n>
TANDEM_DEVICE void fence_operand(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Marks registers as undefined before a product overwrites them, so that the compiler need not keep their old values.
template <int n>
TANDEM_DEVICE void discard(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "=f"(x[i])::"memory");
}
