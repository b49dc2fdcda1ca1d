// The kernel of a forward plan, on Hopper or Blackwell, and its schedule.
#pragma once

#include <algorithm>
#include <variant>

#include "config/sm100_forward.h"
#include "config/sm90_forward.h"
#include "plan/kernel.h"

namespace tandem::plan {

struct ForwardKernel {
  // The rows of TMA boxes: queries, keys, values, results.
  struct TmaBoxRows {
    int q, k, v, out;
  };

  ForwardKernel() : ForwardKernel(Sm90ForwardConfig{}) {}
  ForwardKernel(const Sm90ForwardConfig& t)  // NOLINT(google-explicit-constructor): it is one
      : ForwardKernel(t, t.tile_n, t.tile_m(),
                      {.q = 64, .k = box_rows(t, t.tile_n), .v = box_rows(t, t.tile_n), .out = 64}) {}
  ForwardKernel(const Sm100ForwardConfig& t)  // NOLINT(google-explicit-constructor): it is one
      : ForwardKernel(t, Sm100ForwardConfig::tile_n, t.tile_m(),
                      {.q = Sm100ForwardConfig::kTileM,
                       .k = box_rows(t, t.k_block_rows()),
                       .v = box_rows(t, t.v_block_rows()),
                       .out = Sm100ForwardConfig::kTileM}) {}

  operator const Configuration&() const { return kernel; }  // NOLINT(google-explicit-constructor): it is one

  bool blackwell() const { return std::holds_alternative<Sm100ForwardConfig>(kernel); }
  const Sm90ForwardConfig& for_hopper() const { return std::get<Sm90ForwardConfig>(kernel); }
  const Sm100ForwardConfig& for_blackwell() const { return std::get<Sm100ForwardConfig>(kernel); }

  int tile_m() const { return rows_; }
  // True: a tile belongs to the whole cluster. False: each CTA has a separate tile.
  bool cluster_has_tile() const { return blackwell(); }
  // Returns true if a launch may begin before the preceding launch has ended.
  bool overlaps_launches() const { return !blackwell(); }
  // Returns true if list_n_blocks() resets the counter of tiles.
  bool lists_reset_counter() const { return !blackwell(); }
  // CTAs per cluster.
  int ctas() const {
    return std::visit([](const auto& t) { return t.ctas(); }, kernel);
  }
  // The number of CTAs for which TMA copies a bias at once; 0: TMA does not copy it.
  int bias_ctas() const { return blackwell() ? 0 : for_hopper().bias_ctas; }
  bool clc() const { return blackwell() && for_blackwell().clc; }
  int threads() const {
    return std::visit([](const auto& t) { return t.threads(); }, kernel);
  }
  int smem_bytes() const {
    return std::visit([](const auto& t) { return t.smem_bytes(); }, kernel);
  }

  Configuration kernel;
  int head_dim, head_dim_v, tile_n;
  bool bounded_left, bounded_right, varlen;
  TmaBoxRows boxes;

 private:
  // With pages a box has no more keys than a page.
  template <class T>
  static int box_rows(const T& t, int rows) {
    return t.page_rows > 0 ? std::min(t.page_rows, rows) : rows;
  }
  template <class T>
  ForwardKernel(const T& t, int step, int all_rows, const TmaBoxRows& all_boxes)
      : kernel(t),
        head_dim(t.head_dim),
        head_dim_v(t.head_dim_v),
        tile_n(step),
        bounded_left(t.options.bounded_left),
        bounded_right(t.options.bounded_right),
        varlen(t.options.varlen),
        boxes(all_boxes),
        rows_(all_rows) {}

  int rows_;
};

struct ForwardSchedule {
  ForwardKernel tile;
  int pack_gqa = 1;                // query heads of a key head in one tile
  int packed_heads = 0;            // packed heads of a sequence
  int m_blocks = 0;                // per packed head; varlen: maximum over all sequences
  int tiles = 0;                   // total; varlen: maximum
  int l2_heads = 1;                // packed heads that run together (varlen: per sequence)
  bool dynamic_scheduler = false;  // tiles come from a counter
  bool lists_tiles = false;        // varlen: schedule() lists the tiles
  bool no_keys = false;            // no key: the kernel reads zeros in the workspace
  int grid = 0;
  // Splits of the keys, the n_blocks of each, and the offsets of their results in the workspace.
  int splits = 1, split_n_blocks = 0;
  int combine_lanes = 1;  // threads that merge a row
  size_t split_out_offset = 0, split_lse_offset = 0;
  // T.device_splits: the most splits and queries of a sequence that is split. Then the most splits for these lengths,
  // and the rows of results in the workspace, 0 if no sequence can be split.
  int max_splits = 0, split_max_queries = 0, split_count = 1, split_rows = 0;
  // Block mask: batch and heads of the lists, the m_blocks of each, and the words of a tile's list.
  int list_batch = 0, list_heads = 0, list_m_blocks = 0;
  int64_t list_words = 0;      // 0: no block mask
  size_t steps_offset = 0;     // in the workspace, after the tile list
  int max_scores_launch = -1;  // index of the launch of max_scores
};

}  // namespace tandem::plan
