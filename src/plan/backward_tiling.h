// The schedule of a backward for one problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/backward_tile.h"

namespace tandem::plan {

struct BackwardTiling {
  BackwardTile tile;
  int m_blocks = 0;           // per query head, over all sequences
  int sequence_m_blocks = 0;  // dense: per sequence
  int n_blocks = 0;           // per sequence, an upper bound
  int splits = 1;             // parts of an n_block's iterations; kConvertEntry sums them
  int tiles = 0;              // splits of n_blocks of all key heads and sequences
  int key_ticket_count = 0;   // BackwardParams
  int diagonal_heads = 0;     // heads that start at the diagonal: BackwardParams
  int l2_heads = 1;           // key heads whose n_blocks run together
  int grid = 0;

  // dS in global memory. A strip has query heads or n_blocks of one head; a row has n_blocks and may be shared by two
  // m_blocks (tile/strip.cuh).
  int strip_heads = 0, strip_n_blocks = 0, strip_row_n_blocks = 0;
  bool strip_folds = false;
  int64_t strips = 0, strip_bytes = 0;
  int64_t dbias_blocks = 0;     // parts of dbias, one CTA each
  int64_t captured_blocks = 0;  // blocks of keys per query head for score_mod, one CTA each

  // Block mask: batch and heads of the lists, and the words of an n_block's list.
  int list_batch = 0, list_heads = 0;
  int64_t list_words = 0;  // 0: no list

  // Offsets in the workspace; the tile counter is at 0.
  size_t tickets_offset = 0, stats_offset = 0, sums_offset = 0, dsink_offset = 0, dout_offset = 0, key_sums_offset = 0,
         key_tickets_offset = 0, captured_offset = 0, table_offset = 0, steps_offset = 0, ds_offset = 0;
};

}  // namespace tandem::plan
