// The configuration of a Hopper forward kernel, and the sizes, registers and shared memory that follow from it.
#pragma once
#include "config/score_options.h"

// The kernel's only template parameter. An n_block is one iteration over keys.
struct Sm90ForwardConfig {
  int head_dim = 128, head_dim_v = 128;  // rounded up to multiples of 16; at most 256
  int warpgroups = 2;                    // MMA warpgroups, 64 rows each; a row is a query of a head
  int tile_n = 128;                      // keys per iteration, a multiple of 16
  int stages = 2;                        // iterations of keys and values in shared memory
  bool pingpong = true;                  // warpgroups alternate their products
  int bias_ctas = 0;                     // CTAs that share a bias by TMA multicast; 0: cp.async
  int kv_ctas = 1;                       // CTAs that share keys and values by multicast
  bool f32_out = false;                  // float32 result, else the type of q
  bool max_scores = false;               // computed by another kernel: device/max_scores.cuh
  bool split_keys = false;               // float32 results of splits, merged by combine_splits()
  bool device_splits = false;            // schedule() splits the keys of sequences with few queries
  int page_rows = 0;                     // keys of a TMA box in pages; 0: keys are not in pages
  bool gathers_pages = false;            // page_gather.cuh loads pages
  ScoreOptions options = {};

  constexpr int tile_m() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // CTAs per cluster.
  constexpr int ctas() const { return bias_ctas > kv_ctas ? bias_ctas : kv_ctas; }
  // Returns true if scores are more than scaled products and a bias. With a block mask the mask_mod is evaluated
  // separately, only for n_blocks that need it.
  constexpr bool has_score_mod() const {
    return options.changes_products() || (options.mask_mod && !options.block_mask);
  }
  // A block mask evaluates a mask_mod in partial n_blocks. Shared memory has its values that depend on a row or a key
  // only. There are at most kMaskWords words per row and per key of two iterations (src/score_mod/program.cpp).
  constexpr bool evaluates_mask_mod() const { return options.mask_mod && options.block_mask; }
  static constexpr int kMaskWords = 2;
  constexpr int mask_bytes() const {
    return evaluates_mask_mod() ? 4 * kMaskWords * warpgroups * (64 + 2 * tile_n) : 0;
  }
  // Returns true if the main kernel and the kernels before it may begin before the preceding kernel of the stream has
  // ended.
  static constexpr bool overlaps_launches() { return true; }
  // Block mask: the number of rows that share one state per n_block, and the number of such units per tile.
  static constexpr int step_rows() { return 64; }
  constexpr int step_units() const { return warpgroups; }
  static constexpr int step_tiles() { return 1; }
  // lazy_max: iterations without a mask compute exponentials without a maximum (FragmentSoftmax::settle); an overflow
  // repeats the tile with maxima. A bias or ALiBi excludes lazy_max, because both may hide the first keys or grow
  // without bound. Dropout excludes lazy_max, because sums include dropped probabilities.
  constexpr bool lazy_max() const {
    return !options.f16 && !options.scale_outside_exp2 && !options.alibi && options.bias == Bias::none &&
           !options.score_mod && (!options.mask_mod || options.block_mask) && !options.dropout;
  }
  // Exponentials per thread and iteration that are computed before the wait for the preceding iteration's PV product.
  // The number is 0 if that product is short or a softcap runs during it.
  constexpr int exp_before_pv_wait() const {
    if (head_dim_v <= 64 || options.softcap) return 0;
    return tile_n > 64 ? tile_n / 4 : tile_n / 2;
  }
  // Columns in shared memory come in blocks of 64, the width of the swizzle.
  static constexpr int blocks(int columns) { return (columns + 63) / 64; }
  constexpr int columns_k() const { return blocks(head_dim) * 64; }
  constexpr int columns_v() const { return blocks(head_dim_v) * 64; }
  // Rows of the result in shared memory: the whole tile, or 64 rows that the warpgroups use in turn.
  constexpr int o_smem_rows() const { return bytes_with(tile_m()) <= kMaxSmemBytes ? tile_m() : 64; }
  // A float32 result is stored from registers and needs no shared memory.
  constexpr bool o_smem_shared() const { return !f32_out && o_smem_rows() < tile_m(); }
  // Queries in registers save the tensor core reads of shared memory. A thread also has the result, the scores and the
  // probabilities. Score options together with dropout leave no registers.
  constexpr bool q_in_registers() const {
    if (options.dropout && (has_score_mod() || options.bias != Bias::none)) return false;
    const int others = registers() <= 160 ? 28 : copy_registers() > kCopyRegisters ? 48 : 40;
    return head_dim / 4 + head_dim_v / 2 + tile_n / 2 + tile_n / 4 <= registers() - others;
  }
  // Registers per MMA thread, after the loading warpgroup has released its own and kept a few. The loading warpgroup
  // keeps more if all its warps copy.
  constexpr int registers() const {
    const int most = (all_registers() - 128 * kLoadRegisters) / (128 * warpgroups) / 8 * 8;
    const int beside_copies = (all_registers() - 128 * copy_registers()) / (128 * warpgroups) / 8 * 8;
    const int own = warps_copy() ? beside_copies : most;
    return options.bias != Bias::none || own < 240 ? own : 240;
  }
  constexpr int load_registers() const {
    const int rest = (all_registers() / 128 - warpgroups * registers()) / 8 * 8;
    if (gathers_pages) return rest < 64 ? rest : 64;
    return options.bias != Bias::none ? rest : kLoadRegisters;
  }
  // Copies of pages with a window, or with splits of the device, need more registers.
  constexpr int copy_registers() const {
    return gathers_pages && (options.bounded_left || device_splits) ? 56 : kCopyRegisters;
  }
  constexpr bool warps_copy() const { return options.bias != Bias::none || gathers_pages; }
  // Arrivals that make keys or values available: 1 and the bytes of TMA, or each copying thread.
  constexpr int kv_arrivals() const { return gathers_pages ? 128 : 1; }
  constexpr int all_registers() const { return threads() * (65536 / threads() / 8 * 8); }  // at launch
  constexpr int smem_bytes() const { return bytes_with(o_smem_rows()); }

  // Two warps copy a bias to shared memory, where each warpgroup has a buffer for its rows of an iteration. The pitch
  // avoids bank conflicts between the eight rows and two columns that a warp reads, so that TMA copies eight unused
  // columns.
  static constexpr int kBiasWarps = 2, kCopyRegisters = 32, kLoadRegisters = 24;
  constexpr int bias_pitch() const { return tile_n * bytes_of(options.bias) + (options.bias == Bias::f32 ? 32 : 16); }
  constexpr int bias_bytes() const { return options.bias == Bias::none ? 0 : 64 * bias_pitch(); }

  static constexpr int kMaxSmemBytes = 232448;  // per CTA
  // Bytes for queries, o_rows rows of the result, keys and values, a bias and barriers.
  constexpr int bytes_with(int o_rows) const {
    return 2 * (tile_m() * columns_k() + o_rows * columns_v() + stages * tile_n * (columns_k() + columns_v())) +
           mask_bytes() + warpgroups * bias_bytes() + 1024;
  }
};
