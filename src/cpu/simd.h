// The vector unit of one instruction set: types, exp2, tanh, row conversions. This header is included once per target.
//
// Every target is a separate translation unit with its compiler flags (src/CMakeLists.txt). Highway's static dispatch
// selects the widest unit of these flags, so that no Highway library is needed at run time. These headers define
// everything in a namespace named for the target, so that no inline function of one target is linked into another.
#pragma once

#define HWY_COMPILE_ONLY_STATIC 1
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

namespace tandem::cpu::TANDEM_TARGET {

namespace hn = hwy::HWY_NAMESPACE;

using FTag = hn::ScalableTag<float>;
using ITag = hn::ScalableTag<int32_t>;
using UTag = hn::ScalableTag<uint32_t>;
using VF = hn::Vec<FTag>;
using VI = hn::Vec<ITag>;
using VU = hn::Vec<UTag>;

constexpr int kLanes = HWY_LANES(float);

constexpr float kLog2e = 1.44269504088896340736f;
constexpr double kLn2 = 0.69314718055994530942;
constexpr float kInfinity = __builtin_inff();

inline VF load(const float* p) { return hn::LoadU(FTag(), p); }
inline VI load(const int32_t* p) { return hn::LoadU(ITag(), p); }
inline VU load(const uint32_t* p) { return hn::LoadU(UTag(), p); }
inline void store(VF v, float* p) { hn::StoreU(v, FTag(), p); }
inline void store(VU v, uint32_t* p) { hn::StoreU(v, UTag(), p); }
inline VF set(float x) { return hn::Set(FTag(), x); }
inline VF select(hn::Mask<FTag> m, VF yes, VF no) { return hn::IfThenElse(m, yes, no); }

// 2^f on [0, 1): the polynomial of this degree with p(0) = 1 and the least maximal relative error (docs/numerics.md).
// The errors are 8.6e-5, 2.9e-6 and 2.0e-9 for degrees 3, 4 and 6, each below the rounding of the type.
template <int Degree>
inline VF exp2_fraction(VF f) {
  static_assert(Degree == 3 || Degree == 4 || Degree == 6);
  constexpr float c3[] = {0.695116786445f, 0.227644991135f, 0.0770670420721f};
  constexpr float c4[] = {0.693044844908f, 0.241280204723f, 0.0522424742691f, 0.0134266842506f};
  constexpr float c6[] = {0.693147044443f,   0.240229305552f,   0.0554852806202f,
                          0.00967545156522f, 0.00124678464508f, 0.000216129149696f};
  const float* c = Degree == 3 ? c3 : Degree == 4 ? c4 : c6;
  VF p = set(c[Degree - 1]);
  for (int i = Degree - 2; i >= 0; --i) p = hn::MulAdd(p, f, set(c[i]));
  return hn::MulAdd(p, f, set(1.0f));
}

// 2^x for x < 128; 0 below 2^-126 and for -inf; NaN for NaN; exactly 1 at 0. The polynomial needs no exponential unit
// and no table: floor reduces the range, and a polynomial follows (Cody and Waite 1980; FlashAttention-4, arXiv
// 2603.05451).
template <int Degree>
inline VF exp2(VF x) {
#if HWY_TARGET == HWY_AVX3 || (defined(HWY_AVX3_ZEN4) && HWY_TARGET <= HWY_AVX3_DL)
  const VF f{_mm512_reduce_ps(x.raw, 0x09)};  // x - floor(x)
  return VF{_mm512_scalef_ps(exp2_fraction<Degree>(f).raw, x.raw)};
#else
  const VF magic = set(12582912.0f + 127.0f);  // 1.5 * 2^23: what is added to it is rounded to an integer
  // maxps passes NaN in this order, but Max of Highway's portable targets drops it.
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  const VF clamped = hn::Max(set(-127.0f), x);
#else
  const VF clamped = select(hn::Lt(x, set(-127.0f)), set(-127.0f), x);
#endif
  // Rounding x - 1/2 to nearest gives floor(x). The subtrahend is slightly below 1/2, because otherwise 0 would be a
  // tie that may round to -1.
  const VF shifted = hn::Add(hn::Sub(clamped, set(0.49999997f)), magic);
  const VF f = hn::Sub(clamped, hn::Sub(shifted, magic));
  const VF power = hn::BitCast(FTag(), hn::ShiftLeft<23>(hn::BitCast(UTag(), shifted)));
  return hn::Mul(exp2_fraction<Degree>(f), power);
#endif
}

// tanh by an odd polynomial near 0, where 1 - 2/(1 + e^2x) would cancel (coefficients of Cephes' tanhf).
inline VF tanh(VF x) {
  const VF z = hn::Abs(x), s = hn::Mul(x, x);
  VF p = set(-5.70498872745e-3f);
  p = hn::MulAdd(p, s, set(2.06390887954e-2f));
  p = hn::MulAdd(p, s, set(-5.37397155531e-2f));
  p = hn::MulAdd(p, s, set(1.33314422036e-1f));
  p = hn::MulAdd(p, s, set(-3.33332819422e-1f));
  const VF small = hn::MulAdd(hn::Mul(p, s), x, x);
  const VF e = exp2<6>(hn::Mul(hn::Min(z, set(20.0f)), set(2 * kLog2e)));
  const VF big = hn::CopySign(hn::Sub(set(1.0f), hn::Div(set(2.0f), hn::Add(e, set(1.0f)))), x);
  // The polynomial propagates a NaN, which Min may lose.
  return select(hn::Gt(z, set(0.625f)), big, small);
}

// ---- 16-bit floats ----------------------------------------------------------------------------------------------

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline VF widen(const float* p) { return load(p); }
inline VF widen(const BF16* p) {
  const hn::Rebind<uint16_t, FTag> half;
  const auto v = hn::LoadU(half, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(FTag(), hn::ShiftLeft<16>(hn::PromoteTo(UTag(), v)));
}
// The upper 16 bits of each lane after rounding to nearest even; NaN stays NaN.
inline VU bf16_bits(VF v) {
  const VU u = hn::BitCast(UTag(), v);
  const VU odd = hn::And(hn::ShiftRight<16>(u), hn::Set(UTag(), 1));
  const VU rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(UTag(), 0x7FFF))));
  const VU nan = hn::Set(UTag(), 0x7FC0);
  return hn::IfThenElse(hn::RebindMask(UTag(), hn::IsNaN(v)), nan, rounded);
}

