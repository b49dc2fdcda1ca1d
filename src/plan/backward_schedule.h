// The schedule of a backward for one problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/backward_kernel.h"

namespace tandem::plan {

// A part of dS that is in memory at once (device/ds_chunk.cuh). Such a chunk has all n_blocks of `heads` query heads,
// or `n_blocks` of one head. all_heads: BackwardParams::ds_heads.
struct ChunkSizes {
  int64_t heads = 0, all_heads = 0;  // heads 0: no division keeps dS within its budget
  int64_t n_blocks = 0;
  int64_t row_n_blocks = 0;  // n_blocks that a row of dS has space for
  int64_t bytes = 0;
  int64_t tile_heads = 1;      // query heads of a group that one tile iterates over
  int64_t sum_n_blocks = 1;    // n_blocks of one sum of dq
  bool pack_triangle = false;  // two m_blocks share a row of dS
};

struct BackwardSchedule {
  BackwardKernel tile;
  int m_blocks = 0;             // per query head, over all sequences
  int sequence_m_blocks = 0;    // dense: per sequence
  int n_blocks = 0;             // per sequence, an upper bound
  int m_splits = 1;             // parts of a split n_block; EntryId::postprocess sums them
  int unsplit_tiles = 0;        // tiles before the split n_blocks
  int split_n_blocks = 0;       // n_blocks of all heads with m_splits
  int part_n_blocks = 0;        // n_blocks of a part (DiagonalParts); 0: others
  int head_parts = 1;           // parts of the query heads that share keys, with part_n_blocks
  int dq_splits = 1;            // separate sums of dq
  int tiles = 0;                // unsplit tiles and m_splits tiles for each split n_block
  int dkv_semaphore_count = 0;  // BackwardParams
  int spt_heads = 0;            // heads that start at the diagonal: see BackwardParams
  int l2_heads = 1;             // key heads whose n_blocks run together
  int grid = 0;

  ChunkSizes chunk;  // dS in global memory
  int64_t ds_chunks = 0;
  int ds_semaphore_count = 0;  // BackwardParams
  int64_t dq_ctas = 0;         // CTAs of the kernel that computes dq from a chunk; 0: none
  int dq_smem_bytes = 0;
  bool accumulates_dq = true;   // dq_accum holds partial sums
  int64_t dbias_blocks = 0;     // parts of dbias, one CTA each
  int64_t captured_blocks = 0;  // blocks of keys per query head for score_mod, one CTA each

  // Block mask: batch and heads of the lists, and the words of an n_block's list.
  int list_batch = 0, list_heads = 0;
  int64_t list_words = 0;  // 0: no list

  // Offsets in the workspace; the tile counter is at 0.
  size_t dq_semaphore_offset = 0, lse_delta_offset = 0, dq_accum_offset = 0, dsink_offset = 0, dout_offset = 0,
         dkv_accum_offset = 0, dkv_semaphore_offset = 0, captured_offset = 0, table_offset = 0, steps_offset = 0,
         ds_offset = 0, ds_semaphore_offset = 0;
};

}  // namespace tandem::plan
