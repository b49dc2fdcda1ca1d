// How a backward goes through a problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/backward_tile.h"

namespace tandem::plan {

struct BackwardTiling {
  BackwardTile tile;
  int m_blocks = 0;           // of a query head, over all sequences
  int sequence_m_blocks = 0;  // dense: of a sequence
  int n_blocks = 0;           // of a sequence, the most there can be
  int splits = 1;             // of an n_block's steps, whose dk and dv are summed by kConvertEntry
  int tiles = 0;              // splits of n_blocks of all key heads and sequences
  int key_ticket_count = 0;   // BackwardParams
  int diagonal_heads = 0;     // heads, over the batch, whose steps begin at the diagonal: BackwardParams
  int l2_heads = 1;           // key heads whose n_blocks are taken together
  int grid = 0;

  // Where dS goes to memory: a strip has so many query heads, over the batch, with all of their n_blocks, or n_blocks
  // of one head; how many n_blocks of a row have a place, and whether two m_blocks share one: tile/strip.cuh.
  int strip_heads = 0, strip_n_blocks = 0, strip_row_n_blocks = 0;
  bool strip_folds = false;
  int64_t strips = 0, strip_bytes = 0;
  int64_t dbias_blocks = 0;     // parts of dbias that one CTA each sums
  int64_t captured_blocks = 0;  // of keys of a query head, for what score_mod reads: one CTA each

  // Of a block mask: batch and heads that have lists of their own, and the words of an n_block's steps.
  int list_batch = 0, list_heads = 0;
  int64_t list_words = 0;  // 0: there is none, or nothing to list

  // In the workspace; the counter of tiles is at 0.
  size_t tickets_offset = 0, stats_offset = 0, sums_offset = 0, dsink_offset = 0, dout_offset = 0, key_sums_offset = 0,
         key_tickets_offset = 0, captured_offset = 0, table_offset = 0, steps_offset = 0, ds_offset = 0;
};

}  // namespace tandem::plan
