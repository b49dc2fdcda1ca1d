// PTX ISA, "Logic and Shift Instructions" and the bit fields of "Integer Arithmetic Instructions".
#include <bit>

#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

using u16 = uint16_t;
using s16 = int16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;

TEST(Bits, Logic) {
  std::vector<Form> forms;
  const auto add = [&]<class T>(T, const std::string& type) {
    forms.push_back(form("and." + type + " d, a, b;", [](T a, T b) { return static_cast<T>(a & b); }));
    forms.push_back(form("or." + type + " d, a, b;", [](T a, T b) { return static_cast<T>(a | b); }));
    forms.push_back(form("xor." + type + " d, a, b;", [](T a, T b) { return static_cast<T>(a ^ b); }));
    forms.push_back(form("not." + type + " d, a;", [](T a) { return static_cast<T>(~a); }));
    forms.push_back(form("cnot." + type + " d, a;", [](T a) { return static_cast<T>(a == 0); }));
  };
  add(u16{}, "b16"), add(u32{}, "b32"), add(u64{}, "b64");
  forms.push_back(form("and.pred d, a, b;", [](bool a, bool b) { return a && b; }));
  forms.push_back(form("or.pred d, a, b;", [](bool a, bool b) { return a || b; }));
  forms.push_back(form("xor.pred d, a, b;", [](bool a, bool b) { return a != b; }));
  forms.push_back(form("not.pred d, a;", [](bool a) { return !a; }));
  forms.push_back(form("mov.pred d, a;", [](bool a) { return a; }));
  forms.push_back(form("and.pred d, !a, b;", [](bool a, bool b) { return !a && b; }));
  forms.push_back(form("and.b32 d, a, 0xff00ff;", [](u32 a) { return a & 0xff00ff; }));
  try_all(forms);
}

TEST(Bits, Lop3) {
  std::vector<Form> forms;
  for (const u32 table : {0x00u, 0x96u, 0xe8u, 0xcau, 0x3cu, 0xffu, 0x12u, 0xb7u}) {
    const auto f = [=](u32 a, u32 b, u32 c) {
      u32 d = 0;
      for (int i = 0; i < 32; ++i) d |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
      return d;
    };
    forms.push_back(form("lop3.b32 d, a, b, c, " + std::to_string(table) + ";", f));
    forms.push_back(form("lop3.or.b32 d|e, a, b, c, " + std::to_string(table) + ", g;",
                         [=](u32 a, u32 b, u32 c, bool g) { return std::pair(f(a, b, c), f(a, b, c) != 0 || g); }));
    forms.push_back(form("lop3.and.b32 d|e, a, b, c, " + std::to_string(table) + ", g;",
                         [=](u32 a, u32 b, u32 c, bool g) { return std::pair(f(a, b, c), f(a, b, c) != 0 && g); }));
  }
  try_all(forms);
}

TEST(Bits, Shifts) {
  std::vector<Form> forms;
  const auto left = [&]<class T>(T, const std::string& type) {
    forms.push_back(form("shl." + type + " d, a, b;",
                         [](T a, u32 n) { return n < 8 * sizeof(T) ? static_cast<T>(a << n) : T{0}; }));
  };
  left(u16{}, "b16"), left(u32{}, "b32"), left(u64{}, "b64");
  const auto right = [&]<class T>(T, const std::string& type) {
    forms.push_back(form("shr." + type + " d, a, b;", [](T a, u32 n) {
      if (n < 8 * sizeof(T)) return static_cast<T>(a >> n);
      return static_cast<T>(a < 0 ? -1 : 0);
    }));
  };
  right(u16{}, "b16"), right(u32{}, "b32"), right(u64{}, "b64"), right(u16{}, "u16"), right(u32{}, "u32"),
      right(u64{}, "u64");
  right(s16{}, "s16"), right(s32{}, "s32"), right(s64{}, "s64");
  forms.push_back(form("shl.b32 d, a, 5;", [](u32 a) { return a << 5; }));
  // Returns 32 of the 64 bits b:a.
  const auto funnel = [](u32 a, u32 b, u32 n, bool to_left) {
    const u64 both = u64{b} << 32 | a;
    return static_cast<u32>(to_left ? (both << n) >> 32 : both >> n);
  };
  forms.push_back(form("shf.l.wrap.b32 d, a, b, c;", [=](u32 a, u32 b, u32 n) { return funnel(a, b, n & 31, true); }));
  forms.push_back(form("shf.r.wrap.b32 d, a, b, c;", [=](u32 a, u32 b, u32 n) { return funnel(a, b, n & 31, false); }));
  forms.push_back(
      form("shf.l.clamp.b32 d, a, b, c;", [=](u32 a, u32 b, u32 n) { return funnel(a, b, std::min(n, 32u), true); }));
  forms.push_back(
      form("shf.r.clamp.b32 d, a, b, c;", [=](u32 a, u32 b, u32 n) { return funnel(a, b, std::min(n, 32u), false); }));
  try_all(forms);
}

