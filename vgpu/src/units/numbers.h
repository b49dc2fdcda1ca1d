// Number formats, and arithmetic as the GPU rounds it. Every function gives the same bits on every CPU.
//
// Rows hold one value per lane, 32 of them, contiguous. Destination and sources may be the same row. NaN results have
// the GPU's bits: 0x7fffffff (f32), 0x7fff (f16, bf16), 0x7fffe000 (tf32, except .rna). PTX ISA, "Floating Point
// Instructions", "cvt".
#pragma once

#include <cstdint>
#include <span>

namespace tandem::vgpu::units {

inline constexpr int kLanes = 32;

enum class Format : uint8_t { f32, tf32, f16, bf16, e4m3, e5m2, e2m3, e3m2, e2m1, ue8m0, ue4m3, s8, u8 };
int bits_of(Format format);  // bits of the value: e2m3 6, e2m1 4, tf32 32
const char* name_of(Format format);

enum class Rounding : uint8_t {
  rn,
  rz,
  rm,
  rp,
  rna,  // to nearest, ties away from zero
};

// The treatment of values beyond the format.
struct Fit {
  Rounding rounding = Rounding::rn;
  bool saturate_finite = false;  // .satfinite: largest value beyond the range
  bool relu = false;             // negative becomes +0
  bool ftz = false;              // subnormal float32 input counts as zero (of its sign)
};

// Converts a value to the format's code. Bits beyond the format's are zero.
uint32_t encode(float value, Format format, Fit fit = {});
float decode(uint32_t bits, Format format);  // exact

// Stochastic rounding: the discarded bits of the value plus random carry into the kept bits. random has as many bits,
// aligned to the top of the discarded ones.
uint32_t encode_stochastic(float value, Format format, uint32_t random, int random_bits, Fit fit = {});

// Functions of rows. [ftz]: flush subnormal inputs and results to zero of their sign.
struct Rows {
  using Unary = void (*)(const float* a, float* d);
  using Binary = void (*)(const float* a, const float* b, float* d);
  using Ternary = void (*)(const float* a, const float* b, const float* c, float* d);
  const char* target;

  // Correctly rounded functions. [rounding: rn rz rm rp][ftz]
  Binary add[4][2], mul[4][2], div[4][2];
  Ternary fma[4][2];
  Unary rcp[4][2], sqrt[4][2];
  Unary saturate;  // .sat: into [0, 1], NaN to +0

  // Approximations within the bounds of the PTX ISA. Nearly always these functions return the value nearest to the
  // exact result. [ftz]
  Unary ex2_approx[2], lg2_approx[2], rcp_approx[2], rsqrt_approx[2], sqrt_approx[2], sin_approx[2], cos_approx[2];
  Unary tanh_approx;
  Binary div_approx[2];  // 2^126 < |b| < 2^128: zero, as on the GPU
  Binary div_full[2];

  // A number wins against NaN, unless NaN is propagated. -0 < +0. [propagate NaN][ftz]
  Binary min[2][2], max[2][2];

  // Conversions of one value in the low bits of each lane of the narrow side.
  void (*encode)(Format format, Fit fit, const float* a, uint32_t* d);
  void (*decode)(Format format, const uint32_t* a, float* d);
  // Conversions of two packed values per lane, high and low. f16 and bf16 have 16 bits each; narrower formats have two
  // bytes (e2m1: two nibbles) in the low bits. cvt.rn.bf16x2.f32 d, a, b puts a into the high half.
  void (*encode_pair)(Format format, Fit fit, const float* high, const float* low, uint32_t* d);
  void (*decode_pair)(Format format, const uint32_t* a, float* high, float* low);

  // f16x2 or bf16x2 arithmetic, by format. Each half is rounded once to nearest. A single f16 is the low half.
  struct Half {
    Format format = Format::f16;
    bool ftz = false;  // subnormal f16 inputs and results become zero
    bool saturate = false;
    bool relu = false;  // fma only
  };
  void (*add_pair)(Half half, const uint32_t* a, const uint32_t* b, uint32_t* d);
  void (*sub_pair)(Half half, const uint32_t* a, const uint32_t* b, uint32_t* d);
  void (*mul_pair)(Half half, const uint32_t* a, const uint32_t* b, uint32_t* d);
  void (*fma_pair)(Half half, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d);
  void (*min_pair)(Half half, bool propagate_nan, const uint32_t* a, const uint32_t* b, uint32_t* d);
  void (*max_pair)(Half half, bool propagate_nan, const uint32_t* a, const uint32_t* b, uint32_t* d);
  void (*ex2_pair)(Half half, const uint32_t* a, uint32_t* d);
  void (*tanh_pair)(Half half, const uint32_t* a, uint32_t* d);
};

// The best functions for this machine, and the list of all of them (the first is the best).
const Rows& rows();
std::span<const Rows* const> all_rows();

}  // namespace tandem::vgpu::units
