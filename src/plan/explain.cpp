#include "plan/explain.h"

#include <algorithm>
#include <cstdlib>

#include "base/text.h"
#include "plan/arch_planner.h"
#include "plan/explain_units.h"
#include "problem/use_options.h"

namespace tandem::plan {
namespace {

// Returns the sum of clamp(x, 0, most) over all integers x < end, as a double, because the sum may exceed 2^63.
double clamped_sum(int64_t end, int64_t most) {
  if (end <= 0) return 0;
  const auto e = static_cast<double>(end), m = static_cast<double>(most);
  return end <= most + 1 ? e * (e - 1) / 2 : m * (m + 1) / 2 + (e - m - 1) * m;
}

std::string why_tile(const Problem& p, const ForwardKernel& tile, const gpu::Properties& device) {
  std::string text = planner_for(device).explain_tile(p, tile);
  if (p.head_dim_v != p.head_dim) text += str_cat(" and ", p.head_dim_v);
  return text;
}

std::string why_order(const ForwardSchedule& t) {
  if (t.tile.varlen && !t.lists_tiles) return "order: each sequence has one tile of a head, and all tiles run at once";
  if (t.tile.clc()) {
    return t.tile.varlen ? "order: the device sorts the tiles, longest first; running blocks take over waiting tiles"
                         : "order: tiles differ in length, longest first; running blocks take over waiting tiles";
  }
  if (t.tile.varlen) return "order: the device sorts the tiles, longest first; blocks take them from a counter";
  if (t.dynamic_scheduler)
    return "order: tiles differ in length, so that blocks take them from a counter, longest first";
  if (t.grid == t.tiles * t.splits)
    return t.splits > 1 ? "order: each block has one split of a tile" : "order: each block has one tile";
  return "order: tiles have equal lengths, so that each block takes every grid-th tile";
}

}  // namespace

double visible_pairs(int64_t seqlen_q, int64_t seqlen_k, int64_t diagonal, int64_t window_left, int64_t window_right) {
  const int64_t far = seqlen_q + seqlen_k + std::abs(diagonal);
  const int64_t right = std::clamp(window_right, -far, far), left = std::clamp(window_left, -far, far);
  const auto sum = [&](int64_t first) {
    return clamped_sum(first + seqlen_q, seqlen_k) - clamped_sum(first, seqlen_k);
  };
  return sum(diagonal + right + 1) - sum(diagonal - left);
}

TileWork work_of(const Problem& p) {
  const auto heads = static_cast<double>(p.heads_q);
  const int64_t diagonal = p.bottom_right ? p.seqlen_k - p.seqlen_q : clamp_diagonal(p.diagonal_offset);
  double one = visible_pairs(p.seqlen_q, p.seqlen_k, diagonal, p.window_left, p.window_right);
  double sequences = static_cast<double>(p.batch);
  if (p.packed_q() && p.seqlen_q > 0) sequences = static_cast<double>(p.total_q) / static_cast<double>(p.seqlen_q);
  return {static_cast<double>(p.total_q), static_cast<double>(p.total_k), one * sequences * heads};
}

const char* what_binds(const Floor& f) {
  if (f.shared_clocks > std::max(f.mma_clocks, f.exp_clocks)) return "shared memory";
  return f.exp_clocks > f.mma_clocks ? "exponential" : "tensor core";
}

Floor forward_floor(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  const ForwardKernel& t = plan.forward.tile;
  const TileWork work = work_of(p);
  const double dims = t.head_dim + t.head_dim_v, sms = device.sm_count;
  Floor f;
  f.pairs = work.pairs;
  f.flops = 2 * work.pairs * dims;
  f.mma_clocks = f.flops / planner_for(device).flops_per_clock() / sms;
  f.exp_clocks = work.pairs / planner_for(device).exp_per_clock(device) / sms;
  f.shared_clocks = work.pairs * planner_for(device).pair_smem_bytes(t) / kSharedPerClock / sms;
  const double rows = work.rows * static_cast<double>(p.heads_q), keys = work.keys * static_cast<double>(p.heads_k);
  const double own = rows * (static_cast<double>(p.head_dim) * kElement +
                             static_cast<double>(p.head_dim_v * size_of(p.out.dtype)) + (p.lse ? 4 : 0));
  f.l2_bytes = own + work.pairs / t.tile_m() * dims * kElement;
  f.hbm_bytes = own + keys * static_cast<double>(p.head_dim + p.head_dim_v) * kElement;
  f.binds = what_binds(f);
  f.at_bounds = t.varlen;
  return f;
}

std::vector<std::string> forward_reasons(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  const ForwardSchedule& t = plan.forward;
  const bool masked = t.tile.bounded_left || t.tile.bounded_right;
  std::vector<std::string> lines{why_tile(p, t.tile, device)};
  if (p.group() > 1) {
    lines.push_back(t.pack_gqa > 1 ? str_cat("heads: rows of ", t.pack_gqa, " query heads of a key head share tiles, ",
                                             masked ? "whose fewer queries see fewer keys" : "which are then full")
                                   : std::string("heads: one per tile, because packing heads saves no tiles"));
  }
  if (p.banded() && !masked) {
    lines.emplace_back("mask: no bound hides a key at these lengths, so that the kernel has no mask");
  }
  lines.push_back(why_order(t));
  if (t.splits > 1) {
    lines.push_back(str_cat("splits: ", t.splits, " of at most ", t.split_n_blocks, " n_blocks of keys, ",
                            p.num_splits > 1 ? "by num_splits" : "because tiles are few",
                            "; combine_splits merges their float32 results in order"));
  }
  if (t.split_rows > 0) {
    lines.push_back(str_cat("splits: sequences of at most ", t.split_max_queries, " queries have up to ", t.max_splits,
                            " splits of at least ", t.split_n_blocks * t.tile.tile_n,
                            " keys, by their lengths on the device; combine_splits merges the float32 results in "
                            "order"));
  }
  if (t.l2_heads > 1) {
    lines.push_back(str_cat("cache: the tiles of ", t.l2_heads, t.pack_gqa > 1 ? " such groups" : " heads",
                            " run together and share the L2 cache"));
  }
  lines.push_back(str_cat("grid: ", t.grid, " blocks on ", device.sm_count, " SMs for ", t.tile.varlen ? "up to " : "",
                          t.tiles, " tiles"));
  if (p.batch_invariant) lines.emplace_back("batch_invariant: the choices of tile and mask ignore lengths");
  return lines;
}

Floor floor_of(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  return p.pass == TANDEM_FORWARD ? forward_floor(p, plan, device) : backward_floor(p, plan, device);
}

std::vector<std::string> reasons(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  const bool forward = p.pass == TANDEM_FORWARD;
  std::vector<std::string> lines = forward ? forward_reasons(p, plan, device) : backward_reasons(p, plan, device);
  if (const std::string used = used_options(p); !used.empty()) lines.push_back(str_cat("texts: ", used));
  return lines;
}

std::vector<std::string> launches(const Plan& plan) {
  std::vector<std::string> lines;
  for (size_t n = 0; n < plan.launches.size(); ++n) {
    const PlannedLaunch& launch = plan.launches[n];
    const PlannedKernel& kernel = plan.kernels[launch.kernel];
    const KernelEntry entry = find_entry(kernel.configuration, kernel.unit, launch.entry);
    lines.push_back(str_cat(entry.name, ": ", launch.grid, launch.grid == 1 ? " block of " : " blocks of ",
                            launch.block, " threads"));
    if (launch.shared_bytes > 0) lines.back() += str_cat(", ", launch.shared_bytes, " bytes of shared memory");
    if (launch.overlap_previous) lines.back() += ", may begin before the previous launch has ended";
    if (plan.repeat.times > 1 && n >= plan.repeat.begin && n < plan.repeat.end)
      lines.back() += str_cat(", ", plan.repeat.times, " times, alternating with the repeated launches");
  }
  return lines;
}

}  // namespace tandem::plan
