// What host and device must agree on for a forward kernel. Includes nothing; NVRTC and the host's compiler both read
// it.
#pragma once

enum class Bias { none, boolean, f32, element };  // element: of the type of q

// How a Hopper kernel cuts the problem, and which of its options it is compiled for. A value of this type is the
// kernel's only template parameter.
struct ForwardTile {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 16: at most 256
  int warpgroups = 2;                    // that compute; each has 64 rows. A row is a query of one head
  int keys = 128;                        // of one step, a multiple of 16
  int stages = 2;                        // steps of keys, and of values, that are in shared memory at once
  bool turns = true;                     // warpgroups issue their products in turns (ping-pong)
  bool f16 = false;                      // elements are float16, else bfloat16
  bool left = false, right = false;      // a query may not see all keys before, after it (causal: right)
  bool ragged = false;                   // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;                 // scale <= 0: the largest product is not the largest score
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;

  constexpr int rows() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // Scores are more than scaled products.
  constexpr bool changed() const { return unscaled || softcap || alibi || bias != Bias::none; }
  // Steps that hide nothing take exponentials without a look at the scores (Softmax::look_at_sums). Where that goes
  // wrong, the tile is done again with that look.
  constexpr bool unchecked() const { return !f16 && !changed(); }
  // Exponentials of a thread and step that are taken before the product with the values of the step before is waited
  // for: where that product is short, none; measured.
  constexpr int exponentials_under_values() const {
    if (head_dim_v <= 64) return 0;
    return keys > 64 ? keys / 4 : keys / 2;
  }
  // Columns in shared memory come in blocks of 64, the width of the swizzle.
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int columns_k() const { return blocks(head_dim) * 64; }
  constexpr int columns_v() const { return blocks(head_dim_v) * 64; }
  // Rows of the result that have a place in shared memory: all of a tile, or where there is no room for them those of
  // one warpgroup, which it leaves to the next.
  constexpr int result_rows() const { return bytes(rows()) <= kMostShared ? rows() : 64; }
  constexpr bool result_in_turns() const { return result_rows() < rows(); }
  // Queries in registers spare the tensor core reads of shared memory, where registers suffice: beside them a thread
  // has the result, the scores and the probabilities.
  constexpr bool queries_in_registers() const {
    return head_dim / 4 + head_dim_v / 2 + keys / 2 + keys / 4 <= registers() - (registers() > 160 ? 40 : 28);
  }
  // Of a computing thread, after the loading warpgroup has given its own away.
  constexpr int registers() const {
    const int at_launch = 65536 / threads() / 8 * 8;
    const int most = (threads() * at_launch - 128 * kLoaderRegisters) / (128 * warpgroups) / 8 * 8;
    return most < 240 ? most : 240;
  }
  constexpr int shared_bytes() const { return bytes(result_rows()); }

  static constexpr int kLoaderRegisters = 24;
  static constexpr int kMostShared = 232448;  // of a block
  // Queries, so many rows of the result, keys and values, barriers.
  constexpr int bytes(int of_result) const {
    return 2 * (rows() * columns_k() + of_result * columns_v() + stages * keys * (columns_k() + columns_v())) + 1024;
  }
};

// The same for Blackwell: tiles of 128 rows, whose scores, probabilities and results are in tensor memory, and steps of
// 128 keys. One CTA has two tiles, or, where results are wide, one with two places for scores. Of a pair of CTAs each
// has its own rows, and half of the keys and values for both; wide results are always a pair's.
struct BlackwellTile {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 16: at most 256
  int fma_pairs = 4;                     // of 16 pairs of exponentials, so many are taken on the FMA units
  bool pair = false;                     // two CTAs multiply together
  bool takes_over = false;               // a block for every unit of work; those that run take over the others' (CLC)
  bool f16 = false;                      // elements are float16, else bfloat16
  bool left = false, right = false;      // a query may not see all keys before, after it (causal: right)
  bool ragged = false;                   // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;                 // scale <= 0: the largest product is not the largest score
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;

  static constexpr int kTileRows = 128, keys = 128;
  constexpr int tiles() const { return head_dim <= 192 && head_dim_v <= 128 ? 2 : 1; }
  constexpr int ctas() const { return pair ? 2 : 1; }
  // Rows that are multiplied together, and all rows of a unit of work.
  constexpr int rows_together() const { return ctas() * kTileRows; }
  constexpr int rows() const { return tiles() * rows_together(); }
  constexpr int threads() const { return 128 * (tiles() + 2); }
  constexpr bool changed() const { return unscaled || softcap || alibi || bias != Bias::none; }
  // As Hopper; where a CTA is on its own.
  constexpr bool unchecked() const { return !f16 && !changed() && !pair; }

