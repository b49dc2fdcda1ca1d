// The configuration of a Blackwell forward kernel, and the sizes, registers, shared and tensor memory that follow from
// it.
#pragma once
#include "config/score_options.h"

// A tile has 128 rows, with scores, probabilities and results in tensor memory; an iteration has 128 keys. One CTA has
// two tiles, or one tile with two score buffers if results are wide. In a CTA pair each CTA has its own rows and half
// of the keys and values. Wide results always use a pair.
struct Sm100ForwardConfig {
  int head_dim = 128, head_dim_v = 128;  // rounded up to multiples of 16; at most 256
  int ex2_emu_pairs = 4;                 // pairs of 16 whose exponentials run on the FMA units
  bool two_cta = false;                  // two-CTA products
  bool clc = false;                      // one CTA per tile; running CTAs take over tiles (CLC)
  bool f32_out = false;                  // float32 result, else the type of q
  bool max_scores = false;               // computed by another kernel: device/max_scores.cuh
  bool split_keys = false;               // float32 results of splits, merged by combine_splits()
  bool device_splits = false;            // schedule() splits the keys of sequences with few queries
  int page_rows = 0;                     // keys of a TMA box in pages; 0: keys are not in pages
  bool exact_n = false;                  // as in Sm100BackwardConfig, like the next switch
  bool wait_products = false;
  ScoreOptions options = {};

  static constexpr int kTileM = 128, tile_n = 128;
  constexpr int q_stage() const { return head_dim <= 192 && head_dim_v <= 128 ? 2 : 1; }
  constexpr int ctas() const { return two_cta ? 2 : 1; }
  // The rows of one product, and all rows of a work tile.
  constexpr int mma_m() const { return ctas() * kTileM; }
  constexpr int tile_m() const { return q_stage() * mma_m(); }
  constexpr int threads() const { return 128 * (q_stage() + 2); }
  constexpr bool has_score_mod() const {
    return options.changes_products() || options.bias != Bias::none || (options.mask_mod && !options.block_mask);
  }
  static constexpr bool overlaps_launches() { return false; }
  // Sm90ForwardConfig explains this number.
  static constexpr int step_rows() { return kTileM; }
  constexpr int step_units() const { return q_stage() * ctas(); }
  constexpr int step_tiles() const { return q_stage(); }
  // Sm90ForwardConfig explains lazy_max. lazy_max requires two tiles per CTA. In a CTA pair both CTAs can request a
  // retry (load.cuh), but not with a block mask.
  constexpr bool lazy_max() const {
    return !options.f16 && !has_score_mod() && !options.dropout && q_stage() == 2 && !clc &&
           !(two_cta && options.block_mask);
  }

  // Shared memory has queries and the result in blocks of 16 KB (128 bytes of a tile's rows). A ring of key and value
  // blocks follows. A key block has 64 columns of the CTA's keys of an iteration. A value block has all columns and the
  // keys that fit.
  static constexpr int kTileBlockBytes = 16384, kMaxBlockBytes = 14 * kTileBlockBytes, kMaxRingSlots = 16;
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int k_block_rows() const { return tile_n / ctas(); }
  constexpr int block_bytes() const { return k_block_rows() * 128; }
  constexpr int k_blocks() const { return blocks(head_dim); }
  // Columns of values and result in tensor memory. Each CTA of a pair has half of the values' columns. Columns
  // are multiples of 64, the width of the 128-byte swizzle, or of 16 with exact_n.
  constexpr int o_columns() const {
    const int step = (exact_n ? 16 : 64) * ctas();
    return (head_dim_v + step - 1) / step * step;
  }
  constexpr int columns_v() const { return o_columns() / ctas(); }
  constexpr int v_block_rows() const { return k_block_rows() / (blocks(columns_v()) == 3 ? 4 : blocks(columns_v())); }
  constexpr int v_blocks() const { return tile_n / v_block_rows(); }
  // Columns of the result in 128 bytes, the width of a block.
  constexpr int o_block_columns() const { return f32_out ? 32 : 64; }
  constexpr int o_blocks() const { return head_dim <= 128 && q_stage() == 2 ? 2 : 1; }
  constexpr int ring_slots() const {
    const int most = (kMaxBlockBytes - (q_stage() * k_blocks() + o_blocks()) * kTileBlockBytes) / block_bytes();
    return most < kMaxRingSlots ? most : kMaxRingSlots;
  }
  // Shared memory besides the blocks: row sums and shifts, work tiles, barriers.
  static constexpr int kSmallBytes = 3072;
  static constexpr int smem_bytes() { return kMaxBlockBytes + kSmallBytes; }
  // Returns true if the ring has capacity for the keys of an iteration and the values of the preceding iteration.
  constexpr bool ring_fits() const { return ring_slots() >= k_blocks() + v_blocks(); }

  // Columns of tensor memory: two score buffers, then results. Probabilities, two per column, overwrite scores from the
  // left, after these have been read.
  static constexpr int kTmemColumns = 512, kScoreSlots = 2;
  constexpr int score_slots() const { return kScoreSlots / q_stage(); }
  static constexpr unsigned tmem_s(int slot) { return slot * tile_n; }
  static constexpr unsigned tmem_p(int slot) { return tmem_s(slot); }
  constexpr unsigned tmem_o(int tile) const { return kScoreSlots * tile_n + tile * o_columns(); }
  constexpr bool tmem_fits() const { return tmem_o(q_stage()) <= kTmemColumns; }

  // The number of keys of an iteration whose probabilities are signalled first: fewer if their softmax takes longer.
  constexpr int first_part() const { return lazy_max() ? 96 : 64; }

  // A warp of the CTA must zero values beyond a sequence before it signals that products may read them.
  constexpr bool has_relay_warp() const { return options.varlen; }
  // The barriers of the first CTA of a pair count the bytes of both CTAs.
  constexpr bool leader_counts() const { return two_cta && !has_relay_warp(); }

  // Registers per thread, by role. The compiler needs more for the products of sm_103a, and no polynomial takes any.
  constexpr int softmax_registers() const {
    if (q_stage() == 1) return 240;
    return kSm103 ? (options.dropout ? 192 : 184) : 200;
  }
  constexpr int epilogue_registers() const {
    if (q_stage() == 1) return 152;
    return kSm103 || options.bounded_left ? 56 : 64;
  }
  constexpr int other_registers() const {
    if (q_stage() == 1) return 104;
    if (kSm103) return options.dropout ? 72 : 88;
    return options.bounded_left ? 56 : 48;
  }
  constexpr bool registers_fit() const {
    const int at_launch = 65536 / threads() / 8 * 8;
    return q_stage() * softmax_registers() + epilogue_registers() + other_registers() <= at_launch * (q_stage() + 2);
  }
  constexpr bool fits() const {
    return (two_cta || (q_stage() == 2 && !clc)) && ring_fits() && tmem_fits() && registers_fit();
  }
};