u32 byte_of(u32 a, u32 b, u32 i) { return static_cast<u32>((u64{b} << 32 | a) >> (8 * (i & 7))) & 0xff; }

TEST(Bits, Permute) {
  const auto chosen = [](u32 a, u32 b, const u32(&bytes)[4]) {
    u32 d = 0;
    for (int i = 0; i < 4; ++i) d |= byte_of(a, b, bytes[i]) << (8 * i);
    return d;
  };
  try_all({
      form("prmt.b32 d, a, b, c;",
           [](u32 a, u32 b, u32 c) {
             u32 d = 0;
             for (int i = 0; i < 4; ++i) {
               const u32 selector = c >> (4 * i) & 15, byte = byte_of(a, b, selector);
               d |= ((selector & 8) == 0 ? byte : (byte & 0x80) != 0 ? 0xff : 0) << (8 * i);
             }
             return d;
           }),
      form("prmt.b32 d, a, b, 0x5410;", [](u32 a, u32 b) { return (a & 0xffff) | b << 16; }),
      form("prmt.b32.f4e d, a, b, c;",
           [=](u32 a, u32 b, u32 c) {
             return c &= 3, chosen(a, b, {c, c + 1, c + 2, c + 3});
           }),
      form("prmt.b32.b4e d, a, b, c;",
           [=](u32 a, u32 b, u32 c) {
             return c &= 3, chosen(a, b, {c, c + 7, c + 6, c + 5});
           }),
      form("prmt.b32.rc8 d, a, b, c;",
           [=](u32 a, u32 b, u32 c) {
             return c &= 3, chosen(a, b, {c, c, c, c});
           }),
      form("prmt.b32.ecl d, a, b, c;",
           [=](u32 a, u32 b, u32 c) {
             return c &= 3, chosen(a, b, {std::max(c, 0u), std::max(c, 1u), std::max(c, 2u), 3});
           }),
      form("prmt.b32.ecr d, a, b, c;",
           [=](u32 a, u32 b, u32 c) {
             return c &= 3, chosen(a, b, {0, std::min(c, 1u), std::min(c, 2u), c});
           }),
      form("prmt.b32.rc16 d, a, b, c;",
           [=](u32 a, u32 b, u32 c) {
             return c = 2 * (c & 1), chosen(a, b, {c, c + 1, c, c + 1});
           }),
  });
}

TEST(Bits, CountAndFind) {
  try_all({
      form("popc.b32 d, a;", [](u32 a) { return static_cast<u32>(std::popcount(a)); }),
      form("popc.b64 d, a;", [](u64 a) { return static_cast<u32>(std::popcount(a)); }),
      form("clz.b32 d, a;", [](u32 a) { return static_cast<u32>(std::countl_zero(a)); }),
      form("clz.b64 d, a;", [](u64 a) { return static_cast<u32>(std::countl_zero(a)); }),
      form("brev.b32 d, a;",
           [](u32 a) {
             u32 d = 0;
             for (int i = 0; i < 32; ++i) d |= (a >> i & 1) << (31 - i);
             return d;
           }),
      form("brev.b64 d, a;",
           [](u64 a) {
             u64 d = 0;
             for (int i = 0; i < 64; ++i) d |= (a >> i & 1) << (63 - i);
             return d;
           }),
      // Returns the highest bit that differs from the sign; for unsigned numbers the highest bit.
      form("bfind.u32 d, a;", [](u32 a) { return a == 0 ? ~0u : 31u - static_cast<u32>(std::countl_zero(a)); }),
      form("bfind.u64 d, a;", [](u64 a) { return a == 0 ? ~0u : 63u - static_cast<u32>(std::countl_zero(a)); }),
      form("bfind.s32 d, a;",
           [](s32 a) {
             const u32 u = static_cast<u32>(a < 0 ? ~a : a);
             return u == 0 ? ~0u : 31u - static_cast<u32>(std::countl_zero(u));
           }),
      form("bfind.s64 d, a;",
           [](s64 a) {
             const u64 u = static_cast<u64>(a < 0 ? ~a : a);
             return u == 0 ? ~0u : 63u - static_cast<u32>(std::countl_zero(u));
           }),
      form("bfind.shiftamt.u32 d, a;", [](u32 a) { return a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)); }),
      form("bfind.shiftamt.s32 d, a;",
           [](s32 a) {
             const u32 u = static_cast<u32>(a < 0 ? ~a : a);
             return u == 0 ? ~0u : static_cast<u32>(std::countl_zero(u));
           }),
      form("bfind.shiftamt.u64 d, a;", [](u64 a) { return a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)); }),
      // Starts at bit b of the mask, and returns the n-th set bit from there, up or down.
      form("fns.b32 d, a, b, c;",
           [](u32 mask, u32 base, s32 n) {
             base &= 31;
             if (n == 0) return (mask >> base & 1) != 0 ? base : ~0u;
             int found = 0;
             const int step = n > 0 ? 1 : -1;
             for (int at = static_cast<int>(base); at >= 0 && at < 32; at += step)
               if ((mask >> at & 1) != 0 && (++found, found == (n > 0 ? n : -n))) return static_cast<u32>(at);
             return ~0u;
           })
          .where([](u32, u32 base, s32 n) { return base < 32 && n > -64 && n < 64; }),
  });
}

