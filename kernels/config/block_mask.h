// The block mask of a forward or backward. Kernels with a block mask have it after all other parameters.
#pragma once

#include "config/mods.h"

// The number and the indices of the key blocks of each row of query blocks. The caller's lists are unchecked. Strides
// are in elements; 0: broadcast.
struct BlockListParams {
  const int *count, *index;  // or null
  long long count_batch, count_head, count_row;
  long long index_batch, index_head, index_row, index_column;
  int columns;  // entries per row of indices
};

// A tile's iterations are a list in the workspace. The list's header of kListHeader numbers is the length, then the
// number of iterations of each tile of a Blackwell CTA. One entry for each n_block, from the last to the first, has
// n_block << kStateBits and two bits (BlockState) per unit of rows. A final 0 allows a prefetch past the end.
constexpr int kListHeader = 4, kStateBits = 8, kStateUnits = 4, kListBlocksThreads = 128;

struct BlockMaskParams {
  BlockListParams partial, full;
  int block_q;           // queries per block
  int block_n_blocks;    // n_blocks per key block
  int m_blocks;          // per list
  int batch, heads;      // lists: 1 means broadcast
  long long list_words;  // stride from one tile's list to the next
  int* steps;            // [batch][head][m_block]
  int* order;            // output: ForwardParams::tile_order
};

struct BlockMaskedForwardParams : ModifiedForwardParams {
  BlockMaskParams blocks;
};

// A backward has a table: two bits (BlockState) for each list, m_block, n_block and CTA. Higher bits count the earlier
// n_blocks that add to the m_block's dq. `steps` has a list for each n_block of a key head: its length, then m_block *
// heads_q + head of each iteration, then 0.
struct BlockMaskedBackwardParams : ModifiedBackwardParams {
  BlockMaskParams blocks;
  int* table;
};
