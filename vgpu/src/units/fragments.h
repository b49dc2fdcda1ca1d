// The operands of wgmma and mma.sync in the registers of a warp. PTX ISA, "Register Fragments and Shared Memory Matrix
// Layouts" and "Matrix Fragments for mma". Dense sides are row-major without gaps.
//
// A: register r of lane t holds row t / 4 (+ 8 if r is odd, of 16 rows). The register's E elements begin at k = E (t %
// 4) (+ 4 E per pair of registers). B: the same with column t / 4. Accumulators: register r holds row t / 4 + 8 (r / 2
// % 2) and column 2 (t % 4) + r % 2 + 8 (r / 4). Two f16 accumulators share a register.
#pragma once

#include <cstdint>

#include "vgpu/src/units/wgmma.h"

namespace tandem::vgpu::units {

// Copies A of `rows` (8 or 16) x k: to[row * k + k].
void rows_from_fragment(Format format, int rows, int k, const ConstRow* registers, float* to);
void rows_from_fragment(Format format, int rows, int k, const ConstRow* registers, int32_t* to);

// Copies B of k x 8 columns: to[k * 8 + column].
void columns_from_fragment(Format format, int k, const ConstRow* registers, float* to);
void columns_from_fragment(Format format, int k, const ConstRow* registers, int32_t* to);

// Copies sums of 16 rows x n (s32 also: 8 rows).
void sums_from_fragment(Sum sum, int n, const ConstRow* registers, float* to);
void sums_from_fragment(Sum sum, int n, const ConstRow* registers, int32_t* to, int rows = 16);
void sums_to_fragment(Sum sum, int n, const float* from, const Row* registers);
void sums_to_fragment(Sum sum, int n, const int32_t* from, const Row* registers, int rows = 16);

}  // namespace tandem::vgpu::units
