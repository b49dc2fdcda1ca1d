// Every tuned constant of Hopper (sm_90a). docs/design/sm90_forward.md and sm90_backward.md have the measurements;
// `python bench/tune.py` times the alternatives of the forward's tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "config/sm90_backward.h"
#include "config/sm90_forward.h"
#include "plan/fields.h"
#include "plan/order_tuning.h"

namespace tandem::plan {

enum class Mask : uint8_t { any, full, bounded, left };  // bounded: causal or a window; left: a window
// plain: scaled products only. capped: a softcap, also with ALiBi. light: plain, or changed only by a short expression.
// bias: a bias only.
enum class Scores : uint8_t { any, bias, light, plain, capped };

// A row of the table: maximum sizes, and minimum numbers of rows and keys.
struct Sm90TuningRow {
  int head_dim, head_dim_v;
  // rows: of all packed query heads; keys: of one sequence. query_heads: minimum number of packed heads of the only
  // query, or 0 for any number of queries.
  int64_t rows, keys;
  Mask mask;
  Scores scores;
  int warpgroups, tile_n, stages;  // tile_n: keys per n_block
  bool pingpong;
  int query_heads = 0;

  // Applies this row's sizes to a configuration.
  constexpr Sm90ForwardConfig applied_to(Sm90ForwardConfig t) const {
    t.warpgroups = warpgroups;
    t.tile_n = tile_n;
    t.stages = stages;
    t.pingpong = pingpong;
    return t;
  }
  struct Call {
    int head_dim, head_dim_v;
    int64_t rows, keys;
    bool left, right;
    Scores scores;
    int query_heads = 0;
  };
  constexpr bool matches(const Call& call) const {
    if (call.head_dim > head_dim || call.head_dim_v > head_dim_v || call.rows < rows || call.keys < keys) return false;
    if (!matches(call.scores) || call.query_heads < query_heads) return false;
    const bool left = call.left, right = call.right;
    switch (mask) {
      case Mask::any: return true;
      case Mask::full: return !left && !right;
      case Mask::bounded: return left || right;
      case Mask::left: return left;
    }
    return false;
  }
  constexpr bool matches(Scores of) const {
    const bool has_few = of == Scores::plain || of == Scores::capped;  // these scores have separate register limits
    return scores == Scores::any || of == scores || (has_few && (scores == Scores::light || scores == Scores::plain));
  }
};

// The first row that serves a problem is selected.
inline constexpr Sm90TuningRow kSm90TuningRows[] = {
    {64, 64, 129, 0, Mask::full, Scores::plain, 4, 64, 2, true},
    {64, 64, 129, 0, Mask::bounded, Scores::plain, 4, 64, 3, true},
    {64, 64, 0, 0, Mask::any, Scores::plain, 2, 128, 2, true},
    {64, 64, 129, 0, Mask::any, Scores::light, 4, 64, 2, true},
    {64, 64, 129, 0, Mask::any, Scores::bias, 4, 64, 2, true},
    {64, 64, 0, 0, Mask::any, Scores::any, 2, 96, 2, false},
    {128, 128, 129, 0, Mask::any, Scores::capped, 3, 80, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::plain, 2, 64, 4, true, 128},
    {128, 128, 0, 0, Mask::any, Scores::plain, 2, 128, 2, true},
    {128, 128, 129, 0, Mask::any, Scores::light, 3, 64, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::bias, 2, 112, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::any, 2, 64, 2, true},
    {192, 128, 129, 24576, Mask::full, Scores::plain, 3, 64, 2, true},
    {192, 128, 0, 513, Mask::full, Scores::plain, 2, 96, 2, true},
    {192, 128, 0, 0, Mask::full, Scores::plain, 2, 128, 2, false},
    {192, 128, 0, 2048, Mask::bounded, Scores::plain, 2, 96, 2, true},
    {192, 128, 0, 512, Mask::bounded, Scores::plain, 2, 64, 3, true},
    {192, 128, 0, 0, Mask::bounded, Scores::plain, 2, 96, 2, true},
    {192, 192, 0, 0, Mask::any, Scores::plain, 2, 64, 2, true},
    {256, 256, 0, 0, Mask::any, Scores::plain, 2, 64, 2, true},
    {256, 256, 0, 0, Mask::any, Scores::any, 2, 32, 2, true},
};

// Other tiles of plain scores, which are chosen if their predicted time is less: sizes up to which a tile fits.
struct Sm90OtherTile {
  int head_dim, head_dim_v, warpgroups, tile_n, stages;
};
inline constexpr Sm90OtherTile kSm90OtherTiles[] = {
    {64, 64, 3, 96, 2},
    {64, 64, 2, 128, 2},
    {96, 96, 3, 96, 2},
    {128, 128, 3, 80, 2},
};

// Microseconds of an iteration: fixed + per_dim * the mean of head_dim and head_dim_v. The begin and the end of a tile
// take as long as `tile` iterations. Measured on an H100 with random shapes of bench/rig/random_shapes.py.
struct Sm90ForwardTimes {
  int warpgroups, tile_n;
  double fixed, per_dim, tile;
};
inline constexpr Sm90ForwardTimes kSm90ForwardTimes[] = {
    {2, 128, 0.77, 0.0041, 1.5}, {3, 96, 0.37, 0.0085, 2.5}, {4, 64, 0.30, 0.0078, 3.0},
    {3, 80, 0.42, 0.0061, 2.5},  {2, 64, 0.42, 0.0031, 3.0},
};

// Microseconds in which a CTA loads keys and values: a TMA box, each row of it, and 1024 bytes of cp.async. Derived
// from one query of 8k and of 131k keys on an H200 with num_splits of 6 to 32.
inline constexpr double kSm90PageBox = 0.063, kSm90PageBoxRow = 0.00125, kSm90GatheredKiB = 0.018;

// The same table with a block mask, whose blocks must have a multiple of tile_n keys. tile_n may be halved twice, down
// to kLeastBlockKeys. Any scores may have a mask_mod. The rows are modelled, not measured.
inline constexpr Sm90TuningRow kSm90BlockTuningRows[] = {
    {64, 64, 0, 0, Mask::any, Scores::any, 2, 128, 2, true},
    {128, 128, 0, 0, Mask::any, Scores::light, 2, 128, 2, true},
    {192, 128, 0, 0, Mask::any, Scores::any, 2, 64, 2, true},
    {256, 256, 0, 0, Mask::any, Scores::any, 2, 32, 2, true},
};
inline constexpr int64_t kLeastBlockKeys = 32;
inline constexpr int64_t kH200Sms = 132;

// CTAs of a cluster that share a bias by TMA multicast. Four CTAs leave SMs idle.
inline constexpr int kBiasCtas = 2;
// CTAs of a cluster that share K and V by multicast while each loads a separate bias.
inline constexpr int kBiasKvCtas = 2;

// Microseconds of the schedule rs, fitted to an H200's times of random shapes: python bench/tune.py --regret.
struct Sm90BackwardTimes {
  double launch;  // all launches of a call
  // The begin and the end of a tile, and what masked iterations add to them.
  double tile, masked_tile;
  double iteration, narrow_iteration;  // the second with a padded head_dim
  double dq_wait;                      // until the next n_block may add its first dq
  // Such waits with many n_blocks that every query sees, relative to dq_wait.
  double full_wait;
  double dq_addition;  // until the next n_block may add to an m_block
  // Further waits of an iteration: of the first ones of WrappedIterations; of others whose n_blocks share a sum of dq.
  double wrapped_wait, shared_wait;
  double tail;                    // after two waves, relative to the longest tile
  double m_split, byte_rate;      // sums of dk and dv; their bytes per microsecond
  double dq_split, dq_byte_rate;  // the same for a sum of dq
};
// Without a mask, and with a causal mask.
inline constexpr Sm90BackwardTimes kSm90FullTimes64{3.7,  4,    0, 2.21, 2.21, 1.26, 1,  2.23,
                                                    0.46, 0.07, 0, 0.3,  8e6,  0.15, 7e6};
inline constexpr Sm90BackwardTimes kSm90FullTimes128{4.6,  3.9,  0, 1.95, 1.9,   1.35, 1,   1.72,
                                                     0.27, 0.05, 0, 0.58, 4.8e6, 0.15, 10e6};
inline constexpr Sm90BackwardTimes kSm90CausalTimes64{3.7, 4, 2.3,  2.38, 2.38,   1.57, 0.66, 1.6,
                                                      0,   0, 0.07, 0.94, 13.9e6, 0.3,  12e6};
inline constexpr Sm90BackwardTimes kSm90CausalTimes128{1, 8, 2.44,  1.93, 1.775, 0.71, 1.6,   3,
                                                       0, 0, 0.117, 3.6,  4.5e6, 0.2,  12.4e6};
inline constexpr int64_t kWrappedWaits = 20;  // iterations

// Microseconds of the kernel that computes dq from dS, measured on an H200 at head_dim 256. keys: 64 keys of a sum.
// sum: a sum that waits for the earlier sum. bytes: a CTA's share of the memory's time for a further sum.
struct Sm90DqTimes {
  double keys, sum, bytes;
};
inline constexpr Sm90DqTimes kSm90DqTimes{1, 4, 0.04};

// Microseconds of an iteration, a tile and a chunk of dS, for 49 problems of head_dim 256 on an H200. bench/tune.py
// --regret --backward measures them. dq: the part of a tile's time that its dq takes. tail: tiles of the end.
struct Sm90DsTimes {
  double iteration, tile, chunk, dq, tail;
  double l2, l2_bytes, l2_doublings;  // relative time of each doubling of a chunk beyond l2_bytes
  double worth;                       // the smallest chunk may take this many times the least time
};
inline constexpr Sm90DsTimes kSm90FullDsTimes{2.2, 8, 25, 0.2, 0, 0.02, 32 << 20, 4, 1};
inline constexpr Sm90DsTimes kSm90MaskedDsTimes{2.2, 0, 4, 0.3, 0.3, 0.04, 16 << 20, 3, 1.02};
// Microseconds in which a tile adds dk and dv to the sums of other query heads.
inline constexpr double kSm90DkvAccumulation = 10;
// Bytes of q and dout of the heads that run together without a mask.
inline constexpr int64_t kDsL2Bytes = 32 << 20;
// Numbers of tiles of a chunk to choose from: 1 to 16 waves, or all tiles.
inline constexpr int kSm90DsChunkTiles[] = {132, 264, 396, 528, 660, 792, 924, 1056, 1320, 1584, 2112, 1 << 30};

struct Sm90BackwardTuning {
  // Limits of m_splits: the least iterations of a part, and the most parts. Without a prediction query heads are split
  // up to some waves of tiles.
  int64_t min_split_iterations = 2, max_m_splits = 16, max_dq_splits = 32, head_split_waves = 3;
  int64_t max_dq_sums = 16;      // dS in global memory
  double worth = 0.96;           // the largest share of the time for more sums of dq
  double diagonal_worth = 0.97;  // the same for DiagonalParts

