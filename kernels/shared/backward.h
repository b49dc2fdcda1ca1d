// The parameter of the backward kernels, which the host fills in.
#pragma once
#include "shared/forward.h"

// What a forward has been given, and more: dq is summed in float32, m_block by m_block, in the order in which threads
// hold it. q and dout are boxes of 64 columns and a step's queries, k and v of 64 columns and a CTA's keys, dk and dv
// of 64 columns and 64 keys. m_blocks counts those of a head over all sequences; tiles are n_blocks of key heads.
struct BackwardParams : ForwardParams {
  TensorMap dout, dk, dv;

  const void *out_given, *dout_data;  // for the sums of their products
  long long dout_batch, dout_row, dout_head;
  const float* dlse;  // or null
  long long dlse_batch, dlse_row, dlse_head;
  void* dq;  // or null
  long long dq_batch, dq_row, dq_head;

  int sequence_m_blocks;  // dense: of a sequence
  int n_blocks;           // of a sequence, the most there can be
  int diagonal_heads;     // taken from_diagonal (tile/key_tile.cuh): so many, over the batch (by_head: query heads)
  int splits;             // of an n_block's steps, one in each tile
  int has_dk, has_dv;     // they are wanted

  void *dk_data, *dv_data;  // for tiles that a sequence ends in: varlen only
  long long dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head;

  // Of each (query head, m_block):
  float* stats;     // of its queries -lse in log2 units, then delta = sum of dout * out, less dlse
  float* dq_sums;   // Sm90BackwardConfig::dq_floats()
  int* dq_tickets;  // n_blocks that have been added
  // Of each (sequence, key head, n_block), and of each split, but by_head: Sm90BackwardConfig::key_floats().
  float* key_sums;
  int* key_tickets;  // by_head: heads that have been added; Sm90BackwardConfig::key_tickets() of a CTA's n_block
  int key_ticket_count;
  // Sm90BackwardConfig::strips: dS of a strip, which has so many query heads (over the batch) with all of their
  // n_blocks, or n_blocks of one head: tile/strip.cuh. counter[1] is the strip's number, counter[2] counts who knows
  // it.
  void* ds;  // or null: dq is not wanted
  int strip_heads, strip_n_blocks, strip_row_n_blocks, strip_folds;
  int head_dim;  // the problem's own

  void* dsink;  // or null
  long long dsink_head;
  int dsink_is_f32;         // else of the type of q
  float* dsink_of_m_block;  // of each (query head, m_block)

  // Which of these are of float32, else of the type of q; and whether gradients are added to what is there.
  int out_is_f32, dout_is_f32, dq_is_f32, dk_is_f32, dv_is_f32, dbias_is_f32, accumulate;
  void* dout_rounded;  // dout in the type of q, for products: compact, as dout is; null where dout is

  void* dbias;                                                // or null
  int dbias_batches, dbias_heads, dbias_rows, dbias_columns;  // 1: summed over
  long long dbias_batch, dbias_head, dbias_row, dbias_column;
};
