#include "cli/plain/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/instruction_set.h"

namespace tandem::plain {
namespace {

// Sixteen lanes. The compiler maps these lanes to the registers of the enclosing function's target.
using Lanes = float __attribute__((vector_size(64)));
using Bits = int32_t __attribute__((vector_size(64)));
constexpr int64_t lanes = 16;

[[gnu::always_inline]] inline float max_body(const float* row, int64_t n) {
  Lanes most = Lanes{} - std::numeric_limits<float>::infinity();
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    Lanes x;
    std::memcpy(&x, row + j, sizeof x);
    most = x > most ? x : most;
  }
  float result = -std::numeric_limits<float>::infinity();
  for (int64_t lane = 0; lane < lanes; ++lane) result = most[lane] > result ? most[lane] : result;
  for (; j < n; ++j) result = row[j] > result ? row[j] : result;
  return result;
}

[[gnu::always_inline]] inline float dot_body(const float* a, const float* b, int64_t n) {
  Lanes sums{};
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    Lanes x, y;
    std::memcpy(&x, a + j, sizeof x);
    std::memcpy(&y, b + j, sizeof y);
    sums += x * y;
  }
  float sum = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) sum += sums[lane];
  for (; j < n; ++j) sum += a[j] * b[j];
  return sum;
}

// exp(x) = 2^n exp(x - n ln 2). The second factor is a series up to the sixth power, within 2 units in the last place.
[[gnu::always_inline]] inline float exp_body(float* row, int64_t n, float shift) {
  constexpr float magic = 0x1.8p23f;  // adding this number rounds to an integer in the low bits
  Lanes sums{};
  for (int64_t j = 0; j < n; j += lanes) {
    Lanes x = Lanes{} - std::numeric_limits<float>::infinity();
    const size_t bytes = static_cast<size_t>(n - j < lanes ? n - j : lanes) * sizeof(float);
    if (bytes == sizeof x) {
      std::memcpy(&x, row + j, sizeof x);
    } else {
      std::memcpy(&x, row + j, bytes);
    }
    x -= shift;
    const Lanes shifted = x * 1.44269504f + magic, whole = shifted - magic;
    const Lanes rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    Lanes series = rest * (1.f / 720) + 1.f / 120;
    series = series * rest + 1.f / 24;
    series = series * rest + 1.f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.f;
    series = series * rest + 1.f;
    const Bits exponent = (reinterpret_cast<Bits>(shifted) - std::bit_cast<int32_t>(magic)) << 23;
    const Lanes value = x < -87.f ? Lanes{} : reinterpret_cast<Lanes>(reinterpret_cast<Bits>(series) + exponent);
    sums += value;
    if (bytes == sizeof x) {
      std::memcpy(row + j, &value, sizeof value);
    } else {
      std::memcpy(row + j, &value, bytes);
    }
  }
  float sum = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) sum += sums[lane];
  return sum;
}

using Max = float (*)(const float*, int64_t);
using Dot = float (*)(const float*, const float*, int64_t);
using Exp = float (*)(float*, int64_t, float);

float max_baseline(const float* row, int64_t n) { return max_body(row, n); }
float dot_baseline(const float* a, const float* b, int64_t n) { return dot_body(a, b, n); }
float exp_baseline(float* row, int64_t n, float shift) { return exp_body(row, n, shift); }

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] float max_avx2(const float* row, int64_t n) { return max_body(row, n); }
[[gnu::target("avx2,fma")]] float dot_avx2(const float* a, const float* b, int64_t n) { return dot_body(a, b, n); }
[[gnu::target("avx2,fma")]] float exp_avx2(float* row, int64_t n, float shift) { return exp_body(row, n, shift); }
[[gnu::target("avx512f,avx512dq")]] float max_avx512(const float* row, int64_t n) { return max_body(row, n); }
[[gnu::target("avx512f,avx512dq")]] float dot_avx512(const float* a, const float* b, int64_t n) {
  return dot_body(a, b, n);
}
[[gnu::target("avx512f,avx512dq")]] float exp_avx512(float* row, int64_t n, float shift) {
  return exp_body(row, n, shift);
}