// Stores the lower 16 bits of each lane.
inline void store_halves(VU bits, void* p) {
  const hn::Rebind<int16_t, FTag> half;
  // After sign extension the signed saturating demotion is exact. Some targets lack the unsigned demotion.
  const VI extended = hn::ShiftRight<16>(hn::BitCast(ITag(), hn::ShiftLeft<16>(bits)));
  hn::StoreU(hn::DemoteTo(half, extended), half, static_cast<int16_t*>(p));
}

inline void narrow(VF v, float* p) { store(v, p); }
inline void narrow(VF v, BF16* p) { store_halves(bf16_bits(v), p); }

#if defined(__F16C__) || HWY_ARCH_ARM_A64
inline VF widen(const F16* p) {
  const hn::Rebind<hwy::float16_t, FTag> half;
  return hn::PromoteTo(FTag(), hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(p)));
}
inline void narrow(VF v, F16* p) {
  const hn::Rebind<hwy::float16_t, FTag> half;
  hn::StoreU(hn::DemoteTo(half, v), half, reinterpret_cast<hwy::float16_t*>(p));
}
#else
// Conversions for targets without such instructions. (Highway 1.0's replacement truncates, and converts infinity to a
// number.)
inline VF widen(const F16* p) {
  const hn::Rebind<uint16_t, FTag> half;
  const VU bits = hn::PromoteTo(UTag(), hn::LoadU(half, reinterpret_cast<const uint16_t*>(p)));
  const VU magnitude = hn::And(bits, hn::Set(UTag(), 0x7FFF));
  // The fields of a float with an exponent 112 too small. From 2^16 on the value is infinity or NaN.
  const VF value = hn::Mul(hn::BitCast(FTag(), hn::ShiftLeft<13>(magnitude)), set(0x1p112f));
  const VU special =
      hn::And(hn::BitCast(UTag(), hn::VecFromMask(FTag(), hn::Ge(value, set(0x1p16f)))), hn::Set(UTag(), 0x7F800000));
  const VU sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  return hn::BitCast(FTag(), hn::Or(hn::Or(hn::BitCast(UTag(), value), special), sign));
}
inline void narrow(VF v, F16* p) {
  const VF magnitude = hn::Abs(v);
  // Values from 2^16 on overflow to infinity. Let p be the largest power of two below the value, at least 2^-14. Adding
  // 2^15 p leaves 11 bits, rounded to nearest even, at the end of the word.
  const VF value = hn::Mul(hn::Mul(magnitude, set(0x1p112f)), set(0x1p-110f));
  const VI exponent = hn::And(hn::BitCast(ITag(), magnitude), hn::Set(ITag(), 0x7F800000));
  const VI above = hn::Add(hn::Max(exponent, hn::Set(ITag(), 0x38800000)), hn::Set(ITag(), 0x07800000));
  const VU sum = hn::BitCast(UTag(), hn::Add(value, hn::BitCast(FTag(), above)));
  const VU number =
      hn::Add(hn::And(hn::ShiftRight<13>(sum), hn::Set(UTag(), 0x7C00)), hn::And(sum, hn::Set(UTag(), 0x0FFF)));
  const VU sign = hn::ShiftRight<16>(hn::Xor(hn::BitCast(UTag(), v), hn::BitCast(UTag(), magnitude)));
  const VU nan = hn::Set(UTag(), 0x7E00);
  store_halves(hn::Or(hn::IfThenElse(hn::RebindMask(UTag(), hn::IsNaN(v)), nan, number), sign), p);
}
#endif

