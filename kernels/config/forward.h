// The parameter of the forward kernels, which the host fills in.
#pragma once

#include "config/place.h"

// CUtensorMap: the host encodes it.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// One entry of the tile list of a varlen problem.
struct ListedTile {
  int sequence, m_block;  // rows [m_block * tile_m, ...) of the sequence
  // T.device_splits: the first row of the split's results, and the split's first n_block. -1: all keys.
  int split_row, split_n_block;
};

constexpr int kSoftcapTerms = 6, kSoftcapNearTerms = 3;  // coefficients: see apply_softcap()

// Dropout: a probability is dropped if its random byte is below the threshold. Kept probabilities are multiplied by
// `scale`.
struct DropoutParams {
  unsigned long long seed, offset;
  const unsigned long long *seed_ptr, *offset_ptr;  // null: the values are used
  unsigned carry;                                   // (256 - threshold) in each byte; the sum carries if kept
  float scale;
};

// Largest scores: their output, and the queries and keys of the kernel that computes scores again
// (device/max_scores.cuh). Strides are in elements.
struct MaxScoresParams {
  float* data;
  long long batch, row, head;
  const void *q_data, *k_data;
  long long q_batch, q_row, q_head, k_batch, k_row, k_head;
  int head_dim;  // head_dim of the problem, without padding
};
constexpr int kMaxScoresRows = 64, kMaxScoresThreads = 128;  // per CTA

// Splits of the keys. With T.split_keys the forward stores the float32 out and lse of each split in the workspace, as
// further sequences of its result tensors. combine_splits() merges them into the following tensors. Strides are in
// elements.
struct SplitParams {
  // The splits of a sequence. T.device_splits: the most for these lengths.
  int count;
  int n_blocks;  // n_blocks per split; T.device_splits: the least
  int batches;   // sequences of the results of one split: 1 when packed
  int lanes;     // threads of combine_splits() per row
  int f32_out;   // float32 out, else the type of q
  void* out;
  long long out_batch, out_row, out_head;
  float* lse;  // or null
  long long lse_batch, lse_row, lse_head;

  // T.device_splits: sequences of at most max_queries queries have at most max_count splits. The results are in rows of
  // (heads_q, head_dim_v) in the workspace: (sequence, split, query), with `count` splits and max_queries queries.
  // combine_splits() visits `queries` queries of a sequence: all that may share a tile with a split.
  int max_count, max_queries, queries;
  float *row_out, *row_lse;
};
// combine_splits(): threads of a CTA, columns of a thread, and lanes of a row if there are many rows.
constexpr int kCombineThreads = 128, kCombineColumns = 4, kFewCombineLanes = 8;
// combine_splits() with few rows: columns of a row that a CTA merges.
constexpr int kCombineCtaColumns = 32;

// Keys and values in pages: keys [i * page_size, (i + 1) * page_size) of a sequence lie in page table[sequence * batch
// + i * column]. The values of the table are unchecked.
// The maps of k and v are (head_dim, page_size, heads_k, pages).
struct PageParams {
  const int* table;
  int batch, column;     // strides
  int page_size, pages;  // rows of a page; number of pages
};

// T.gathers_pages: values in pages. Strides are in units of kUnit elements. MaxScoresParams has the keys.
struct PagedValues {
  static constexpr int kUnit = 8;
  const void* data;
  unsigned page, row, head;
};

// The parameter of the forward kernels. Strides are in elements. Packed tensors have one batch with all rows.
struct ForwardParams {
  // q, out: (head_dim, pack_gqa, seqlen_q, heads_q / pack_gqa, batch), boxes of 64 columns (float32 out: 32) and 64
  // rows (Blackwell: 128). k, v: (head_dim, seqlen_k, heads_k, batch), boxes of 64 columns and an iteration's keys
  // (Blackwell: k_block_rows(), v_block_rows()). All use the 128-byte swizzle. PageParams has the shapes in pages.
  TensorMap q, k, v, out;

  void* out_data;  // varlen: last tiles of sequences; Hopper: float32 results
  long long out_batch, out_row, out_head;
  float* lse;  // or null
  long long lse_batch, lse_row, lse_head;

  const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;  // null: absent; varlen only
  int cu_seqlens_q_stride, cu_seqlens_k_stride, seqused_q_stride, seqused_k_stride;

  const void* bias;
  long long bias_batch, bias_head, bias_row, bias_column;  // 0: broadcast
  const float* alibi_slopes;
  long long alibi_batch, alibi_head;
  const void* sink;  // or null
  long long sink_head;
  int sink_is_f32;  // else the type of q

  int batch, heads_q, heads_k;
  int seqlen_q, seqlen_k;       // dense: exact; packed: the caller's bound
  int total_q, total_k;         // packed: rows of the tensors
  int pack_gqa;                 // query heads of a key head in one tile: power of two <= 128
  const int* tile_order;        // block mask: m_blocks by falling number of iterations
  int order_batch, order_head;  // strides between lists; 0: broadcast
  // m_blocks: of one (packed) head and sequence; varlen: an upper bound over all sequences.
  int m_blocks;
  int tiles;              // 0: known only on the device (varlen)
  int l2_heads;           // heads whose K and V share the L2 cache
  int* counter;           // next tile, starts at 0; null: every gridDim.x-th tile
  ListedTile* tile_list;  // varlen: sorted tiles, whose number is counter[1]; or null

  int bottom_right;             // offset = seqlen_k - seqlen_q, else explicit
  long long diagonal_offset;    // explicit offset in keys, added to diagonal_offsets
  const int* diagonal_offsets;  // [sequence]; varlen only
  int diagonal_offsets_stride;
  int window_left, window_right;      // i + offset - left <= j <= i + offset + right; |x| <= 2^30
  float scale, scale_log2;            // scale_log2: times log2(e)
  float softcap_log2, scale_softcap;  // softcap times log2(e); 2 log2(e) scale / softcap
  float softcap_inverse;              // 1 / softcap_log2
  // Products below softcap_product use a polynomial of their square; products below softcap_near_product use fewer
  // terms.
  float softcap_product, softcap_near_product;
  float softcap_polynomial[kSoftcapTerms], softcap_near_polynomial[kSoftcapNearTerms];
  int head_dim_v;  // head_dim_v of the problem, without padding
  DropoutParams dropout;
  MaxScoresParams max_scores;  // with T.max_scores
  SplitParams split;           // with T.split_keys or T.device_splits
  PageParams pages;            // with T.page_rows
  PagedValues values;          // with T.gathers_pages
  const Place* places;         // with T.options.placed: [sequence]
};

// The parameter of kernels with a bias that TMA loads: (seqlen_k, seqlen_q, heads or 1, batch or 1). Boxes have an
// iteration's keys and 8 more, and 64 rows / T.bias_ctas. The boxes are not swizzled.
struct BiasedForwardParams : ForwardParams {
  TensorMap bias_map;
};
