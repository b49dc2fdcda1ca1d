// Hopper's part of plans, and its lines of `tandem explain`.
#include "base/text.h"
#include "plan/arch_planner.h"
#include "plan/explain_units.h"
#include "plan/forward.h"
#include "plan/sm90/backward.h"
#include "plan/sm90/forward.h"

namespace tandem::plan {
namespace {

using Schedule = Sm90BackwardConfig::Schedule;

const char* describe(Schedule schedule) {
  switch (schedule) {
    case Schedule::rs: return ", ";
    case Schedule::warpgroup_roles: return " for scores, dv and dk, ";
    case Schedule::ds_gmem_sub_m: return ", ";
    default: return " that share keys and split the columns of dk and dv, ";
  }
}

class Sm90Planner final : public ArchPlanner {
 public:
  ForwardKernel select_forward(const Problem& p, const gpu::Properties&, int pack_gqa,
                               const Tuning& tuning) const override {
    Sm90ForwardConfig t = with_pages(select_sm90_forward(p, pack_gqa, tuning.sm90), p);
    t.gathers_pages = gathers_pages(p, t);
    if (t.gathers_pages) t.page_rows = 16;  // all small pages share a kernel
    return t;
  }
  ForwardKernel split_keys(const ForwardKernel& kernel) const override {
    Sm90ForwardConfig t = kernel.for_hopper();
    t.split_keys = t.f32_out = true;
    t.bias_ctas = 0;  // the CTAs of a cluster would have different splits
    t.kv_ctas = 1;
    return t;
  }
  ForwardKernel device_splits(const ForwardKernel& kernel) const override {
    Sm90ForwardConfig t = kernel.for_hopper();
    t.device_splits = t.options.varlen = true;
    t.bias_ctas = 0;  // TMA copies no bias of listed tiles
    t.kv_ctas = 1;
    return t;
  }
  int max_pack_gqa() const override { return 128; }  // the rows of a tile that all configurations have
  const ForwardOrderTuning& forward_order(const Tuning& tuning) const override { return tuning.sm90.forward_order; }
  ForwardTimes forward_times(const ForwardKernel& kernel) const override {
    return forward_times_of(kernel.for_hopper());
  }
  int64_t block_mask_queries() const override { return Sm90ForwardConfig::step_rows(); }
  int64_t block_mask_keys() const override { return kLeastBlockKeys; }

  void select_backward(const Problem& p, const Tuning& tuning, BackwardSchedule* schedule) const override {
    select_sm90_backward(p, tuning.sm90.backward, schedule);
  }
  void set_ds_chunks(const Problem& p, const Tuning&, BackwardSchedule* schedule) const override {
    set_sm90_ds_chunks(p, schedule);
  }
  const BackwardOrderTuning& backward_order(const Tuning& tuning) const override { return tuning.sm90.backward.order; }

  std::string explain_tile(const Problem& p, const ForwardKernel& kernel) const override {
    const Sm90ForwardConfig& t = kernel.for_hopper();
    return str_cat("tile: ", t.tile_m(), " rows x ", t.tile_n, " keys, ", t.warpgroups, " MMA warpgroups",
                   t.pingpong ? " in pingpong order" : " without an order", ", ", t.stages, " stages, ", t.smem_bytes(),
                   " bytes of shared memory: the fastest measured at head_dim ", p.head_dim);
  }
  std::string explain_tile(const BackwardKernel& kernel) const override {
    const Sm90BackwardConfig& t = kernel.for_hopper();
    return str_cat(
        t.warpgroups, " MMA warpgroups", describe(t.schedule), explain_stages(t.q_stages, t.dout_stages),
        kernel.smem_bytes, " bytes of it",
        t.cluster2() ? " in each of two blocks, which have half of the keys, exchange dS and add half of dq each" : "");
  }

  // A warpgroup's 64 rows read K and V of an n_block once. The rows read Q, too, unless it is in registers.
  double pair_smem_bytes(const ForwardKernel& kernel) const override {
    const double written = static_cast<double>(kernel.head_dim + kernel.head_dim_v) / kernel.tile_m();
    const double queries =
        kernel.for_hopper().q_in_registers() ? 0 : static_cast<double>(kernel.head_dim) / kernel.tile_n;
    return kElement * (static_cast<double>(kernel.head_dim + kernel.head_dim_v) / 64 + written + queries);
  }

  // Returns the bytes that MMAs read, that threads and TMA write, and that bulk copies read.
  double iteration_smem_bytes(const BackwardKernel& kernel) const override {
    const Sm90BackwardConfig& t = kernel.for_hopper();
    const double groups = t.warpgroup_roles() ? 1 : t.warpgroups;  // warpgroups that divide each MMA
    const double ctas = t.ctas(), m = t.tile_m, n = t.cta_keys(), dims = t.head_dim + t.head_dim_v;
    const double scores = groups * (64 + t.score_queries()) * dims;
    const double keys = groups * (m * (t.dk_columns() + t.dv_columns()) + (t.shared_p() ? 2 * 64 * m : 0));
    // warpgroup_roles has two MMAs for dq. With ds_gmem the dq kernel reads K once for two m_blocks.
    const double queries = t.ds_gmem() ? m * n + n * t.head_dim + m * n + n * t.head_dim / 2
                                       : groups * ctas * n * ((t.warpgroup_roles() ? 2 : 1) * 64 + t.dq_columns());
    const double sent = t.cluster2() ? 2 * m * n : t.ds_gmem() ? m * n : 0;  // dS
    const double written = m * n * (t.shared_p() ? 2 : 1) + m * dims;
    const double dq = t.staged() ? 2 * kFloat * t.dq_floats() : 0;
    return ctas * kElement * (scores + keys + queries + sent + written) + dq;
  }
  double iteration_columns(const BackwardKernel& kernel) const override {
    return kernel.ctas * (kernel.head_dim + kernel.head_dim_v);
  }
  double flops_per_clock() const override { return 4096; }
  double exp_per_clock(const gpu::Properties&) const override { return 16; }
};

constexpr Sm90Planner kPlanner;

}  // namespace

const ArchPlanner& kSm90Planner = kPlanner;

}  // namespace tandem::plan