// The ISA takes position and length from low bytes. No GPU has 64-bit instructions; the assembler's replacement uses
// all 32 bits.
template <class T>
void cut(u32* position, u32* length) {
  if (sizeof(T) == 4) *position &= 0xff, *length &= 0xff;
  *position = std::min(*position, 255u), *length = std::min(*length, 255u);
}
template <class T>
T extract(T a, u32 position, u32 length) {
  constexpr u32 most = 8 * sizeof(T) - 1;
  cut<T>(&position, &length);
  const bool is_signed = static_cast<T>(-1) < 0;
  const u32 sign_at = std::min(position + length - 1, most);
  const bool sign = is_signed && length != 0 && (static_cast<u64>(a) >> sign_at & 1) != 0;
  T d = 0;
  for (u32 i = 0; i <= most; ++i) {
    const bool bit = i < length && position + i <= most ? (static_cast<u64>(a) >> (position + i) & 1) != 0 : sign;
    if (bit) d = static_cast<T>(static_cast<u64>(d) | u64{1} << i);
  }
  return d;
}
template <class T>
T insert(T a, T b, u32 position, u32 length) {
  constexpr u32 most = 8 * sizeof(T) - 1;
  cut<T>(&position, &length);
  for (u32 i = 0; i < length && position + i <= most; ++i) {
    const T one = static_cast<T>(T{1} << (position + i));
    b = (a >> i & 1) != 0 ? b | one : b & ~one;
  }
  return b;
}

TEST(Bits, Fields) {
  try_all({
      form("bfe.u32 d, a, b, c;", [](u32 a, u32 b, u32 c) { return extract(a, b, c); }),
      form("bfe.s32 d, a, b, c;", [](s32 a, u32 b, u32 c) { return extract(a, b, c); }),
      form("bfe.u64 d, a, b, c;", [](u64 a, u32 b, u32 c) { return extract(a, b, c); }),
      form("bfe.s64 d, a, b, c;", [](s64 a, u32 b, u32 c) { return extract(a, b, c); }),
      form("bfe.u32 d, a, 3, 7;", [](u32 a) { return a >> 3 & 127; }),
      form("bfi.b32 d, a, b, c, g;", [](u32 a, u32 b, u32 c, u32 g) { return insert(a, b, c, g); }),
      form("bfi.b64 d, a, b, c, g;", [](u64 a, u64 b, u32 c, u32 g) { return insert(a, b, c, g); }),
      form("szext.clamp.s32 d, a, b;",
           [](s32 a, u32 n) {
             if (n == 0) return 0;
             return n >= 32 ? a : static_cast<s32>(static_cast<u32>(a) << (32 - n)) >> (32 - n);
           }),
      form("szext.clamp.u32 d, a, b;", [](u32 a, u32 n) { return n >= 32 ? a : a & ((u32{1} << n) - 1); }),
      form("szext.wrap.s32 d, a, b;",
           [](s32 a, u32 n) {
             n &= 31;
             return n == 0 ? 0 : static_cast<s32>(static_cast<u32>(a) << (32 - n)) >> (32 - n);
           }),
      form("szext.wrap.u32 d, a, b;", [](u32 a, u32 n) { return a & ((u32{1} << (n & 31)) - 1); }),
      form("bmsk.clamp.b32 d, a, b;",
           [](u32 position, u32 length) {
             if (position >= 32) return u32{0};
             const u64 ones = length >= 32 ? 0xffffffff : (u64{1} << length) - 1;
             return static_cast<u32>(ones << position);
           }),
      form("bmsk.wrap.b32 d, a, b;",
           [](u32 position, u32 length) {
             return static_cast<u32>(((u64{1} << (length & 31)) - 1) << (position & 31));
           }),
  });
}

}  // namespace
}  // namespace tandem::test
