// Dense products and the unpacking of 16-byte chunks, of one CPU target. products.cpp includes it once per target:
// formats.h explains the linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vgpu/src/units/formats.h"
#include "vgpu/src/units/product.h"

namespace tandem::vgpu::units {
namespace {

#if defined(__AVX512F__)
inline constexpr int kWidth = 16, kRows = 8, kColumns = 2;
#elif defined(__AVX__)
inline constexpr int kWidth = 8, kRows = 4, kColumns = 2;
#else
inline constexpr int kWidth = 4, kRows = 4, kColumns = 2;
#endif

inline constexpr int kMaxK = 64;  // maximum of any matrix instruction

// Vector types of the compiler. The compiler supports vector types on every machine and splits wide ones.
template <class T, int Width>
struct VectorOf {
  typedef T type __attribute__((vector_size(Width * sizeof(T))));
};
template <class T, int Width>
using Vector = typename VectorOf<T, Width>::type;

template <class T, int Width>
inline Vector<T, Width> load(const T* from) {
  Vector<T, Width> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class T, int Width>
inline void store(Vector<T, Width> v, T* to) {
  std::memcpy(to, &v, sizeof v);
}

// Replaces NaN sums by the GPU's NaN; integers have none.
template <int Width>
inline Vector<float, Width> finished(Vector<float, Width> sum) {
  const auto number = sum == sum;  // NOLINT(misc-redundant-expression): not NaN
  Vector<int32_t, Width> u = __builtin_bit_cast(decltype(u), sum);
  u = (u & number) | (static_cast<int32_t>(kNaN) & ~number);
  return __builtin_bit_cast(decltype(sum), u);
}
template <int Width>
inline Vector<uint32_t, Width> finished(Vector<uint32_t, Width> sum) {
  return sum;
}

// Rows x (Columns vectors) of d, at row m and column n. packed: the rows of a, [k][Rows].
template <class T, int Width, int Rows, int Columns>
inline void block(const DenseProduct<T>& f, const T* packed, int m, int n) {
  Vector<T, Width> sum[Rows][Columns];
  T* d = f.d + m * f.d_pitch + n;
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c)
      sum[r][c] = f.accumulate ? load<T, Width>(d + r * f.d_pitch + c * Width) : Vector<T, Width>{};
  const T* b = f.b + n;
  for (int k = 0; k < f.k; ++k, b += f.b_pitch, packed += Rows) {
    Vector<T, Width> column[Columns];
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c) column[c] = load<T, Width>(b + c * Width);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < Columns; ++c) sum[r][c] += packed[r] * column[c];
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c) store<T, Width>(finished<Width>(sum[r][c]), d + r * f.d_pitch + c * Width);
}

// Computes all columns of Rows rows, the widest blocks first. Every element is the same sum in the same order for any
// blocking.
template <class T, int Rows>
inline void rows(const DenseProduct<T>& f, int m) {
  T packed[kMaxK * Rows];
  for (int r = 0; r < Rows; ++r)
    for (int k = 0; k < f.k; ++k) packed[k * Rows + r] = f.a[(m + r) * f.a_pitch + k];
  int n = 0;
  for (; n + kWidth * kColumns <= f.n; n += kWidth * kColumns) block<T, kWidth, Rows, kColumns>(f, packed, m, n);
  for (; n + kWidth <= f.n; n += kWidth) block<T, kWidth, Rows, 1>(f, packed, m, n);
  for (; n + 4 <= f.n; n += 4) block<T, 4, Rows, 1>(f, packed, m, n);
  for (; n < f.n; ++n) block<T, 1, Rows, 1>(f, packed, m, n);
}

template <class T>
inline void multiply(const DenseProduct<T>& f) {
  int m = 0;
  for (; m + kRows <= f.m; m += kRows) rows<T, kRows>(f, m);
  for (; m + 4 <= f.m; m += 4) rows<T, 4>(f, m);
  for (; m < f.m; ++m) rows<T, 1>(f, m);
}

// A copy of the product, because stores to d might change one that is visible outside.
inline void product_f32(const DenseProduct<float>& product) { multiply(DenseProduct<float>(product)); }

// The type is unsigned, so that sums may wrap.
inline void product_s32(const DenseProduct<int32_t>& p, bool saturate) {
  const DenseProduct<uint32_t> wrapping = {.m = p.m,
                                           .n = p.n,
                                           .k = p.k,
                                           .a = reinterpret_cast<const uint32_t*>(p.a),
                                           .a_pitch = p.a_pitch,
                                           .b = reinterpret_cast<const uint32_t*>(p.b),
                                           .b_pitch = p.b_pitch,
                                           .d = reinterpret_cast<uint32_t*>(p.d),
                                           .d_pitch = p.d_pitch,
                                           .accumulate = p.accumulate};
  if (!saturate || !p.accumulate) {
    multiply(wrapping);
    return;
  }
  // The products of a row alone cannot wrap: at most 64 products of 8-bit numbers.
  for (int r = 0; r < p.m; ++r) {
    for (int n0 = 0; n0 < p.n; n0 += 64) {
      uint32_t sums[64];
      DenseProduct<uint32_t> part = wrapping;
      part.m = 1;
      part.n = p.n - n0 < 64 ? p.n - n0 : 64;
      part.a += r * p.a_pitch;
      part.b += n0;
      part.d = sums;
      part.d_pitch = 64;
      part.accumulate = false;
      multiply(part);
      int32_t* const d = p.d + r * p.d_pitch + n0;
      for (int c = 0; c < part.n; ++c) {
        const int64_t sum = int64_t{d[c]} + static_cast<int32_t>(sums[c]);
        d[c] = static_cast<int32_t>(sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum);
      }
    }
  }
}

