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
  // Steps that hide nothing take exponentials without a look at the scores (Softmax::step_unchecked). Where that goes
  // wrong, the tile is done again with that look.
  constexpr bool unchecked() const { return !f16 && !changed(); }
  // Exponentials of a thread and step that are taken before the product with the values of the step before is waited
  // for: where that product is short, none; measured.
  constexpr int exponentials_under_values() const {
    if (head_dim_v <= 64) return 0;
    return keys == 128 ? keys / 4 : keys / 2;
  }
  // Columns in shared memory come in blocks of 64, the width of the swizzle.
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int columns_k() const { return blocks(head_dim) * 64; }
  constexpr int columns_v() const { return blocks(head_dim_v) * 64; }
  constexpr int wider_columns() const { return columns_k() > columns_v() ? columns_k() : columns_v(); }
  // A place of its own for the result lets the next tile's queries come in early, where there is room.
  constexpr bool result_apart() const { return bytes(columns_k() + columns_v()) <= kMostShared; }
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
  constexpr int shared_bytes() const { return bytes(result_apart() ? columns_k() + columns_v() : wider_columns()); }

  static constexpr int kLoaderRegisters = 24;
  static constexpr int kMostShared = 232448;  // of a block
  // Columns of queries and result, keys and values, barriers.
  constexpr int bytes(int columns) const {
    return 2 * (rows() * columns + stages * keys * (columns_k() + columns_v())) + 1024;
  }
};

// The same for Blackwell: two tiles of 128 rows, whose scores, probabilities and results are in tensor memory, and
// steps of 128 keys.
struct BlackwellTile {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 16: at most 192 and 128
  int fma_pairs = 4;                     // of 16 pairs of exponentials, so many are taken on the FMA units
  bool f16 = false;                      // elements are float16, else bfloat16
  bool left = false, right = false;      // a query may not see all keys before, after it (causal: right)
  bool ragged = false;                   // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;                 // scale <= 0: the largest product is not the largest score
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;

  static constexpr int kTiles = 2, kTileRows = 128;
  static constexpr int keys = 128;
  static constexpr int rows() { return kTiles * kTileRows; }
  static constexpr int threads() { return 512; }
  constexpr bool changed() const { return unscaled || softcap || alibi || bias != Bias::none; }
  constexpr bool unchecked() const { return !f16 && !changed(); }  // as Hopper

  // Shared memory is cut into blocks of 16 KB: of queries, of the result, and the ring of keys and values. A block of
  // keys has 64 columns of a step; one of values 64 keys, or all 128 where they have 64 columns.
  static constexpr int kBlock = 16384, kMostBlocks = 14;
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int blocks_k() const { return blocks(head_dim); }
  constexpr int blocks_v() const { return blocks(head_dim_v); }
  constexpr int blocks_out() const { return head_dim <= 128 ? 2 : 1; }
  constexpr int ring() const { return kMostBlocks - kTiles * blocks_k() - blocks_out(); }
  constexpr int keys_of_values() const { return keys / blocks_v(); }
  // Beside the blocks: row sums and shifts, tiles under way, barriers.
  static constexpr int kSmall = 3072;
  constexpr int shared_bytes() const { return kMostBlocks * kBlock + kSmall; }
  // Products of a step want the keys while those of the step before want the values.
  constexpr bool ring_suffices() const { return ring() >= blocks_k() + blocks_v(); }

  // Columns of tensor memory: scores of both tiles, then results. Probabilities, two in a column, take the place of
  // scores from the left, as these are used up.
  static constexpr int kColumns = 512;
  static constexpr unsigned scores_at(int tile) { return tile * keys; }
  static constexpr unsigned probabilities_at(int tile) { return scores_at(tile); }
  constexpr unsigned result_at(int tile) const { return kTiles * keys + tile * head_dim_v; }
  constexpr bool columns_suffice() const { return result_at(kTiles) <= kColumns; }

  // Keys of a step whose probabilities are handed over first.
  static constexpr int kFirstPart = 96;

  // Registers of a thread, by role: there are 512 for four warpgroups.
  static constexpr int kSoftmaxRegisters = 192, kCorrectionRegisters = 72, kOtherRegisters = 56;
  static_assert(2 * kSoftmaxRegisters + kCorrectionRegisters + kOtherRegisters <= 65536 / 128);
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
  // q, out: (head_dim, together, seqlen_q, heads_q / together, batch), boxes of 64 columns and a tile's rows (Hopper:
  // out 64; Blackwell: 128). k, v: (head_dim, seqlen_k, heads_k, batch), boxes of 64 columns and a step's keys
  // (Blackwell: v keys_of_values()). Swizzled by 128 bytes.
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

  int bottom_right;               // the diagonal ends at the last query and key, else it begins at the first
  int window_left, window_right;  // query i sees keys i + offset - left to i + offset + right; within +-2^30
  float scale, scale_log2;        // scale_log2: times log2(e)
  float softcap;
  int head_dim_v;  // the problem's own
};
