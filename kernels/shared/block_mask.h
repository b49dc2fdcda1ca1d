// What a forward with a block mask is told of it. The parameter of such a kernel has it behind all else.
#pragma once

#include "shared/mods.h"

// For each block of queries how many blocks of keys a row has, and which. As the caller gave them: they may hold
// anything. Strides are in elements; 0: broadcast.
struct BlockListParams {
  const int *count, *index;  // or null
  long long count_batch, count_head, count_row;
  long long index_batch, index_head, index_row, index_column;
  int columns;  // of a row of indices
};

// A tile's steps are a list in the workspace: kStepHeader numbers, which are how many there are and how many each of
// its (one or two) tiles of a Blackwell CTA takes part in, then an entry for each n_block that some row looks at, from
// the last to the first: n_block << kStepBits, and two bits (StepState) for each unit of its rows; then a 0, so that
// reading ahead needs no question.
constexpr int kStepHeader = 4, kStepBits = 8, kStepUnits = 4, kListStepsThreads = 128;

struct BlockMaskParams {
  BlockListParams partial, full;
  int block_q;           // queries of a block
  int block_n_blocks;    // n_blocks of one
  int m_blocks;          // that a list has: those of a sequence
  int batch, heads;      // that have lists of their own: 1, or all
  long long list_words;  // from one tile's steps to the next
  int* steps;            // by batch, head and m_block
  int* order;            // of a forward whose lengths the host knows: ForwardParams::tile_order, to be written
};

struct BlockMaskedForwardParams : ModifiedForwardParams {
  BlockMaskParams blocks;
};

// A backward has a table: for each list, m_block and n_block two bits (StepState) for each CTA's keys, and above them
// how many n_blocks before it the m_block looks at: those add to its dq first. And of each sequence, key head and
// n_block a list of its steps: how many, then m_block * heads_q + head of each, then a 0.
// There `steps` are the latter, list_words theirs, and blocks count the keys of a CTA.
struct BlockMaskedBackwardParams : ModifiedBackwardParams {
  BlockMaskParams blocks;
  int* table;
};
