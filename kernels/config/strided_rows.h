// Tensors whose element type a kernel reads at run time.
#pragma once

enum class ElementType : unsigned char { f32, bf16, f16, boolean };

// Shape (batch, seqlen, heads[, head_dim]), last dimension contiguous. Strides are in elements.
struct StridedRows {
  void* data;
  long long batch, row, head;
};
