// The elementwise parts of standard attention: conversions, rounding, the exponential of a row.
#pragma once

#include <cstdint>

#include "problem/problem.h"

namespace tandem::plain {

// n numbers of a 16-, 32- or 64-bit float type to float32 and back, rounded to nearest, ties to even.
void load_row(DType type, const std::byte* from, int64_t n, float* to);
void store_row(DType type, const float* from, int64_t n, std::byte* to);

// Each number to the nearest of the type, staying float32. Nothing to do for float32 and float64.
void round_row(DType type, float* row, int64_t n);

float row_max(const float* row, int64_t n);  // -inf when n is 0

float dot_row(const float* a, const float* b, int64_t n);

// row[j] = exp(row[j] - shift); returns their sum.
float exp_row(float* row, int64_t n, float shift);

}  // namespace tandem::plain