  // Shortest-first order (spt): bytes of q, dout and dq_accum of a head that fit in the L2 cache. The second value is
  // for head_dim 256 without grouped heads. Grouped heads need long tiles to hide the accumulation of dk and dv.
  int64_t spt_l2_bytes = 32 << 20, spt_wide_l2_bytes = 16 << 20;
  int64_t spt_min_grouped_seqlen = 4096, spt_min_grouped_ctas = kH200Sms;
  int64_t spt_min_grouped_waves = 16, spt_min_short_seqlen = 7168;  // schedule rs

  // dS in global memory: bytes of dS per element of a float32 gradient. With these numbers of m_blocks and of tiles, a
  // tile iterates over two query heads.
  int64_t ds_bytes_per_gradient = 6, two_head_tile_max_m_blocks = 128, two_head_tile_min_tiles = 330;
  int64_t short_tile_iterations = 32, short_tile_min_tiles = 100;  // causal, few queries
  // dS of few heads may take this many bytes, and the sums of dq with dq_splits.
  int64_t min_ds_bytes = 1 << 30, max_dq_split_bytes = 128 << 20;

  BackwardOrderTuning order{.sms = kH200Sms, .full_l2_bytes = 32 << 20};

  // For tests and bench/tune.py. schedule: the only schedule besides shared_p that wide heads may use. ds_chunk_tiles:
  // the tiles of a chunk of dS. dq_sum_n_blocks: the n_blocks of a sum of dq. part_n_blocks: 0 means no DiagonalParts.
  // The other values belong to the schedule rs.
  std::optional<Sm90BackwardConfig::Schedule> schedule;
  std::optional<int64_t> ds_chunk_tiles;
  std::optional<int> tile_heads, m_splits, dq_splits, dq_sum_n_blocks, unsplit_tiles, part_n_blocks, head_parts;
  std::optional<bool> spt, wraps;
};

struct Sm90Tuning {
  // For tests and bench/tune.py: the row of kSm90TuningRows for all lengths, and the only tile of kSm90OtherTiles that
  // a problem may use. The number of tiles stands for none.
  std::optional<size_t> forward_row, other_tile;
  ForwardOrderTuning forward_order{.sms = kH200Sms};
  Sm90BackwardTuning backward;
};

constexpr Sm90ForwardConfig tile_of(const Sm90TuningRow& c, int head_dim, int head_dim_v) {
  return c.applied_to({.head_dim = head_dim, .head_dim_v = head_dim_v});
}

// An MMA thread's registers hold scores, result, probabilities and sometimes queries. All other values need about 30 to
// 40 registers.
constexpr bool fits(const Sm90ForwardConfig& t) {
  const int queries = t.q_in_registers() ? t.head_dim / 4 : 0;
  const int registers = t.tile_n / 2 + t.head_dim_v / 2 + t.tile_n / 4 + queries;
  return t.smem_bytes() <= Sm90ForwardConfig::kMaxSmemBytes &&
         registers <= t.registers() - (t.registers() > 160 ? 40 : 28);
}
constexpr bool all_fit() {
  for (const Sm90TuningRow& c : kSm90TuningRows) {
    Sm90ForwardConfig t = tile_of(c, c.head_dim, c.head_dim_v);
    if (c.matches(Scores::bias)) t.options.bias = Bias::f32, t.bias_ctas = kBiasCtas;
    if (!fits(t) || !is_valid(t)) return false;
  }
  for (const Sm90TuningRow& c : kSm90BlockTuningRows) {
    const Sm90ForwardConfig t = tile_of(c, c.head_dim, c.head_dim_v);
    if (!fits(t) || !is_valid(t)) return false;
  }
  return true;
}
static_assert(
    all_fit(),
    "a tile of the table needs more shared memory or registers than exist, or plan/fields.h does not list it");

}  // namespace tandem::plan
