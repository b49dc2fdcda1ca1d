// The parameter of the forward kernels, which the host fills in.
#pragma once

// CUtensorMap: encoded by the host, opaque here.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// One step of the work list of a varlen problem.
struct ListedTile {
  int sequence, m_block;  // rows [m_block * tile_m, ...) of the sequence
};

constexpr int kSoftcapTerms = 6, kSoftcapNearTerms = 3;  // of polynomials for tanh: apply_softcap()

// Which probabilities are dropped: those whose random byte is below a threshold. The others count `scale` times.
struct DropoutParams {
  unsigned long long seed, offset;
  const unsigned long long *seed_ptr, *offset_ptr;  // or null; else what is there counts instead
  unsigned carry;  // 256 less the threshold, in each byte: what carries from a byte that is kept
  float scale;
};

// Largest scores: where they go, and the queries and keys that they are made of anew (tile/max_scores.cuh). Strides are
// in elements.
struct MaxScoresParams {
  float* data;
  long long batch, row, head;
  const void *q_data, *k_data;
  long long q_batch, q_row, q_head, k_batch, k_row, k_head;
  int head_dim;  // the problem's own
};
constexpr int kMaxScoresRows = 64, kMaxScoresThreads = 128;  // of a block

// The parameter of the kernels. Strides are in elements. Packed tensors have one batch and all rows in it.
struct ForwardParams {
  // q, out: (head_dim, pack_gqa, seqlen_q, heads_q / pack_gqa, batch), boxes of 64 columns (a float32 out: 32) and 64
  // rows (Blackwell: 128). k, v: (head_dim, seqlen_k, heads_k, batch), boxes of 64 columns and a step's keys
  // (Blackwell: k_block_rows() and v_block_rows()). Swizzled by 128 bytes.
  TensorMap q, k, v, out;

  void* out_data;  // for tiles that a sequence ends in, of varlen problems; Hopper: for all of a float32 result
  long long out_batch, out_row, out_head;
  float* lse;  // or null
  long long lse_batch, lse_row, lse_head;

  const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;  // or null; varlen only
  int cu_seqlens_q_stride, cu_seqlens_k_stride, seqused_q_stride, seqused_k_stride;

  const void* bias;
  long long bias_batch, bias_head, bias_row, bias_column;  // 0: broadcast
  const float* alibi_slopes;
  long long alibi_batch, alibi_head;
  const void* sink;  // or null
  long long sink_head;
  int sink_is_f32;  // else of the type of q

  int batch, heads_q, heads_k;
  int seqlen_q, seqlen_k;       // dense: the dimension; packed: the bound that the caller gave
  int total_q, total_k;         // packed: rows of the tensors
  int pack_gqa;                 // query heads of a key head whose rows are neighbours in a tile: 1, 2, 4, ... 64
  const int* tile_order;        // with a block mask: of each list its m_blocks, those of most steps first
  int order_batch, order_head;  // from one list to the next; 0: it is that of all
  int m_blocks;           // of one head (packed: one group of heads) and sequence; varlen: the most there can be of all
                          // sequences
  int tiles;              // of all; varlen: 0, as only the device knows
  int l2_heads;           // heads whose tiles are taken together: their keys and values share the L2 cache
  int* counter;           // tiles are taken from it, and it must be 0; null: each block takes every gridDim.x-th tile
  ListedTile* tile_list;  // varlen: tiles in order, counted by counter[1]

  int bottom_right;             // the diagonal ends at the last query and key, else it is explicit:
  long long diagonal_offset;    // its offset or, with those, what is added to each; 0: it begins at the first
  const int* diagonal_offsets;  // of each sequence, or null; varlen only
  int diagonal_offsets_stride;
  int window_left, window_right;      // query i sees keys i + offset - left to i + offset + right; within +-2^30
  float scale, scale_log2;            // scale_log2: times log2(e)
  float softcap_log2, scale_softcap;  // softcap times log2(e); 2 log2(e) scale / softcap
  float softcap_inverse;              // of softcap_log2
  // Products below it have a polynomial for their capped score, of their square and times them; those near 0 one of
  // fewer terms.
  float softcap_product, softcap_near_product;
  float softcap_polynomial[kSoftcapTerms], softcap_near_polynomial[kSoftcapNearTerms];
  int head_dim_v;  // the problem's own
  DropoutParams dropout;
  MaxScoresParams max_scores;  // if the configuration has them
};

// That of kernels to which TMA brings a bias: (seqlen_k, seqlen_q, heads or 1, batch or 1), boxes of a step's keys and
// 8 more and of 64 rows / T.bias_ctas, not swizzled.
struct BiasedForwardParams : ForwardParams {
  TensorMap bias_map;
};
