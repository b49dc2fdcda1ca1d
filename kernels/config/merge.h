// The parameter of the kernel that merges parts of an attention.
#pragma once

enum class MergeType : unsigned char { f32, bf16, f16 };

// Shape (batch, seqlen, heads[, head_dim]), last dimension contiguous. Strides are in elements.
struct MergeTensor {
  void* data;
  long long batch, row, head;
};

struct MergeParams {
  static constexpr int kMaxParts = 60;                // per launch: a parameter has 4 KB
  static constexpr int kThreads = 128, kColumns = 4;  // threads per CTA, columns per thread

  MergeTensor part_out[kMaxParts], part_lse[kMaxParts];
  MergeTensor out, lse;  // lse.data may be null
  MergeType part_type[kMaxParts], out_type;
  int parts;
  int batch, seqlen, heads, head_dim;
  int lanes;    // lanes per row: power of two <= 32
  int aligned;  // kColumns elements can be loaded at once
};
