// The parameter of the kernels that make a block mask from a mask_mod, which the host fills in.
#pragma once

#include "config/mods.h"

// For each row the number and the indices of its columns: the listed columns come first. Strides are in elements.
struct MadeListParams {
  int *count, *index;  // null: not wanted
  long long count_batch, count_head, count_row;
  long long index_batch, index_head, index_row, index_column;
};

enum class MadeState : unsigned char { empty, partial, full };

// classify_blocks() uses one warp per block, list_blocks() one CTA per row of the lists.
constexpr int kClassifyThreads = 128;

struct MakeBlocksParams {
  ModNames names;
  MadeListParams partial[2], full[2];  // [0]: rows of queries, [1]: rows of keys
  MadeState* states;                   // (batch, heads, blocks_q, blocks_k)
  int batch, heads, seqlen_q, seqlen_k;
  int block_q, block_k, blocks_q, blocks_k;
};
