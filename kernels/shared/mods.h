// What score and mask modifications read on a device beside scores and positions: scalars and tensors, by number; and
// where the gradients of tensors go. The parameter of a kernel with modifications has them behind all else.
#pragma once

#include "shared/backward.h"

enum class ModElement { f64, f32, bf16, f16, i64, i32, boolean };  // as mods::Element

constexpr int kModRank = 4, kModTensors = 8, kModScalars = 8;  // of one text

struct ModTensor {
  const void* data;
  long long stride[kModRank];  // in elements
  int size[kModRank];          // at least 1
};

struct ModNames {
  ModTensor tensors[kModTensors];
  int scalars[kModScalars];  // the bits of a float, or an int
};

struct ModParams {
  ModNames score, mask;
};

// The gradient of an element is an exact sum of float32 numbers, in the same bits whatever the order: a fixed-point
// number with a bit for each that float32 has, kept in digits of which each has room for 2^39 additions (the least
// number is 2^-149; 149 + 128 + 24 bits). A last word says which infinities and NaN were added.
constexpr int kDigitBits = 24, kDigits = 12, kCellWords = kDigits + 1, kSumsLog2 = 63 - kDigitBits;

struct CapturedTensor {
  long long first;             // cell of its first element; below 0: its gradient is not wanted
  void* gradient;              // as its tensor in ModNames, but for this:
  long long stride[kModRank];  // in elements
  long long count;             // of elements
  ModElement element;
};

constexpr int kConvertCapturedThreads = 256;

// Cells are those of all tensors whose gradients are wanted. Words lie by number: word n of all cells, then n + 1.
struct CapturedParams {
  unsigned long long* words;
  long long cells;
  CapturedTensor tensors[kModTensors];
};

struct ModifiedForwardParams : ForwardParams {
  ModParams mods;
};
struct ModifiedBackwardParams : BackwardParams {
  ModParams mods;
  CapturedParams captured;
};
