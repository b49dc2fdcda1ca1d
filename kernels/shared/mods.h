// What score and mask modifications read on a device beside scores and positions: scalars and tensors, by number. The
// parameter of a kernel with modifications has them behind all else.
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

struct ModifiedForwardParams : ForwardParams {
  ModParams mods;
};
struct ModifiedBackwardParams : BackwardParams {
  ModParams mods;
};
