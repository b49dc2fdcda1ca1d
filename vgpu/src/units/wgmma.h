// wgmma.mma_async and mma.sync: what one instruction computes, from registers and shared memory to registers.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Matrix multiply-accumulate
// operation using mma instruction", "ldmatrix", "stmatrix".
//
// A register is a row of 32 lanes of 4 bytes. Lists of registers are pointers to rows, in the order of the PTX operand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "vgpu/src/units/matrix.h"
#include "vgpu/src/units/numbers.h"
#include "vgpu/src/units/ranges.h"

namespace tandem::vgpu::units {

using Row = uint32_t*;
using ConstRow = const uint32_t*;

enum class Sum : uint8_t { f32, f16, s32, f64 };  // type of D (and C)

struct WgmmaForm {
  int32_t n = 0, k = 0;  // m is 64
  Format a = Format::bf16, b = Format::bf16;
  Sum d = Sum::f32;
  bool a_in_registers = false;
  bool transpose_a = false, transpose_b = false;  // MN-major
  bool negate_a = false, negate_b = false;
  bool saturate = false;  // integers
};

// Checks that the instruction exists.
Status check(const WgmmaForm& form);
int d_registers(const WgmmaForm& form);     // per warp
inline constexpr int kWgmmaARegisters = 4;  // per warp

// Decode operands in shared memory as tiles. Refuse invalid descriptors.
Status a_tile(const WgmmaForm& form, uint64_t descriptor, uint32_t window_bytes, MatrixTile* tile);
Status b_tile(const WgmmaForm& form, uint64_t descriptor, uint32_t window_bytes, MatrixTile* tile);

// A and B of a wgmma. A is in registers, a_registers[warp][register], or is a tile of shared memory: null.
struct WgmmaOperands {
  const MatrixTile& a;
  const ConstRow* const* a_registers;
  const MatrixTile& b;
  const std::byte* window;  // the block's shared memory
};

// D (+)= A B for the four warps of a warpgroup: d[warp][register].
void wgmma(const WgmmaForm& form, const WgmmaOperands& operands, bool accumulate, Row* const* d);

// The same for sums in float32 that stay outside of registers between products: sums[row * n + column] of 64 rows.
inline constexpr int kWgmmaSums = 64 * 256;
void load_sums(const WgmmaForm& form, Row* const* d, float* sums);
void store_sums(const WgmmaForm& form, const float* sums, Row* const* d);
void wgmma_sums(const WgmmaForm& form, const WgmmaOperands& operands, bool accumulate, float* sums);

// mma.sync.aligned: dense forms. D = A B + C.
struct MmaForm {
  int32_t m = 16, n = 8, k = 0;
  Format a = Format::bf16, b = Format::bf16;  // not read if d is f64: all operands are
  Sum d = Sum::f32, c = Sum::f32;
  bool saturate = false;  // integers
};
Status check(const MmaForm& form);
// The number of registers of each operand: 32 bits each. f64: 64 bits, in rows of 256 bytes.
int a_registers(const MmaForm& form);
int b_registers(const MmaForm& form);
int c_registers(const MmaForm& form);
int d_registers(const MmaForm& form);
void mma(const MmaForm& form, const ConstRow* a, const ConstRow* b, const ConstRow* c, const Row* d);

// ldmatrix and stmatrix. addresses: 32 absolute offsets in the window, one per lane. Lane 8 i + j has the address of
// row j of matrix i.
struct MatrixAccess {
  enum class Shape : uint8_t {
    m8n8_b16,
    m16n16_b8,
    m8n16_b8x16_b6x16_p32,
    m8n16_b8x16_b4x16_p64,
    m16n16_b8x16_b6x16_p32,
    m16n16_b8x16_b4x16_p64,
    m16n8_b8
  };
  Shape shape = Shape::m8n8_b16;
  int32_t count = 1;  // .x1 .x2 .x4
  bool transpose = false;
};
Status check_load(const MatrixAccess& access);
Status check_store(const MatrixAccess& access);
int registers(const MatrixAccess& access);
int row_addresses(const MatrixAccess& access);  // lanes whose address counts
int row_bytes(const MatrixAccess& access);      // bytes that each of these rows occupies, and its alignment
void load_matrix(const MatrixAccess& access, const std::byte* window, const uint32_t* addresses, const Row* d);
void store_matrix(const MatrixAccess& access, std::byte* window, const uint32_t* addresses, const ConstRow* a);

// movmatrix.sync.aligned.m8n8.trans.b16
void transpose_matrix(ConstRow a, Row d);

}  // namespace tandem::vgpu::units
