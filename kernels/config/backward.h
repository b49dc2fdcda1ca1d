// The parameter of the backward kernels, which the host fills in.
#pragma once
#include "config/forward.h"

// The backward's parameters in addition to the forward's. dq is summed in float32 per m_block, in the fragment order of
// the threads. TMA boxes have 64 columns. A box's rows: q and dout have an iteration's queries, k and v a CTA's keys,
// dk and dv 64 keys.
struct BackwardParams : ForwardParams {
  TensorMap dout, dk, dv;
  TensorMap qt, kt;  // two_cta_ring(): boxes of 32 columns, 128 rows

  const void *out_given, *dout_data;  // inputs of delta
  long long dout_batch, dout_row, dout_head;
  const float* dlse;  // or null
  long long dlse_batch, dlse_row, dlse_head;
  void* dq;  // or null
  long long dq_batch, dq_row, dq_head;

  int sequence_m_blocks;  // dense: per sequence
  int n_blocks;           // per sequence, an upper bound
  int spt_heads;          // heads with spt (split_q_heads: query heads)
  int m_splits;           // parts of an n_block's iterations, one per tile
  int unsplit_tiles;      // tiles before the split n_blocks (not split_q_heads)
  int part_n_blocks;      // DiagonalParts: n_blocks of a part
  int head_parts;         // DiagonalParts: m_splits / dq_splits, parts of query heads
  int has_dk, has_dv;     // 0: not wanted

  void *dk_data, *dv_data;  // varlen: for tiles at the end of a sequence
  long long dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head;

  // For each (query head, m_block):
  float* lse_delta;   // -lse in log2 units, then delta = sum(dout * out) - dlse
  float* dq_accum;    // Sm90BackwardConfig::dq_floats()
  int* dq_semaphore;  // number of n_blocks added so far
  // Sm90BackwardConfig::dq_split: the number of sums of dq. Each has its own dq_accum and dq_semaphore, and
  // bwd_postprocess adds them in order. n_blocks that run at once then rarely add to the same sum.
  int dq_splits;
  // For each split of an n_block (split_q_heads: for each n_block): Sm90BackwardConfig::dkv_floats().
  float* dkv_accum;
  int* dkv_semaphore;  // split_q_heads: number of heads added so far
  int dkv_semaphore_count;
  // ds_gmem(): dS of one chunk (device/ds_chunk.cuh): all n_blocks of several query heads, or several n_blocks of one
  // head. counter[1] is the chunk's number, counter[2] the number of dq's CTAs that have ended, counter[3] (Hopper) the
  // number of tiles whose dS is complete.
  void* ds;           // null: dq is not wanted
  int ds_heads;       // query heads that chunks divide (DsChunk)
  int* ds_semaphore;  // for each (query head, n_block): tiles whose dS is complete
  int ds_semaphore_count;
  int chunk_heads, chunk_n_blocks, ds_row_stride, pack_triangle;
  int dq_sum_n_blocks;  // n_blocks of one sum of dq
  int head_dim;         // head_dim of the problem, without padding

  void* dsink;  // or null
  long long dsink_head;
  int dsink_is_f32;    // else the type of q
  float* dsink_parts;  // [query head][m_block][CTA of bwd_preprocess]

  // Nonzero: the tensor is float32; 0: it has the type of q. accumulate: gradients are added to the contents of their
  // tensors.
  int out_is_f32, dout_is_f32, dq_is_f32, dk_is_f32, dv_is_f32, dbias_is_f32, accumulate;
  void* dout_rounded;  // dout rounded to the type of q, compact; null: not needed

  void* dbias;                                                // or null
  int dbias_batches, dbias_heads, dbias_rows, dbias_columns;  // 1: summed over
  long long dbias_batch, dbias_head, dbias_row, dbias_column;
};