// ---- Chunks of 16 bytes ----
template <Format F>
inline constexpr int kElements = F == Format::f32 || F == Format::tf32   ? 4
                                 : F == Format::f16 || F == Format::bf16 ? 8
                                                                         : 16;

// Returns element j of a chunk. Elements of 4 and 6 bits are contiguous from the lowest bit on, 16 of them in the first
// 8 or 12 bytes.
template <Format F>
inline uint32_t element(const unsigned char* chunk, int j) {
  if constexpr (kElements<F> == 4) {
    uint32_t x;
    std::memcpy(&x, chunk + 4 * j, sizeof x);
    return x;
  } else if constexpr (kElements<F> == 8) {
    uint16_t x;
    std::memcpy(&x, chunk + 2 * j, sizeof x);
    return x;
  } else if constexpr (F == Format::e2m1) {
    return chunk[j / 2] >> (4 * (j % 2)) & 0xfu;
  } else if constexpr (F == Format::e2m3 || F == Format::e3m2) {
    const int bit = 6 * j, byte = bit / 8;
    return ((chunk[byte] | chunk[byte + 1] << 8) >> (bit % 8)) & 0x3f;
  }
  return chunk[j];
}

template <Format F, class T>
inline T element_value(uint32_t x) {
  if constexpr (F == Format::s8) return static_cast<T>(static_cast<int8_t>(x));
  if constexpr (F == Format::u8) return static_cast<T>(x);
  return static_cast<T>(decode_one<F>(x));
}

// Eight chunks of eight elements of 16 bits: to[j][c] is element j of chunk c.
inline void transpose(const unsigned char* bytes, const uint32_t* offsets, uint16_t (*to)[8]) {
  using Eight = Vector<uint16_t, 8>;
  Eight x[8], y[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&x[i], bytes + offsets[i], sizeof x[i]);
  const auto merge = [](const Eight* from, Eight* merged) {
    for (int i = 0; i < 4; ++i) {
      merged[2 * i] = __builtin_shufflevector(from[i], from[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      merged[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
  };
  merge(x, y);
  merge(y, x);
  merge(x, y);
  std::memcpy(to, y, sizeof y);
}

template <Format F, class T>
inline void unpack_as(const std::byte* window, const uint32_t* offsets, int count, bool across, int64_t pitch, T* to) {
  constexpr int elements = kElements<F>;
  const auto* bytes = reinterpret_cast<const unsigned char*>(window);
  if (!across) {
    for (int i = 0; i < count; ++i, to += pitch)
      for (int j = 0; j < elements; ++j) to[j] = element_value<F, T>(element<F>(bytes + offsets[i], j));
    return;
  }
  // Processes eight chunks at a time. The chunks' columns are written in rows of 8 while they are in the cache.
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    std::conditional_t<elements == 8, uint16_t, uint32_t> raw[elements][8];
    if constexpr (elements == 8) {
      transpose(bytes, offsets + i, raw);
    } else {
      for (int c = 0; c < 8; ++c)
        for (int j = 0; j < elements; ++j) raw[j][c] = element<F>(bytes + offsets[i + c], j);
    }
    for (int j = 0; j < elements; ++j)
      for (int c = 0; c < 8; ++c) to[j * pitch + i + c] = element_value<F, T>(raw[j][c]);
  }
  for (; i < count; ++i)
    for (int j = 0; j < elements; ++j) to[j * pitch + i] = element_value<F, T>(element<F>(bytes + offsets[i], j));
}

inline void unpack_f32(const ChunkList& c, bool across, int64_t pitch, float* to) {
  with_format(c.format,
              [&](auto f) { unpack_as<decltype(f)::format, float>(c.window, c.offsets, c.count, across, pitch, to); });
}
inline void unpack_s32(const ChunkList& c, bool across, int64_t pitch, int32_t* to) {
  if (c.format == Format::s8) {
    unpack_as<Format::s8, int32_t>(c.window, c.offsets, c.count, across, pitch, to);
  } else {
    unpack_as<Format::u8, int32_t>(c.window, c.offsets, c.count, across, pitch, to);
  }
}

}  // namespace
}  // namespace tandem::vgpu::units
