// Bits: logic, shifts, fields, permutations. PTX ISA, "Logic and Shift Instructions", "Integer Arithmetic
// Instructions".
#pragma once

#include "vgpu/src/machine/lanes/integer.h"

namespace tandem::vgpu::machine {
namespace TANDEM_TARGET {
namespace {

struct And {
  template <class T>
  static auto of(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static auto of(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static auto of(T a, T b) {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  static auto of(T a) {
    return ~a;
  }
};
struct Cnot {
  template <class T>
  static T of(T a) {
    return a == 0;
  }
};
struct Same {
  template <class T>
  static T of(T a) {
    return a;
  }
};

// Shifts by more than the width give 0.
struct Shl {
  template <class T>
  static T of(T a, u32 n) {
    return n < 8 * sizeof(T) ? static_cast<T>(a << n) : T{0};
  }
};
struct Shr {
  template <class T>
  static T of(T a, u32 n) {
    const u32 most = 8 * sizeof(T) - 1;
    return n <= most ? static_cast<T>(a >> n) : is_signed<T> ? static_cast<T>(a >> most) : T{0};
  }
};
template <bool Left, bool Clamp>
struct Funnel {  // shf: of b:a, a in the lower half
  static u32 of(u32 a, u32 b, u32 c) {
    const u32 n = Clamp ? (c < 32 ? c : 32) : c & 31;
    const u64 both = u64{b} << 32 | a;
    return static_cast<u32>(Left ? (both << n) >> 32 : both >> n);
  }
};

struct Popc {
  static u32 of(u32 a) {
    a -= a >> 1 & 0x55555555u;
    a = (a & 0x33333333u) + (a >> 2 & 0x33333333u);
    return ((a + (a >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24;
  }
  static u32 of(u64 a) { return of(static_cast<u32>(a)) + of(static_cast<u32>(a >> 32)); }
};
struct Clz {
  static u32 of(u32 a) { return a == 0 ? 32 : static_cast<u32>(__builtin_clz(a)); }
  static u32 of(u64 a) { return a == 0 ? 64 : static_cast<u32>(__builtin_clzll(a)); }
};
template <bool ShiftAmount>
struct Bfind {  // for signed values: the highest bit unlike the sign
  template <class T>
  static u32 of(T a) {
    const auto x = static_cast<Unsigned<T>>(a < T{0} ? ~a : a);
    if (x == 0) return ~0u;
    const u32 zeros = Clz::of(x);
    return ShiftAmount ? zeros : static_cast<u32>(8 * sizeof(T) - 1) - zeros;
  }
};
struct Brev {
  template <class T>
  static T of(T a) {
    T d = 0;
    for (u32 i = 0; i < 8 * sizeof(T); ++i) d = static_cast<T>(d << 1 | (a >> i & 1));
    return d;
  }
};
struct Fns {  // the n-th set bit from base: n > 0 upwards, n < 0 downwards
  static u32 of(u32 mask, u32 base, s32 n) {
    if (base > 31) return ~0u;
    const int step = n < 0 ? -1 : 1;
    s64 left = n < 0 ? -s64{n} : n == 0 ? 1 : n;
    for (int i = static_cast<int>(base); i >= 0 && i < 32; i += step) {
      if ((mask >> i & 1) != 0 && --left == 0) return static_cast<u32>(i);
      if (n == 0) break;
    }
    return ~0u;
  }
};
// For 32 bits, position and length are their low bytes (PTX ISA, "bfe"). No 64-bit instruction exists: the assembler
// emits shifts, which use the whole numbers.
struct Bfe {
  template <class T>
  static T of(T a, u32 b, u32 c) {
    constexpr u32 kWidth = 8 * sizeof(T);
    const u32 at = kWidth == 32 ? b & 0xff : b, length = kWidth == 32 ? c & 0xff : c;
    const Unsigned<T> past = is_signed<T> && a < T{0} ? static_cast<Unsigned<T>>(~Unsigned<T>{0}) : Unsigned<T>{0};
    const auto all = at < kWidth ? static_cast<Unsigned<T>>(a >> at) : past;
    if (length >= kWidth) return static_cast<T>(all);
    const auto mask = static_cast<Unsigned<T>>((Unsigned<T>{1} << length) - 1);
    const bool sign = is_signed<T> && length != 0 && (all >> (length - 1) & 1) != 0;
    return static_cast<T>((all & mask) | (sign ? static_cast<Unsigned<T>>(~mask) : Unsigned<T>{0}));
  }
};
struct Bfi {
  template <class T>
  static T of(T a, T b, u32 c, u32 d) {
    constexpr u32 kWidth = 8 * sizeof(T);
    const u32 at = kWidth == 32 ? c & 0xff : c, length = kWidth == 32 ? d & 0xff : d;
    if (at >= kWidth || length == 0) return b;
    const T ones = length >= kWidth ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
    const T mask = static_cast<T>(ones << at);
    return static_cast<T>((b & ~mask) | ((a << at) & mask));
  }
};
template <bool Clamp>
struct Bmsk {
  static u32 of(u32 a, u32 b) {
    const u32 at = Clamp ? (a < 32 ? a : 32) : a & 31, length = Clamp ? (b < 32 ? b : 32) : b & 31;
    return static_cast<u32>(((u64{1} << length) - 1) << at);
  }
};
template <bool Clamp>
struct Szext {
  template <class T>
  static T of(T a, u32 b) {
    const u32 n = Clamp ? (b < 32 ? b : 32) : b & 31;
    if (n == 0) return 0;
    return static_cast<T>(static_cast<T>(static_cast<u32>(a) << (32 - n)) >> (32 - n));
  }
};
struct Lop3 {
  static u32 of(u32 a, u32 b, u32 c, u32 table) {
    u32 d = 0;
    for (int i = 0; i < 8; ++i) {
      const u32 term = (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
      d |= term & (0u - (table >> i & 1));
    }
    return d;
  }
};

struct Prmt {  // generic form: a nibble per byte, top bit: copies the sign
  static u32 of(u32 a, u32 b, u32 c) {
    const u64 both = u64{b} << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) {
      const u32 nibble = c >> (4 * i);
      const u32 byte = static_cast<u32>(both >> (8 * (nibble & 7))) & 0xff;
      d |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
    }
    return d;
  }
};
enum class Permutation { f4e, b4e, rc8, ecl, ecr, rc16 };
template <Permutation P>
struct PrmtMode {
  static u32 of(u32 a, u32 b, u32 c) {
    constexpr u32 kEcl[] = {0x3210, 0x3211, 0x3222, 0x3333}, kEcr[] = {0x0000, 0x1110, 0x2210, 0x3210};
    constexpr u32 kB4e[] = {0x5670, 0x6701, 0x7012, 0x0123}, kF4e[] = {0x3210, 0x4321, 0x5432, 0x6543};
    const u32 n = c & 3;
    switch (P) {
      case Permutation::f4e: return Prmt::of(a, b, kF4e[n]);
      case Permutation::b4e: return Prmt::of(a, b, kB4e[n]);
      case Permutation::rc8: return Prmt::of(a, b, 0x1111 * n);
      case Permutation::ecl: return Prmt::of(a, b, kEcl[n]);
      case Permutation::ecr: return Prmt::of(a, b, kEcr[n]);
      default: return Prmt::of(a, b, n & 1 ? 0x3232 : 0x1010);
    }
  }
};

// Logic on predicates, each of which is one word.
template <class F>
void predicates(const void* a, const void* b, void* d) {
  *static_cast<u32*>(d) = F::of(*static_cast<const u32*>(a), *static_cast<const u32*>(b));
}
template <class F>
void predicate(const void* a, void* d) {
  *static_cast<u32*>(d) = F::of(*static_cast<const u32*>(a));
}

// Selects by a predicate. T is as wide as a register's place.
template <class T>
void select(const void* a, const void* b, const void* p, void* d) {
  const auto* x = static_cast<const T*>(a);
  const auto* y = static_cast<const T*>(b);
  const u32 bits = *static_cast<const u32*>(p);
  auto* z = static_cast<T*>(d);
  TANDEM_LANES z[i] = bits >> i & 1 ? x[i] : y[i];
}
template <class T, class C>  // slct: the sign of c chooses
void select_sign(const void* a, const void* b, const void* c, void* d) {
  const auto* x = static_cast<const T*>(a);
  const auto* y = static_cast<const T*>(b);
  const auto* w = static_cast<const C*>(c);
  auto* z = static_cast<T*>(d);
  TANDEM_LANES z[i] = w[i] >= 0 ? x[i] : y[i];
}

// Registers split into parts and joined.
template <int Part, class Whole, class Half>
struct TakePart {
  static Half of(Whole a) { return static_cast<Half>(a >> (8 * sizeof(Half) * Part)); }
};
struct Join16 {
  static u32 of(u16 low, u16 high) { return u32{low} | u32{high} << 16; }
};
struct Join32 {
  static u64 of(u32 low, u32 high) { return u64{low} | u64{high} << 32; }
};
struct Join4x16 {
  static u64 of(u16 a, u16 b, u16 c, u16 d) { return u64{a} | u64{b} << 16 | u64{c} << 32 | u64{d} << 48; }
};
struct Join4x8 {
  static u32 of(u32 a, u32 b, u32 c, u32 d) { return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24; }
};
template <int Part>
void take_64_of_128(const void* a, void* d) {
  const auto* x = static_cast<const u64*>(a);
  auto* z = static_cast<u64*>(d);
  TANDEM_LANES z[i] = x[2 * i + Part];
}
void join_128(const void* low, const void* high, void* d) {
  const auto* x = static_cast<const u64*>(low);
  const auto* y = static_cast<const u64*>(high);
  auto* z = static_cast<u64*>(d);
  for (int i = 0; i < kLanes; ++i) {
    z[2 * i] = x[i];
    z[2 * i + 1] = y[i];
  }
}
void copy_128(const void* a, void* d) { __builtin_memmove(d, a, 16 * kLanes); }

#define TANDEM_LOGIC(F, name)                                                         \
  {name ".b16", R2{two<F, u16, u16, u16>}}, {name ".b32", R2{two<F, u32, u32, u32>}}, \
      {name ".b64", R2{two<F, u64, u64, u64>}}, {                                     \
    name ".pred", R2 { predicates<F> }                                                \
  }
#define TANDEM_SHIFT(F, name, T)          \
  {                                       \
    name "." #T, R2 { two<F, T, T, u32> } \
  }
#define TANDEM_BFIND(name, T)                             \
  {name "." #T, R1{one<Bfind<false>, u32, T>}}, {         \
    name ".shiftamt." #T, R1 { one<Bfind<true>, u32, T> } \
  }

constexpr LaneEntry kBits[] = {
    TANDEM_LOGIC(And, "and"),
    TANDEM_LOGIC(Or, "or"),
    TANDEM_LOGIC(Xor, "xor"),
    {"not.b16", R1{one<Not, u16, u16>}},
    {"not.b32", R1{one<Not, u32, u32>}},
    {"not.b64", R1{one<Not, u64, u64>}},
    {"not.pred", R1{predicate<Not>}},
    {"cnot.b16", R1{one<Cnot, u16, u16>}},
    {"cnot.b32", R1{one<Cnot, u32, u32>}},
    {"cnot.b64", R1{one<Cnot, u64, u64>}},
    {"copy.0", R1{predicate<Same>}},
    {"copy.4", R1{one<Same, u32, u32>}},
    {"copy.8", R1{one<Same, u64, u64>}},
    {"copy.16", R1{copy_128}},
    TANDEM_SHIFT(Shl, "shl", u16),
    TANDEM_SHIFT(Shl, "shl", u32),
    TANDEM_SHIFT(Shl, "shl", u64),
    TANDEM_SHIFT(Shr, "shr", u16),
    TANDEM_SHIFT(Shr, "shr", u32),
    TANDEM_SHIFT(Shr, "shr", u64),
    TANDEM_SHIFT(Shr, "shr", s16),
    TANDEM_SHIFT(Shr, "shr", s32),
    TANDEM_SHIFT(Shr, "shr", s64),
    {"shf.l.wrap", R3{three<Funnel<true, false>, u32, u32, u32, u32>}},
    {"shf.l.clamp", R3{three<Funnel<true, true>, u32, u32, u32, u32>}},
    {"shf.r.wrap", R3{three<Funnel<false, false>, u32, u32, u32, u32>}},
    {"shf.r.clamp", R3{three<Funnel<false, true>, u32, u32, u32, u32>}},
    {"popc.b32", R1{one<Popc, u32, u32>}},
    {"popc.b64", R1{one<Popc, u32, u64>}},
    {"clz.b32", R1{one<Clz, u32, u32>}},
    {"clz.b64", R1{one<Clz, u32, u64>}},
    {"brev.b32", R1{one<Brev, u32, u32>}},
    {"brev.b64", R1{one<Brev, u64, u64>}},
    TANDEM_BFIND("bfind", u32),
    TANDEM_BFIND("bfind", s32),
    TANDEM_BFIND("bfind", u64),
    TANDEM_BFIND("bfind", s64),
    {"fns.b32", R3{three<Fns, u32, u32, u32, s32>}},
    {"bfe.u32", R3{three<Bfe, u32, u32, u32, u32>}},
    {"bfe.s32", R3{three<Bfe, s32, s32, u32, u32>}},
    {"bfe.u64", R3{three<Bfe, u64, u64, u32, u32>}},
    {"bfe.s64", R3{three<Bfe, s64, s64, u32, u32>}},
    {"bfi.b32", R4{four<Bfi, u32, u32, u32, u32, u32>}},
    {"bfi.b64", R4{four<Bfi, u64, u64, u64, u32, u32>}},
    {"bmsk.clamp", R2{two<Bmsk<true>, u32, u32, u32>}},
    {"bmsk.wrap", R2{two<Bmsk<false>, u32, u32, u32>}},
    {"szext.clamp.u32", R2{two<Szext<true>, u32, u32, u32>}},
    {"szext.wrap.u32", R2{two<Szext<false>, u32, u32, u32>}},
    {"szext.clamp.s32", R2{two<Szext<true>, s32, s32, u32>}},
    {"szext.wrap.s32", R2{two<Szext<false>, s32, s32, u32>}},
    {"lop3.b32", R4{four<Lop3, u32, u32, u32, u32, u32>}},
    {"prmt.b32", R3{three<Prmt, u32, u32, u32, u32>}},
    {"prmt.b32.f4e", R3{three<PrmtMode<Permutation::f4e>, u32, u32, u32, u32>}},
    {"prmt.b32.b4e", R3{three<PrmtMode<Permutation::b4e>, u32, u32, u32, u32>}},
    {"prmt.b32.rc8", R3{three<PrmtMode<Permutation::rc8>, u32, u32, u32, u32>}},
    {"prmt.b32.ecl", R3{three<PrmtMode<Permutation::ecl>, u32, u32, u32, u32>}},
    {"prmt.b32.ecr", R3{three<PrmtMode<Permutation::ecr>, u32, u32, u32, u32>}},
    {"prmt.b32.rc16", R3{three<PrmtMode<Permutation::rc16>, u32, u32, u32, u32>}},
    {"select.4", R3{select<u32>}},
    {"select.8", R3{select<u64>}},
    {"slct.4.s32", R3{select_sign<u32, s32>}},
    {"slct.8.s32", R3{select_sign<u64, s32>}},
    {"slct.4.f32", R3{select_sign<u32, f32>}},
    {"slct.8.f32", R3{select_sign<u64, f32>}},
    {"part.16.32.0", R1{one<TakePart<0, u32, u16>, u16, u32>}},
    {"part.16.32.1", R1{one<TakePart<1, u32, u16>, u16, u32>}},
    {"part.32.64.0", R1{one<TakePart<0, u64, u32>, u32, u64>}},
    {"part.32.64.1", R1{one<TakePart<1, u64, u32>, u32, u64>}},
    {"part.16.64.0", R1{one<TakePart<0, u64, u16>, u16, u64>}},
    {"part.16.64.1", R1{one<TakePart<1, u64, u16>, u16, u64>}},
    {"part.16.64.2", R1{one<TakePart<2, u64, u16>, u16, u64>}},
    {"part.16.64.3", R1{one<TakePart<3, u64, u16>, u16, u64>}},
    {"part.8.32.0", R1{one<TakePart<0, u32, u8>, u8, u32>}},
    {"part.8.32.1", R1{one<TakePart<1, u32, u8>, u8, u32>}},
    {"part.8.32.2", R1{one<TakePart<2, u32, u8>, u8, u32>}},
    {"part.8.32.3", R1{one<TakePart<3, u32, u8>, u8, u32>}},
    {"part.8.16.0", R1{one<TakePart<0, u16, u8>, u8, u16>}},
    {"part.8.16.1", R1{one<TakePart<1, u16, u8>, u8, u16>}},
    {"part.64.128.0", R1{take_64_of_128<0>}},
    {"part.64.128.1", R1{take_64_of_128<1>}},
    {"join.16.32", R2{two<Join16, u32, u16, u16>}},
    {"join.32.64", R2{two<Join32, u64, u32, u32>}},
    {"join.16.64", R4{four<Join4x16, u64, u16, u16, u16, u16>}},
    {"join.8.32", R4{four<Join4x8, u32, u32, u32, u32, u32>}},
    {"join.64.128", R2{join_128}},
};

}  // namespace
}  // namespace TANDEM_TARGET
}  // namespace tandem::vgpu::machine
