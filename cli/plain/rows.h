// The elementwise parts of standard attention: conversions, rounding, the exponential of a row.
#pragma once

#include <cstdint>

#include "problem/problem.h"

namespace tandem::plain {

// Converts n numbers of a 16-, 32- or 64-bit float type to float32 and back, rounded to nearest, ties to even.
void load_row(DType type, const std::byte* from, int64_t n, float* to);
void store_row(DType type, const float* from, int64_t n, std::byte* to);

// Rounds each number to the type, in float32. Float32 and float64 need no rounding.
void round_row(DType type, float* row, int64_t n);

float row_max(const float* row, int64_t n);  // -inf when n is 0

float dot_row(const float* a, const float* b, int64_t n);

// Computes row[j] = exp(row[j] - shift), and returns their sum.
float exp_row(float* row, int64_t n, float shift);

}  // namespace tandem::plain
