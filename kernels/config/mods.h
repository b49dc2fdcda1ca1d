// The numbered scalars and tensors that score_mods and mask_mods read on a device, and the gradients of the tensors. A
// kernel with modifications has these parameters after all other parameters.
#pragma once

#include "config/backward.h"

enum class ModElement { f64, f32, bf16, f16, i64, i32, boolean };  // same order as score_mod::Element

constexpr int kModRank = 4, kModTensors = 8, kModScalars = 8;  // maxima per modification

struct ModTensor {
  const void* data;
  long long stride[kModRank];  // in elements
  int size[kModRank];          // at least 1
};

struct ModNames {
  ModTensor tensors[kModTensors];
  int scalars[kModScalars];  // bits of a float, or an int
};

struct ModParams {
  ModNames score, mask;
};

// The gradient of an element is an exact sum of float32 numbers, so that its bits do not depend on the order. The sum
// is a fixed-point number of 149 + 128 + 24 bits in kDigits digits; each digit can absorb 2^39 additions. The last word
// records added infinities and NaNs.
constexpr int kDigitBits = 24, kDigits = 12, kCellWords = kDigits + 1, kSumsLog2 = 63 - kDigitBits;

struct CapturedTensor {
  long long first;             // first cell; below 0: gradient not wanted
  void* gradient;              // shape of the tensor in ModNames
  long long stride[kModRank];  // in elements
  long long count;             // elements
  ModElement element;
};

constexpr int kPostprocessCapturedThreads = 256;

// Cells of all tensors with a wanted gradient. Word n of all cells comes before word n + 1.
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
