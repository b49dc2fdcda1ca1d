// The parameter of the kernels that make a block mask from a mask_mod, which the host fills in.
#pragma once

#include "shared/mods.h"

// For each row how many columns, and which: those of the list first, then the others. Strides are in elements.
struct MadeListParams {
  int *count, *index;  // or null: not wanted
  long long count_batch, count_head, count_row;
  long long index_batch, index_head, index_row, index_column;
};

enum class MadeState : unsigned char { empty, partial, full };

// classify_blocks() has a warp for each block, list_blocks() a block of threads for each row of the lists.
constexpr int kClassifyThreads = 128;

struct MakeBlocksParams {
  ModNames names;
  MadeListParams partial[2], full[2];  // of rows of queries, of rows of keys
  MadeState* states;                   // (batch, heads, blocks_q, blocks_k)
  int batch, heads, seqlen_q, seqlen_k;
  int block_q, block_k, blocks_q, blocks_k;
};
