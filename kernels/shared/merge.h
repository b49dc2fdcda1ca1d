// The parameter of the kernel that merges parts of an attention, which the host fills in.
#pragma once

enum class MergeType : unsigned char { f32, bf16, f16 };

// (batch, seqlen, heads[, head_dim]) with a contiguous last dimension; strides in elements.
struct MergeTensor {
  void* data;
  long long batch, row, head;
};

struct MergeParams {
  static constexpr int kMostParts = 60;               // of one launch: a parameter has 4 KB
  static constexpr int kThreads = 128, kColumns = 4;  // of a block; that a thread has at once

  MergeTensor part_out[kMostParts], part_lse[kMostParts];
  MergeTensor out, lse;  // lse.data: or null
  MergeType part_type[kMostParts], out_type;
  int parts;
  int batch, seqlen, heads, head_dim;
  int lanes;    // that share a row: a power of two, at most 32
  int aligned;  // kColumns neighbours can be moved at once, wherever they lie
};
