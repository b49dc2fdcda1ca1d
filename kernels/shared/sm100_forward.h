// How a Blackwell forward kernel is cut, and what follows from that: sizes, registers, shared and tensor memory.
#pragma once
#include "shared/score_options.h"

// Tiles of 128 rows, whose scores, probabilities and results are in tensor memory, and steps of
// 128 keys. One CTA has two tiles, or, where results are wide, one with two places for scores. Of a pair of CTAs each
// has its own rows, and half of the keys and values for both; wide results are always a pair's.
struct Sm100ForwardConfig {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 16: at most 256
  int fma_pairs = 4;                     // of 16 pairs of exponentials, so many are taken on the FMA units
  bool pair = false;                     // two CTAs multiply together
  bool clc = false;                      // a block for every work tile; those that run take over the others' (CLC)
  bool f32_out = false;                  // the result is float32, else of the type of elements
  bool dropout = false;                  // of probabilities, before they meet values
  bool block_mask = false;               // n_blocks are those that lists name: tile/block_mask.cuh
  bool max_scores = false;               // of each row, by a kernel beside this one: tile/max_scores.cuh
  bool f16 = false;                      // elements are float16, else bfloat16
  bool left = false, right = false;      // a query may not see all keys before, after it (causal: right)
  bool varlen = false;                   // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;                 // scale <= 0: the largest product is not the largest score
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;
  bool score_mod = false, mask_mod = false;  // functions that were printed for this kernel: tile/mod_functions.cuh

  static constexpr int kTileM = 128, tile_n = 128;
  constexpr int q_tiles() const { return head_dim <= 192 && head_dim_v <= 128 ? 2 : 1; }
  constexpr int ctas() const { return pair ? 2 : 1; }
  // Rows that are multiplied together, and all rows of a work tile.
  constexpr int mma_m() const { return ctas() * kTileM; }
  constexpr int tile_m() const { return q_tiles() * mma_m(); }
  constexpr int threads() const { return 128 * (q_tiles() + 2); }
  constexpr bool has_score_mod() const {
    return unscaled || softcap || alibi || bias != Bias::none || score_mod || (mask_mod && !block_mask);
  }
  static constexpr bool overlaps_launches() { return false; }
  // As Hopper's.
  static constexpr int step_rows() { return kTileM; }
  constexpr int step_units() const { return q_tiles() * ctas(); }
  constexpr int step_tiles() const { return q_tiles(); }
  // As Hopper; where a CTA has two tiles, and both of a pair can say that a work tile is to be done again (load.cuh).
  // Not of pairs with a block mask.
  constexpr bool lazy_max() const {
    return !f16 && !has_score_mod() && !dropout && q_tiles() == 2 && !clc && !(pair && block_mask);
  }

  // Shared memory: queries and the result in blocks of 16 KB (128 bytes of a tile's rows), then a ring of blocks of
  // keys and values. A block of keys has 64 columns of the CTA's keys of a step; one of values has all of its columns,
  // and as many keys as fit.
  static constexpr int kTileBlockBytes = 16384, kMaxBlockBytes = 14 * kTileBlockBytes, kMaxRingSlots = 16;
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int k_block_rows() const { return tile_n / ctas(); }
  constexpr int block_bytes() const { return k_block_rows() * 128; }
  constexpr int k_blocks() const { return blocks(head_dim); }
  // Columns of values and result, in tensor memory and of one CTA. (A pair's product has a multiple of 32 of them.)
  constexpr int o_columns() const { return pair ? (head_dim_v + 31) / 32 * 32 : head_dim_v; }
  constexpr int columns_v() const { return o_columns() / ctas(); }
  constexpr int v_block_rows() const { return k_block_rows() / (blocks(columns_v()) == 3 ? 4 : blocks(columns_v())); }
  constexpr int v_blocks() const { return tile_n / v_block_rows(); }
  // Columns of the result that are 128 bytes: the width of a block.
  constexpr int o_block_columns() const { return f32_out ? 32 : 64; }
  constexpr int o_blocks() const { return head_dim <= 128 && q_tiles() == 2 ? 2 : 1; }
  constexpr int ring_slots() const {
    const int most = (kMaxBlockBytes - (q_tiles() * k_blocks() + o_blocks()) * kTileBlockBytes) / block_bytes();
    return most < kMaxRingSlots ? most : kMaxRingSlots;
  }
  // Beside the blocks: row sums and shifts, tiles under way, barriers.
  static constexpr int kSmallBytes = 3072;
  static constexpr int smem_bytes() { return kMaxBlockBytes + kSmallBytes; }
  // Products of a step want the keys while those of the step before want the values.
  constexpr bool ring_fits() const { return ring_slots() >= k_blocks() + v_blocks(); }

  // Columns of tensor memory: two places for scores, then results. Probabilities, two in a column, take the place of
  // scores from the left, as these are used up.
  static constexpr int kTmemColumns = 512, kScoreSlots = 2;
  constexpr int score_slots() const { return kScoreSlots / q_tiles(); }
  static constexpr unsigned tmem_s(int slot) { return slot * tile_n; }
  static constexpr unsigned tmem_p(int slot) { return tmem_s(slot); }
  constexpr unsigned tmem_o(int tile) const { return kScoreSlots * tile_n + tile * o_columns(); }
  constexpr bool tmem_fits() const { return tmem_o(q_tiles()) <= kTmemColumns; }

  // Keys of a step whose probabilities are handed over first: fewer where its softmax takes longer.
  constexpr int first_part() const { return lazy_max() ? 96 : 64; }

  // Blocks of keys and values need a word of their CTA before the products may read them: to the other CTA of a pair,
  // or since values beyond a sequence have to be cleared.
  constexpr bool relays() const { return pair || varlen; }

  // Registers of a thread, by role.
  constexpr int softmax_registers() const { return q_tiles() == 2 ? 200 : 240; }
  constexpr int epilogue_registers() const { return q_tiles() == 1 ? 152 : left ? 56 : 64; }
  constexpr int other_registers() const { return q_tiles() == 1 ? 104 : left ? 56 : 48; }
  constexpr bool registers_fit() const {
    const int at_launch = 65536 / threads() / 8 * 8;
    return q_tiles() * softmax_registers() + epilogue_registers() + other_registers() <= at_launch * (q_tiles() + 2);
  }
  constexpr bool fits() const {
    return (pair || (q_tiles() == 2 && !clc)) && ring_fits() && tmem_fits() && registers_fit();
  }
};
