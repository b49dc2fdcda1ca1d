// How a Hopper forward kernel is cut, and what follows from that: sizes, registers, shared memory.
#pragma once
#include "shared/score_options.h"

// A value of this type is the kernel's only template parameter. An n_block is a step of the loop over keys.
struct Sm90ForwardConfig {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 16: at most 256
  int warpgroups = 2;                    // that compute; each has 64 rows. A row is a query of one head
  int tile_n = 128;                      // of one step, a multiple of 16
  int stages = 2;                        // steps of keys, and of values, that are in shared memory at once
  bool pingpong = true;                  // warpgroups issue their products in turns (ping-pong)
  int bias_ctas = 0;     // whose tiles have the same bias, which TMA copies for all of them; 0: cp.async
  int kv_ctas = 1;       // whose tiles have the same keys and values, which each brings in part for all
  bool f32_out = false;  // the result is float32, else of the type of elements
  bool dropout = false;
  bool block_mask = false;           // n_blocks are those that lists name: tile/block_mask.cuh
  bool max_scores = false;           // of each row, by a kernel beside this one: tile/max_scores.cuh
  bool f16 = false;                  // elements are float16, else bfloat16
  bool left = false, right = false;  // a query may not see all keys before, after it (causal: right)
  bool varlen = false;               // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;             // scale <= 0: the largest product is not the largest score
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;
  bool score_mod = false, mask_mod = false;  // functions that were printed for this kernel: tile/mod_functions.cuh

  constexpr int tile_m() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // Of a cluster.
  constexpr int ctas() const { return bias_ctas > kv_ctas ? bias_ctas : kv_ctas; }
  // Scores are more than scaled products and a bias. With a block mask a mask_mod is asked apart, where an n_block
  // needs it.
  constexpr bool has_score_mod() const {
    return unscaled || softcap || alibi || score_mod || (mask_mod && !block_mask);
  }
  // A block mask asks a mask_mod where an n_block is seen in part. What that needs of rows and keys alone is in shared
  // memory: so many words at most of each row, and of each key of two steps (src/mods/program.cpp).
  constexpr bool asks_mask() const { return mask_mod && block_mask; }
  static constexpr int kMaskWords = 2;
  constexpr int mask_bytes() const { return asks_mask() ? 4 * kMaskWords * warpgroups * (64 + 2 * tile_n) : 0; }
  // Of a block mask: rows whose n_blocks have a state of their own, and tiles of which each takes part in some only.
  static constexpr int step_rows() { return 64; }
  constexpr int step_units() const { return warpgroups; }
  static constexpr int step_tiles() { return 1; }
  // Steps that hide nothing take exponentials without a look at the scores (FragmentSoftmax::settle). Where that goes
  // wrong, the tile is done again with that look. Not where a bias may hide a row's first keys or ALiBi grow without a
  // bound; nor with dropout: sums are of what it drops too, so they cannot be made again of the probabilities that are
  // multiplied.
  constexpr bool lazy_max() const {
    return !f16 && !unscaled && !alibi && bias == Bias::none && !score_mod && (!mask_mod || block_mask) && !dropout;
  }
  // Exponentials of a thread and step that are taken before the product with the values of the step before is waited
  // for: where that product is short, or a softcap is made under it, none; measured.
  constexpr int exps_under_pv() const {
    if (head_dim_v <= 64 || softcap) return 0;
    return tile_n > 64 ? tile_n / 4 : tile_n / 2;
  }
  // Columns in shared memory come in blocks of 64, the width of the swizzle.
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int columns_k() const { return blocks(head_dim) * 64; }
  constexpr int columns_v() const { return blocks(head_dim_v) * 64; }
  // Rows of the result that have a place in shared memory: all of a tile, or where there is no room for them those of
  // one warpgroup, which it leaves to the next.
  constexpr int o_smem_rows() const { return bytes_with(tile_m()) <= kMaxSmemBytes ? tile_m() : 64; }
  // A float32 result needs none of them: it is stored from registers.
  constexpr bool o_smem_shared() const { return !f32_out && o_smem_rows() < tile_m(); }
  // Queries in registers spare the tensor core reads of shared memory, where registers suffice: beside them a thread
  // has the result, the scores and the probabilities. What changes scores and what drops them leave none together.
  constexpr bool q_in_registers() const {
    if (dropout && (has_score_mod() || bias != Bias::none)) return false;
    return head_dim / 4 + head_dim_v / 2 + tile_n / 2 + tile_n / 4 <= registers() - (registers() > 160 ? 40 : 28);
  }
  // Of a computing thread, after the loading warpgroup has given its own away, which keeps a few, more beside a bias.
  constexpr int registers() const {
    const int most = (all_registers() - 128 * kLoadRegisters) / (128 * warpgroups) / 8 * 8;
    const int beside_bias = (all_registers() - 128 * kBiasLoadRegisters) / (128 * warpgroups) / 8 * 8;
    return bias != Bias::none ? beside_bias : most < 240 ? most : 240;
  }
  constexpr int load_registers() const {
    return bias != Bias::none ? (all_registers() / 128 - warpgroups * registers()) / 8 * 8 : kLoadRegisters;
  }
  constexpr int all_registers() const { return threads() * (65536 / threads() / 8 * 8); }  // at launch
  constexpr int smem_bytes() const { return bytes_with(o_smem_rows()); }

  // A bias comes through shared memory, where each warpgroup has a place for its rows of a step. Two warps beside the
  // one that loads all else copy it. From one row to the next there are so many bytes that threads of a warp, which
  // read two columns of eight rows, meet in no bank: TMA copies eight columns more than are used.
  static constexpr int kBiasWarps = 2, kBiasLoadRegisters = 32, kLoadRegisters = 24;
  constexpr int bias_pitch() const { return tile_n * bytes_of(bias) + (bias == Bias::f32 ? 32 : 16); }
  constexpr int bias_bytes() const { return bias == Bias::none ? 0 : 64 * bias_pitch(); }

  static constexpr int kMaxSmemBytes = 232448;  // of a block
  // Queries, so many rows of the result, keys and values, a bias, barriers.
  constexpr int bytes_with(int o_rows) const {
    return 2 * (tile_m() * columns_k() + o_rows * columns_v() + stages * tile_n * (columns_k() + columns_v())) +
           mask_bytes() + warpgroups * bias_bytes() + 1024;
  }
};