  // Shared memory: queries and the result in blocks of 16 KB (64 columns of a tile), then a ring of blocks of keys and
  // values. A block of keys has 64 columns of the CTA's keys of a step; one of values has all of its columns, and as
  // many keys as fit.
  static constexpr int kTileBlock = 16384, kMostBytes = 14 * kTileBlock, kMostRing = 16;
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int keys_of_block() const { return keys / ctas(); }
  constexpr int block() const { return keys_of_block() * 128; }
  constexpr int blocks_k() const { return blocks(head_dim); }
  // Columns of values and result, in tensor memory and of one CTA. (A pair's product has a multiple of 32 of them.)
  constexpr int result_columns() const { return pair ? (head_dim_v + 31) / 32 * 32 : head_dim_v; }
  constexpr int columns_v() const { return result_columns() / ctas(); }
  constexpr int keys_of_values() const {
    return keys_of_block() / (blocks(columns_v()) == 3 ? 4 : blocks(columns_v()));
  }
  constexpr int blocks_v() const { return keys / keys_of_values(); }
  constexpr int blocks_out() const { return head_dim <= 128 && tiles() == 2 ? 2 : 1; }
  constexpr int ring() const {
    const int most = (kMostBytes - (tiles() * blocks_k() + blocks_out()) * kTileBlock) / block();
    return most < kMostRing ? most : kMostRing;
  }
  // Beside the blocks: row sums and shifts, tiles under way, barriers.
  static constexpr int kSmall = 3072;
  static constexpr int shared_bytes() { return kMostBytes + kSmall; }
  // Products of a step want the keys while those of the step before want the values.
  constexpr bool ring_suffices() const { return ring() >= blocks_k() + blocks_v(); }

  // Columns of tensor memory: two places for scores, then results. Probabilities, two in a column, take the place of
  // scores from the left, as these are used up.
  static constexpr int kColumns = 512, kScores = 2;
  constexpr int scores_of_tile() const { return kScores / tiles(); }
  static constexpr unsigned scores_at(int place) { return place * keys; }
  static constexpr unsigned probabilities_at(int place) { return scores_at(place); }
  constexpr unsigned result_at(int tile) const { return kScores * keys + tile * result_columns(); }
  constexpr bool columns_suffice() const { return result_at(tiles()) <= kColumns; }

  // Keys of a step whose probabilities are handed over first.
  static constexpr int kFirstPart = 96;

  // Blocks of keys and values need a word of their CTA before the products may read them: to the other CTA of a pair,
  // or since values beyond a sequence have to be cleared.
  constexpr bool relays() const { return pair || ragged; }

  // Registers of a thread, by role.
  constexpr int softmax_registers() const { return tiles() == 2 ? 192 : 240; }
  constexpr int correction_registers() const { return tiles() == 2 ? 72 : 152; }
  constexpr int other_registers() const { return tiles() == 2 ? 56 : 104; }
  constexpr bool registers_suffice() const {
    const int at_launch = 65536 / threads() / 8 * 8;
    return tiles() * softmax_registers() + correction_registers() + other_registers() <= at_launch * (tiles() + 2);
  }
  constexpr bool fits() const {
    return (pair || (tiles() == 2 && !takes_over)) && ring_suffices() && columns_suffice() && registers_suffice();
  }
};

// CUtensorMap: encoded by the host, opaque here.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// One step of the work list of a ragged problem.
struct ForwardWork {
  int sequence, tile;  // rows [tile * rows, ...) of the sequence
};

// The parameter of the kernels. Strides are in elements. Packed tensors have one batch and all rows in it.
struct ForwardParams {
  // q, out: (head_dim, together, seqlen_q, heads_q / together, batch), boxes of 64 columns and 64 rows (Blackwell:
  // 128). k, v: (head_dim, seqlen_k, heads_k, batch), boxes of 64 columns and a step's keys
  // (Blackwell: keys_of_block() and keys_of_values()). Swizzled by 128 bytes.
  TensorMap q, k, v, out;

  void* out_data;  // for tiles that a sequence ends in: ragged only
  long long out_batch, out_row, out_head;
  float* lse;  // or null
  long long lse_batch, lse_row, lse_head;

  const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;  // or null; ragged only
  int cu_seqlens_q_stride, cu_seqlens_k_stride, seqused_q_stride, seqused_k_stride;

  const void* bias;
  long long bias_batch, bias_head, bias_row, bias_column;  // 0: broadcast
  const float* alibi_slopes;
  long long alibi_batch, alibi_head;
  const void* sink;  // or null
  long long sink_head;
  int sink_is_f32;  // else of the type of q

  int batch, heads_q, heads_k;
  int seqlen_q, seqlen_k;  // dense: the dimension; packed: the bound that the caller gave
  int total_q, total_k;    // packed: rows of the tensors
  int together;            // query heads of a key head whose rows are neighbours in a tile: 1, 2, 4, ... 64
  int tiles_m;        // of one head (together: one group of heads) and sequence; ragged: the most there can be of all
                      // sequences
  int tiles;          // of all; ragged: 0, as only the device knows
  int group;          // heads whose tiles are taken together: their keys and values share the L2 cache
  int* counter;       // tiles are taken from it, and it must be 0; null: each block takes every gridDim.x-th tile
  ForwardWork* work;  // ragged: tiles in order, counted by counter[1]

  int bottom_right;                   // the diagonal ends at the last query and key, else it begins at the first
  int window_left, window_right;      // query i sees keys i + offset - left to i + offset + right; within +-2^30
  float scale, scale_log2;            // scale_log2: times log2(e)
  float softcap_log2, scale_softcap;  // softcap times log2(e); 2 log2(e) scale / softcap
  int head_dim_v;                     // the problem's own
};
