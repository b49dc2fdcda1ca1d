// The reasons of a backward's plan, and the lower bound of any kernel's time.
#include <algorithm>

#include "base/text.h"
#include "plan/explain_units.h"

namespace tandem::plan {
namespace {

constexpr double kFloat = 4;  // bytes

// Bytes of shared memory per iteration of tile_m queries and tile_n keys: reads of products, writes of threads and
// copies, reads of copies.
double shared_bytes_of_step(const Sm90BackwardConfig& t) {
  const double groups = t.warpgroup_roles ? 1 : t.warpgroups;  // warpgroups that share each product
  const double ctas = t.ctas(), m = t.tile_m, n = t.cta_keys(), dims = t.head_dim + t.head_dim_v;
  const double scores = groups * (64 + t.score_queries()) * dims;
  // P and dS are in registers, except for wide heads, whose warpgroups share them.
  const double keys = groups * (m * (t.dk_columns() + t.dv_columns()) + (t.shared_p() ? 2 * 64 * m : 0));
  // roles: two products. strips: the dq kernel's, which reads keys once for two m_blocks.
  const double queries = t.ds_gmem ? m * n + n * t.head_dim + m * n + n * t.head_dim / 2
                                   : groups * ctas * n * ((t.warpgroup_roles ? 2 : 1) * 64 + t.dq_columns());
  const double sent = t.cluster2 ? 2 * m * n : t.ds_gmem ? m * n : 0;  // dS: read here, written there
  const double written = m * n * (t.shared_p() ? 2 : 1) + m * dims;
  const double dq = t.staged() ? 2 * kFloat * t.dq_floats() : 0;  // else dq goes from registers to memory
  return ctas * kElement * (scores + keys + queries + sent + written) + dq;
}

// Columns of queries and dout that an iteration loads.
double columns_of_step(const Sm100BackwardConfig& t) {
  return t.two_pass() ? 3 * t.head_dim + 2 * t.head_dim_v : t.head_dim + t.head_dim_v;
}

// P and dS are in tensor memory, and dS for dq in shared memory. A CTA pair shares the second operands of its products,
// but exchanges half of dS. In two passes S is multiplied twice, and queries are loaded for each product.
double shared_bytes_of_step(const Sm100BackwardConfig& t) {
  const double m = Sm100BackwardConfig::tile_m, n = Sm100BackwardConfig::kCtaKeys, ctas = t.ctas();
  const double dims = t.head_dim + t.head_dim_v;
  const double again = t.two_pass() ? t.head_dim : 0;
  const double scores = (n + m / ctas) * (dims + again), keys = m * dims / ctas;
  const double queries = n * (m * t.dq_pieces() + t.head_dim);
  const double written = m * n + m * columns_of_step(t) + (t.two_cta ? m * n : 0);
  return ctas * kElement * (scores + keys + queries + written) + 2 * kFloat * t.dq_floats();
}

// For each CTA of a Hopper pair.
double columns_of_step(const BackwardKernel& tile) {
  if (const auto* t = std::get_if<Sm100BackwardConfig>(&tile.kernel)) return columns_of_step(*t);
  return tile.ctas * (tile.head_dim + tile.head_dim_v);
}

double shared_bytes_of_pair(const BackwardKernel& tile) {
  const double pairs = static_cast<double>(tile.tile_m) * tile.tile_n;
  if (const auto* t = std::get_if<Sm100BackwardConfig>(&tile.kernel)) return shared_bytes_of_step(*t) / pairs;
  return shared_bytes_of_step(tile.for_hopper()) / pairs;
}

std::string why_tile(const Problem& p, const BackwardKernel& tile) {
  std::string text = str_cat("tile: ", tile.tile_n, " keys, which iterate over the queries that see them, ",
                             tile.tile_m, " at a time, ");
  const auto stages = [&text](int queries, int dout) {
    text +=
        str_cat(queries, queries == 1 ? " stage" : " stages", " of queries and ", dout, " of dout in shared memory, ");
  };
  if (const auto* t = std::get_if<Sm100BackwardConfig>(&tile.kernel)) {
    if (t->two_pass()) {
      text += str_cat("in two passes, for dk with dq and for dv, because tensor memory has no capacity for both; ",
                      t->ring_blocks(), " and ", t->for_dv().ring_blocks(),
                      " blocks of 64 columns of queries and dout in shared memory, ");
    } else {
      stages(t->q_stages, t->dout_stages);
    }
    text += str_cat(tile.smem_bytes, " bytes of it", t->two_cta ? " in each of two blocks with two-CTA products" : "",
                    ": counted, not measured");
  } else {
    const Sm90BackwardConfig& hopper = tile.for_hopper();
    text += str_cat(hopper.warpgroups, " MMA warpgroups",
                    hopper.warpgroup_roles ? " for scores, dv and dk, "
                    : hopper.shared_p()    ? " that share keys and split the columns of dk and dv, "
                                           : ", ");
    stages(hopper.q_stages, hopper.dout_stages);
    text += str_cat(tile.smem_bytes, " bytes of it",
                    hopper.cluster2
                        ? " in each of two blocks, which have half of the keys, exchange dS and add half of dq each"
                        : "");
  }
  text += str_cat(", head_dim ", p.head_dim);
  if (p.head_dim_v != p.head_dim) text += str_cat(" and ", p.head_dim_v);
  if (tile.head_dim != p.head_dim || tile.head_dim_v != p.head_dim_v)
    text += str_cat(" as ", tile.head_dim, tile.head_dim_v != tile.head_dim ? str_cat(" and ", tile.head_dim_v) : "");
  return text;
}

}  // namespace

Floor backward_floor(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  const BackwardKernel& t = plan.backward.tile;
  const TileWork work = work_of(p);
  const double d = t.head_dim, dims = t.head_dim + t.head_dim_v, sms = device.sm_count;
  Floor f;
  f.pairs = work.pairs;
  const double scores = t.two_pass ? 2 : 1;  // number of computations
  f.flops = 2 * work.pairs * (2 * dims + scores * d);
  f.mma_clocks = f.flops / flops_per_clock(device) / sms;
  f.exp_clocks = scores * work.pairs / exp_per_clock(device) / sms;
  f.shared_clocks = work.pairs * shared_bytes_of_pair(t) / kSharedPerClock / sms;
  const auto bytes = [](const View& view, int64_t columns) {
    return view ? static_cast<double>(columns * size_of(view.dtype)) : 0;
  };
  const double rows = work.rows * static_cast<double>(p.heads_q), keys = work.keys * static_cast<double>(p.heads_k);
  const double given = bytes(p.out, p.head_dim_v) + bytes(p.dout, p.head_dim_v) + kFloat;
  const double own =
      keys * (bytes(p.k, p.head_dim) + bytes(p.v, p.head_dim_v) + bytes(p.dk, p.head_dim) + bytes(p.dv, p.head_dim_v)) +
      rows * (given + bytes(p.dq, p.head_dim));
  f.hbm_bytes = own + rows * bytes(p.q, p.head_dim);
  // dS of a strip that exceeds the L2 cache.
  constexpr int64_t kL2Bytes = 32 << 20;
  if (plan.backward.ds_chunk_bytes > kL2Bytes) f.hbm_bytes += 2 * kElement * work.pairs;
  // Every tile of keys reads the queries that see it, their dout, lse and delta. It adds to their float32 dq, which is
  // then converted, unless there is only one tile. With strips it writes dS instead, which is read again.
  const double sums = t.single_n_block || t.ds_gmem ? 0 : d;
  f.l2_bytes = own + work.pairs / t.tile_n * (kElement * columns_of_step(t) + kFloat * (2 * scores + sums)) +
               rows * kFloat * (2 + sums) + (t.ds_gmem ? 2 * kElement * work.pairs : 0);
  f.binds = what_binds(f);
  f.at_bounds = varlen(p);
  return f;
}

std::vector<std::string> backward_reasons(const Problem& p, const Plan& plan, const gpu::Properties& device) {
  const BackwardSchedule& t = plan.backward;
  std::vector<std::string> lines{why_tile(p, t.tile)};
  if (p.group() > 1 && t.tile.dkv_semaphores == 0) {
    lines.push_back(str_cat("heads: a block iterates over the ", p.group(),
                            " query heads of its key head, so that dk and dv stay in registers"));
  }
  if (p.banded() && !needs_left_mask(p) && !needs_right_mask(p))
    lines.emplace_back("mask: no bound hides a key at these lengths, so that the kernel has no mask");
  if (t.tile.ds_gmem) {
    lines.push_back(str_cat("order: blocks take tiles of keys from a counter; dS goes to memory in ", t.ds_chunks,
                            t.ds_chunks == 1 ? " strip" : " strips", " of ", t.ds_chunk_bytes / 1000000.0,
                            " MB, and a second kernel computes dq from it"));
  } else if (t.tile.single_n_block) {
    lines.emplace_back("order: one tile has all keys, so that dq is stored directly");
  } else {
    lines.emplace_back(
        "order: blocks take tiles of keys from a counter and add dq in the order of tiles, so that every run gives the "
        "same bits");
  }
  if (t.tile.spt) {
    lines.push_back(str_cat("order: the n_blocks of ", t.spt_heads,
                            " heads start at the diagonal, last n_block first (no block waits to add dq); "
                            "the remaining heads run at the end, longest n_block first"));
  }
  if (t.tile.dkv_semaphores > 0) {
    lines.push_back(str_cat("split: a tile has ", p.group() == t.m_splits ? "one" : str_cat(p.group() / t.m_splits),
                            " of the ", p.group(),
                            " query heads that share its keys; dk and dv are added in the order of heads"));
  } else if (t.m_splits > 1) {
    lines.push_back(
        str_cat("split: n_blocks are few, so that ", t.m_splits,
                " blocks share the queries of each; their dk and dv are summed in a fixed order at the end"));
  }
  if (t.l2_heads > 1 && !t.tile.spt && !t.tile.ds_gmem)
    lines.push_back(str_cat("cache: the tiles of up to ", t.l2_heads, " key heads run together"));
  lines.push_back(str_cat("grid: ", t.grid, " blocks on ", device.sm_count, " SMs for ", varlen(p) ? "up to " : "",
                          t.tiles, t.tile.two_pass ? " tiles each of dk and dv" : " tiles"));
  return lines;
}

}  // namespace tandem::plan