template <class F>
F choose(F baseline, F avx2, F avx512) {
  const auto has = [](const char* set) {
    return std::ranges::find(instruction_sets(), set) != instruction_sets().end();
  };
  if (has("avx512")) return avx512;
  return has("avx2") ? avx2 : baseline;
}
#endif

float widen_bf16(uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); }

// Moves exponent and fraction into place and scales by 2^112, which also normalises subnormals.
float widen_f16(uint16_t half) {
  const uint32_t magnitude = uint32_t{half & 0x7fffu} << 13;
  const uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(bits | special | uint32_t{half & 0x8000u} << 16);
}

float round_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  return std::bit_cast<float>((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : rounded);
}

float round_f16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & 0xffffe000u;
  const float absolute = std::bit_cast<float>(magnitude);
  const auto subnormal = std::bit_cast<uint32_t>((absolute + 0.75f) - 0.75f);  // the last place of 0.75 is 2^-24
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = result >= 0x47800000u ? 0x7f800000u : result;  // 2^16
  result = magnitude > 0x7f800000u ? 0x7fc00000u : result;
  return std::bit_cast<float>(result | (bits & 0x80000000u));
}

uint16_t narrow_bf16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(round_bf16(x)) >> 16); }

uint16_t narrow_f16(float x) {
  const auto bits = std::bit_cast<uint32_t>(round_f16(x));
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p-112f) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return static_cast<uint16_t>((magnitude >= 0x7f800000u ? special : finite) | (bits >> 16 & 0x8000u));
}

template <class From, class F>
void convert_from(const std::byte* from, int64_t n, float* to, F convert) {
  const auto* values = reinterpret_cast<const From*>(from);
  for (int64_t i = 0; i < n; ++i) to[i] = convert(values[i]);
}

template <class To, class F>
void convert_to(const float* from, int64_t n, std::byte* to, F convert) {
  auto* values = reinterpret_cast<To*>(to);
  for (int64_t i = 0; i < n; ++i) values[i] = convert(from[i]);
}

}  // namespace

void load_row(DType type, const std::byte* from, int64_t n, float* to) {
  switch (type) {
    case DType::f16: return convert_from<uint16_t>(from, n, to, widen_f16);
    case DType::bf16: return convert_from<uint16_t>(from, n, to, widen_bf16);
    case DType::f64: return convert_from<double>(from, n, to, [](double x) { return static_cast<float>(x); });
    default: std::memcpy(to, from, static_cast<size_t>(n) * sizeof *to);
  }
}

void store_row(DType type, const float* from, int64_t n, std::byte* to) {
  switch (type) {
    case DType::f16: return convert_to<uint16_t>(from, n, to, narrow_f16);
    case DType::bf16: return convert_to<uint16_t>(from, n, to, narrow_bf16);
    case DType::f64: return convert_to<double>(from, n, to, [](float x) { return static_cast<double>(x); });
    default: std::memcpy(to, from, static_cast<size_t>(n) * sizeof *from);
  }
}

void round_row(DType type, float* row, int64_t n) {
  if (type == DType::f16) {
    for (int64_t i = 0; i < n; ++i) row[i] = round_f16(row[i]);
  } else if (type == DType::bf16) {
    for (int64_t i = 0; i < n; ++i) row[i] = round_bf16(row[i]);
  }
}

float row_max(const float* row, int64_t n) {
#if defined(__x86_64__)
  static const Max best = choose<Max>(max_baseline, max_avx2, max_avx512);
  return best(row, n);
#else
  return max_baseline(row, n);
#endif
}

float dot_row(const float* a, const float* b, int64_t n) {
#if defined(__x86_64__)
  static const Dot best = choose<Dot>(dot_baseline, dot_avx2, dot_avx512);
  return best(a, b, n);
#else
  return dot_baseline(a, b, n);
#endif
}

float exp_row(float* row, int64_t n, float shift) {
#if defined(__x86_64__)
  static const Exp best = choose<Exp>(exp_baseline, exp_avx2, exp_avx512);
  return best(row, n, shift);
#else
  return exp_baseline(row, n, shift);
#endif
}

}  // namespace tandem::plain
