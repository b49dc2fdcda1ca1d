// The reasons of a backward's plan, and the lower bound of any kernel's time.
#include <algorithm>

#include "base/text.h"
#include "plan/arch_planner.h"
#include "plan/explain_units.h"

namespace tandem::plan {
namespace {

std::string why_tile(const Problem& p, const BackwardKernel& tile, const gpu::Properties& device) {
  std::string text = str_cat("tile: ", tile.tile_n, " keys, which iterate over the queries that see them, ",
                             tile.tile_m, " at a time, ", planner_for(device).explain_tile(tile));
  text += str_cat(", head_dim ", p.head_dim);
  if (p.head_dim_v != p.head_dim) text += str_cat(" and ", p.head_dim_v);
  if (tile.head_dim != p.head_dim || tile.head_dim_v != p.head_dim_v)
    text += str_cat(" as ", tile.head_dim, tile.head_dim_v != tile.head_dim ? str_cat(" and ", tile.head_dim_v) : "");
  return text;
}

}  // namespace

std::string explain_stages(int q_stages, int dout_stages) {
  return str_cat(q_stages, q_stages == 1 ? " stage" : " stages", " of queries and ", dout_stages,
                 " of dout in shared memory, ");
}

Floor backward_floor(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  const ArchPlanner& planner = planner_for(device);
  const BackwardKernel& t = plan.backward.tile;
  const TileWork work = work_of(p);
  const double d = t.head_dim, dims = t.head_dim + t.head_dim_v, sms = device.sm_count;
  Floor f;
  f.pairs = work.pairs;
  const double scores = t.two_pass ? 2 : 1;  // number of computations
  f.flops = 2 * work.pairs * (2 * dims + scores * d);
  f.mma_clocks = f.flops / planner.flops_per_clock() / sms;
  f.exp_clocks = scores * work.pairs / planner.exp_per_clock(device) / sms;
  f.shared_clocks =
      work.pairs * planner.iteration_smem_bytes(t) / (static_cast<double>(t.tile_m) * t.tile_n) / kSharedPerClock / sms;
  const auto bytes = [](const View& view, int64_t columns) {
    return view ? static_cast<double>(columns * size_of(view.dtype)) : 0;
  };
  const double rows = work.rows * static_cast<double>(p.heads_q), keys = work.keys * static_cast<double>(p.heads_k);
  const double given = bytes(p.out, p.head_dim_v) + bytes(p.dout, p.head_dim_v) + kFloat;
  const double own =
      keys * (bytes(p.k, p.head_dim) + bytes(p.v, p.head_dim_v) + bytes(p.dk, p.head_dim) + bytes(p.dv, p.head_dim_v)) +
      rows * (given + bytes(p.dq, p.head_dim));
  f.hbm_bytes = own + rows * bytes(p.q, p.head_dim);
  // A chunk of dS exceeds the L2 cache.
  constexpr int64_t kL2Bytes = 32 << 20;
  if (plan.backward.chunk.bytes > kL2Bytes) f.hbm_bytes += 2 * kElement * work.pairs;
  // Every tile of keys reads the queries that see it, their dout, lse and delta. Several tiles add to a float32 dq,
  // which is then converted. With ds_gmem a tile writes dS instead, which the dq kernel reads.
  const double sums = t.single_n_block || t.ds_gmem ? 0 : d;
  f.l2_bytes = own + work.pairs / t.tile_n * (kElement * planner.iteration_columns(t) + kFloat * (2 * scores + sums)) +
               rows * kFloat * (2 + sums) + (t.ds_gmem ? 2 * kElement * work.pairs : 0);
  f.binds = what_binds(f);
  f.at_bounds = varlen(p);
  return f;
}

std::vector<std::string> backward_reasons(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  const BackwardSchedule& t = plan.backward;
  std::vector<std::string> lines{why_tile(p, t.tile, device)};
  if (p.group() > 1 && t.tile.dkv_semaphores == 0) {
    lines.push_back(str_cat("heads: a block iterates over the ", p.group(),
                            " query heads of its key head, so that dk and dv stay in registers"));
  }
  if (p.banded() && !needs_left_mask(p) && !needs_right_mask(p))
    lines.emplace_back("mask: no bound hides a key at these lengths, so that the kernel has no mask");
  if (t.tile.ds_gmem) {
    lines.push_back(str_cat("order: blocks take tiles of keys from a counter; dS goes to memory in ", t.ds_chunks,
                            t.ds_chunks == 1 ? " chunk" : " chunks", " of ", t.chunk.bytes / 1000000.0,
                            " MB, and a second kernel computes dq from it"));
  } else if (t.tile.single_n_block) {
    lines.emplace_back("order: one tile has all keys, so that dq is stored directly");
  } else {
    lines.emplace_back(
        "order: blocks take tiles of keys from a counter and add dq in the order of tiles, so that every run gives the "
        "same bits");
  }
  if (t.part_n_blocks > 0) {
    lines.push_back(
        str_cat("split: a tile has the queries between the diagonals of two n_blocks whose distance is ",
                t.part_n_blocks, "; up to ", t.m_splits,
                " tiles share an n_block; their dk and dv are summed in a fixed order at the end, and dq of ",
                t.dq_splits, t.dq_splits == 1 ? " sum" : " sums"));
  } else if (t.tile.spt) {
    lines.push_back(str_cat("order: the n_blocks of ", t.spt_heads,
                            " heads start at the diagonal, last n_block first (no block waits to add dq); "
                            "the remaining heads run at the end, longest n_block first"));
  }
  if (t.tile.dkv_semaphores > 0) {
    lines.push_back(str_cat("split: a tile has ", p.group() == t.m_splits ? "one" : str_cat(p.group() / t.m_splits),
                            " of the ", p.group(),
                            " query heads that share its keys; dk and dv are added in the order of heads"));
  } else if (t.unsplit_tiles > 0) {
    lines.push_back(str_cat("split: the first ", t.unsplit_tiles, " tiles fill all SMs; ", t.m_splits,
                            " blocks share the queries of each further n_block, and their dk and dv are summed in a "
                            "fixed order at the end"));
  } else if (t.m_splits > 1 && t.part_n_blocks == 0) {
    lines.push_back(
        str_cat("split: n_blocks are few, so that ", t.m_splits,
                " blocks share the queries of each; their dk and dv are summed in a fixed order at the end"));
  }
  const bool has_dq_splits = t.dq_splits > 1 && t.part_n_blocks == 0;  // on Hopper
  if (has_dq_splits && t.tile.for_hopper().wraps) {
    lines.push_back(
        "dq: n_blocks begin at different queries and wrap around, so that blocks wait less; queries after the wrap add "
        "to other sums");
  } else if (has_dq_splits) {
    lines.push_back(str_cat("dq: n_blocks add to ", t.dq_splits,
                            " sums in turn, so that blocks wait less; bwd_postprocess adds the sums in order"));
  }
  if (t.l2_heads > 1 && !t.tile.spt)
    lines.push_back(str_cat("cache: the tiles of up to ", t.l2_heads, " heads run together"));
  lines.push_back(str_cat("grid: ", t.grid, " blocks on ", device.sm_count, " SMs for ", varlen(p) ? "up to " : "",
                          t.tiles, t.tile.two_pass ? " tiles each of dk and dv" : " tiles"));
  return lines;
}

}  // namespace tandem::plan
