// The parameter of the kernel that appends keys and values to a cache and rotates keys and queries.
#pragma once

#include "config/strided_rows.h"

template <class T>
struct Numbers {
  const T* data;  // null: absent
  long long stride;
};

// Rows of new keys, or of queries. Packed rows have cu_seqlens, and dense ones seqlen rows in each sequence.
struct AppendRowsParams {
  Numbers<int> cu_seqlens;
  int total, seqlen, heads;
};

struct AppendKvParams {
  static constexpr int kThreads = 256;
  static constexpr int kMaxRows = 64;   // rows of a CTA
  static constexpr int kBuckets = 256;  // lists of a CTA's slots; a power of two

  StridedRows k, v, k_cache, v_cache, q, q_out;  // k.data and q.data may be null
  AppendRowsParams keys, queries;
  Numbers<long long> slot_mapping, positions;
  Numbers<int> cache_seqlens, cache_batch_idx, rotary_seqlens;
  const int* page_table;
  long long table_batch, table_column;
  int table_rows, max_pages;
  int batch, pages, page_size;
  int head_dim, head_dim_v;
  const void *cos, *sin;
  long long cos_row, sin_row;
  int rotary_dim, rotary_rows;  // rotary_dim 0: no rotation
  ElementType type, table_type;
  bool interleaved, single_q_position;
  bool aligned;       // 16 bytes can be moved at once
  bool by_thread;     // append_by_thread() serves the call
  int rows_of_block;  // rows of a CTA, at most kMaxRows
  int key_blocks;     // CTAs from this number on have queries
};
