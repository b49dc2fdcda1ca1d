#include "plan/explain.h"

#include <algorithm>

#include "problem/text.h"

namespace tandem::plan {
namespace {

constexpr double kExpPerClock = 16, kSharedPerClock = 128;  // of an SM
constexpr double kElement = 2;                              // bytes
double flops_per_clock(const gpu::Properties& device) { return device.compute_major == 10 ? 8192 : 4096; }

// The sum of clamp(x, 0, most) over all integers x < end; doubles, as it may pass 2^63.
double clamped_sum(int64_t end, int64_t most) {
  if (end <= 0) return 0;
  const auto e = static_cast<double>(end), m = static_cast<double>(most);
  return end <= most + 1 ? e * (e - 1) / 2 : m * (m + 1) / 2 + (e - m - 1) * m;
}

// Rows of all sequences, keys of all sequences; visible pairs of all heads.
struct Work {
  double rows, keys, pairs;
};
Work work_of(const Problem& p) {
  const auto heads = static_cast<double>(p.heads_q);
  double one = visible_pairs(p.seqlen_q, p.seqlen_k, p.bottom_right, p.window_left, p.window_right);
  double sequences = static_cast<double>(p.batch);
  if (p.packed_q() && p.seqlen_q > 0) sequences = static_cast<double>(p.total_q) / static_cast<double>(p.seqlen_q);
  return {static_cast<double>(p.total_q), static_cast<double>(p.total_k), one * sequences * heads};
}

std::string why_tile(const Problem& p, const Tile& tile) {
  std::string text;
  if (tile.blackwell()) {
    const BlackwellTile& t = tile.for_blackwell();
    text = say("tile: ", t.tiles(), " x ", t.rows_together(), " rows x ", t.keys, " keys",
               t.tiles() > 1 ? ", which take turns on the tensor core" : ", two steps of scores at once",
               t.pair ? ", two blocks multiply together" : "", ", keys and values in a ring of ", t.ring(),
               " pieces of ", t.block(), " bytes, ", t.fma_pairs,
               " of 16 exponentials on the FMA units: counted, not measured, at head_dim ", p.head_dim);
  } else {
    const ForwardTile& t = tile.for_hopper();
    text = say("tile: ", t.rows(), " rows x ", t.keys, " keys, ", t.warpgroups, " computing warpgroups");
    text += t.turns ? " that take turns on the tensor core" : " that run freely";
    text += say(", ", t.stages, " stages, ", t.shared_bytes(), " bytes of shared memory: measured best at head_dim ",
                p.head_dim);
  }
  if (p.head_dim_v != p.head_dim) text += say(" and ", p.head_dim_v);
  return text;
}

// Bytes of shared memory that products read and TMA writes, of a query-key pair.
double shared_bytes_of_pair(const Tile& tile) {
  const double written = static_cast<double>(tile.head_dim + tile.head_dim_v) / tile.rows();
  if (tile.blackwell()) {  // probabilities are in tensor memory; of a pair each block reads half of keys and values
    const double keys_and_values = tile.head_dim + tile.head_dim_v;
    return kElement * ((tile.head_dim + keys_and_values / tile.ctas()) / BlackwellTile::kTileRows + written);
  }
  // 64 rows read a step's keys and values once, and the queries unless registers have them.
  const double queries = tile.for_hopper().queries_in_registers() ? 0 : static_cast<double>(tile.head_dim) / tile.keys;
  return kElement * (static_cast<double>(tile.head_dim + tile.head_dim_v) / 64 + written + queries);
}

std::string why_order(const ForwardPlan& plan) {
  if (plan.tile.takes_over()) {
    return plan.tile.ragged ? "order: a list of tiles made on the device, the longest first; blocks that run take over "
                              "those that have not begun"
                            : "order: tiles differ in length, the longest first; blocks that run take over those that "
                              "have not begun";
  }
  if (plan.tile.ragged) return "order: a list of tiles made on the device, the longest first, taken from a counter";
  if (plan.counted) return "order: tiles differ in length, so blocks take them from a counter, the longest first";
  if (plan.grid == plan.tiles) return "order: each block has one tile";
  return "order: tiles are equally long, so each block takes every grid-th one";
}

}  // namespace

double visible_pairs(int64_t seqlen_q, int64_t seqlen_k, bool bottom_right, int64_t window_left, int64_t window_right) {
  const int64_t far = seqlen_q + seqlen_k, diagonal = bottom_right ? seqlen_k - seqlen_q : 0;
  const int64_t right = std::clamp(window_right, -far, far), left = std::clamp(window_left, -far, far);
  const auto sum = [&](int64_t first) {
    return clamped_sum(first + seqlen_q, seqlen_k) - clamped_sum(first, seqlen_k);
  };
  return sum(diagonal + right + 1) - sum(diagonal - left);
}

ForwardFloor forward_floor(const Problem& p, const ForwardPlan& plan, const gpu::Properties& device) {
  const Tile& t = plan.tile;
  const Work work = work_of(p);
  const double dims = t.head_dim + t.head_dim_v, sms = device.sm_count;
  ForwardFloor f;
  f.pairs = work.pairs;
  f.flops = 2 * work.pairs * dims;
  f.mma_clocks = f.flops / flops_per_clock(device) / sms;
  f.exp_clocks = work.pairs / kExpPerClock / sms;
  f.shared_clocks = work.pairs * shared_bytes_of_pair(t) / kSharedPerClock / sms;
  const double rows = work.rows * static_cast<double>(p.heads_q), keys = work.keys * static_cast<double>(p.heads_k);
  const double own = rows * (static_cast<double>(p.head_dim + p.head_dim_v) * kElement + (p.lse ? 4 : 0));
  f.l2_bytes = own + work.pairs / t.rows() * dims * kElement;
  f.hbm_bytes = own + keys * static_cast<double>(p.head_dim + p.head_dim_v) * kElement;
  f.binds = f.shared_clocks > std::max(f.mma_clocks, f.exp_clocks) ? "shared memory"
            : f.exp_clocks > f.mma_clocks                          ? "exponential"
                                                                   : "tensor core";
  return f;
}

std::vector<std::string> reasons(const Problem& p, const ForwardPlan& plan, const gpu::Properties& device) {
  const bool masked = plan.tile.left || plan.tile.right;
  std::vector<std::string> lines{why_tile(p, plan.tile)};
  if (p.group() > 1) {
    lines.push_back(plan.together > 1
                        ? say("heads: rows of ", plan.together, " query heads of a key head share tiles, which ",
                              masked ? "then have fewer queries, that see fewer keys" : "fills them")
                        : std::string("heads: one in a tile, as several would not need fewer tiles"));
  }
  if (p.banded() && !masked) {
    lines.emplace_back("mask: no bound hides a key at these lengths, so the kernel has none");
  }
  lines.push_back(why_order(plan));
  if (plan.group > 1) {
    lines.push_back(say("cache: the tiles of ", plan.group, plan.together > 1 ? " such groups" : " heads",
                        " are taken together and share the L2 cache"));
  }
  lines.push_back(say("grid: ", plan.grid, " blocks on ", device.sm_count, " SMs for ",
                      plan.tile.ragged ? "up to " : "", plan.tiles, " tiles"));
  if (p.batch_invariant) lines.emplace_back("batch_invariant: lengths did not enter the choice of tile");
  return lines;
}

}  // namespace tandem::plan