// Computes dst[0, n) = src and dst[n, padded) = 0; padded is a multiple of kLanes.
template <class T>
inline void load_row(const T* src, int64_t n, int64_t padded, float* dst) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store(widen(src + c), dst + c);
  if (c < n) {
    T tail[kLanes] = {};
    std::memcpy(tail, src + c, static_cast<size_t>(n - c) * sizeof(T));
    store(widen(tail), dst + c);
    c += kLanes;
  }
  for (; c < padded; c += kLanes) store(hn::Zero(FTag()), dst + c);
}

// Computes dst[0, n) = scale * src; src is readable up to the next multiple of kLanes.
template <class T>
inline void store_row(const float* src, int64_t n, float scale, T* dst) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) narrow(hn::Mul(load(src + c), set(scale)), dst + c);
  if (c < n) {
    T tail[kLanes];
    narrow(hn::Mul(load(src + c), set(scale)), tail);
    std::memcpy(dst + c, tail, static_cast<size_t>(n - c) * sizeof(T));
  }
}

// Computes dst[0, n) += scale * src in float32, rounded once. src must be as readable as for store_row.
template <class T>
inline void add_row(const float* src, int64_t n, float scale, T* dst) {
  float sum[kLanes];
  for (int64_t c = 0; c < n; c += kLanes) {
    const int64_t count = n - c < kLanes ? n - c : kLanes;
    load_row(dst + c, count, kLanes, sum);
    store(hn::MulAdd(load(src + c), set(scale), load(sum)), sum);
    store_row(sum, count, 1.0f, dst + c);
  }
}

// Transposes: dst[c][r] = src[r][c] for r in [0, rows), c in [0, cols), both multiples of 4. Words have 32 bits.
template <class W>
inline void transpose(const W* src, int64_t src_stride, int rows, int64_t cols, W* dst, int64_t dst_stride) {
  static_assert(sizeof(W) == 4);
#if HWY_TARGET == HWY_SCALAR
  for (int64_t c = 0; c < cols; ++c)
    for (int r = 0; r < rows; ++r) dst[c * dst_stride + r] = src[r * src_stride + c];
#else
  // Processes four rows at a time. After two rounds of interleaving, each 128-bit block holds four rows of one column.
  constexpr UTag d;
  constexpr hn::Repartition<uint64_t, UTag> pairs;
  constexpr hn::Full128<uint32_t> block;
  for (int r = 0; r < rows; r += 4) {
    for (int64_t c = 0; c < cols; c += kLanes) {
      const uint32_t* in = reinterpret_cast<const uint32_t*>(src) + r * src_stride + c;
      const auto a0 = hn::LoadU(d, in), a1 = hn::LoadU(d, in + src_stride);
      const auto a2 = hn::LoadU(d, in + 2 * src_stride), a3 = hn::LoadU(d, in + 3 * src_stride);
      const auto lo01 = hn::BitCast(pairs, hn::InterleaveLower(d, a0, a1));
      const auto hi01 = hn::BitCast(pairs, hn::InterleaveUpper(d, a0, a1));
      const auto lo23 = hn::BitCast(pairs, hn::InterleaveLower(d, a2, a3));
      const auto hi23 = hn::BitCast(pairs, hn::InterleaveUpper(d, a2, a3));
      HWY_ALIGN uint32_t t[4][kLanes];
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, lo01, lo23)), d, t[0]);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, lo01, lo23)), d, t[1]);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, hi01, hi23)), d, t[2]);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, hi01, hi23)), d, t[3]);
      const int64_t width = cols - c < kLanes ? cols - c : kLanes;
      for (int64_t j = 0; j < width; ++j)
        hn::StoreU(hn::Load(block, t[j % 4] + j / 4 * 4), block,
                   reinterpret_cast<uint32_t*>(dst) + (c + j) * dst_stride + r);
    }
  }
#endif
}

}  // namespace tandem::cpu::TANDEM_TARGET
