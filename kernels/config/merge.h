// The parameter of the kernel that merges parts of an attention.
#pragma once

#include "config/strided_rows.h"

struct MergeParams {
  static constexpr int kMaxParts = 60;                // per launch: a parameter has 4 KB
  static constexpr int kThreads = 128, kColumns = 4;  // threads per CTA, columns per thread

  StridedRows part_out[kMaxParts], part_lse[kMaxParts];
  StridedRows out, lse;  // lse.data may be null
  ElementType part_type[kMaxParts], out_type;
  int parts;
  int batch, seqlen, heads, head_dim;
  int lanes;    // lanes per row: power of two <= 32
  int aligned;  // kColumns elements can be loaded at once
  int sum;      // adds the parts, which have no lse
};
