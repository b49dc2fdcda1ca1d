// Blackwell's part of plans, and its lines of `tandem explain`.
#include "base/text.h"
#include "plan/arch_planner.h"
#include "plan/explain_units.h"
#include "plan/forward.h"
#include "plan/sm100/backward.h"
#include "plan/sm100/forward.h"

namespace tandem::plan {
namespace {

class Sm100Planner final : public ArchPlanner {
 public:
  ForwardKernel select_forward(const Problem& p, const gpu::Properties& device, int pack_gqa,
                               const Tuning& tuning) const override {
    return with_pages(select_sm100_forward(p, device, p.seqlen_q * pack_gqa, tuning.sm100.switches), p);
  }
  ForwardKernel split_keys(const ForwardKernel& kernel) const override {
    Sm100ForwardConfig t = kernel.for_blackwell();
    t.split_keys = t.f32_out = true;
    return t;
  }
  ForwardKernel device_splits(const ForwardKernel& kernel) const override {
    Sm100ForwardConfig t = kernel.for_blackwell();
    t.device_splits = t.options.varlen = true;
    t.clc = false;  // the list of tiles may be much shorter than its bound
    return t;
  }
  int max_pack_gqa() const override { return 64; }
  const ForwardOrderTuning& forward_order(const Tuning& tuning) const override { return tuning.sm100.forward_order; }
  ForwardTimes forward_times(const ForwardKernel& kernel) const override {
    return {kForwardIteration + kForwardIterationPerDim * (kernel.head_dim + kernel.head_dim_v), kForwardTile};
  }
  int64_t block_mask_queries() const override { return Sm100ForwardConfig::step_rows(); }
  int64_t block_mask_keys() const override { return Sm100ForwardConfig::tile_n; }

  void select_backward(const Problem& p, const Tuning& tuning, BackwardSchedule* schedule) const override {
    schedule->tile = select_sm100_backward(p, tuning.sm100);
    schedule->m_splits = 1;
  }
  void set_ds_chunks(const Problem& p, const Tuning& tuning, BackwardSchedule* schedule) const override {
    set_sm100_ds_chunks(p, tuning.sm100.backward, schedule);
  }
  bool overlaps_launches(const Tuning& tuning) const override { return tuning.sm100.switches.overlap_launches; }
  const BackwardOrderTuning& backward_order(const Tuning& tuning) const override { return tuning.sm100.backward.order; }

  std::string explain_tile(const Problem& p, const ForwardKernel& kernel) const override {
    const Sm100ForwardConfig& t = kernel.for_blackwell();
    return str_cat("tile: ", t.q_stage(), " x ", t.mma_m(), " rows x ", t.tile_n, " keys",
                   t.q_stage() > 1 ? ", which alternate on the tensor core" : ", two score buffers",
                   t.two_cta ? ", two-CTA products" : "", ", keys and values in a ring of ", t.ring_slots(),
                   " blocks of ", t.block_bytes(), " bytes, ", t.ex2_emu_pairs,
                   " of 16 exponentials on the FMA units: counted, not measured, at head_dim ", p.head_dim);
  }
  std::string explain_tile(const BackwardKernel& kernel) const override {
    const Sm100BackwardConfig& t = kernel.for_blackwell();
    const std::string stages =
        t.two_pass() ? str_cat(
                           "in two passes, for dk with dS and for dv, because tensor memory has no capacity for "
                           "both; ",
                           t.ring_blocks(), " and ", t.for_dv().ring_blocks(),
                           " blocks of 64 columns of queries and dout in shared memory, ")
        : t.two_cta_ring() ? str_cat(t.ring_blocks(), " blocks of 8192 bytes of queries and dout in shared memory, ")
                           : explain_stages(t.q_stages, t.dout_stages);
    return str_cat(stages, kernel.smem_bytes, " bytes of it",
                   t.two_cta ? " in each of two blocks with two-CTA products" : "", ": counted, not measured");
  }

  // P is in tensor memory. Each of two CTAs reads half of K and V.
  double pair_smem_bytes(const ForwardKernel& kernel) const override {
    const double keys_and_values = kernel.head_dim + kernel.head_dim_v;
    const double written = keys_and_values / kernel.tile_m();
    return kElement * ((kernel.head_dim + keys_and_values / kernel.ctas()) / Sm100ForwardConfig::kTileM + written);
  }

  // P and dS are in tensor memory; dq reads dS from shared memory. Two CTAs divide the B operands of their MMAs and
  // send each other half of dS. Two passes multiply S twice, and load q again for each MMA of it. With ds_gmem the dq
  // kernel loads K once for two m_blocks.
  double iteration_smem_bytes(const BackwardKernel& kernel) const override {
    const Sm100BackwardConfig& t = kernel.for_blackwell();
    const double m = Sm100BackwardConfig::tile_m, n = Sm100BackwardConfig::kCtaKeys, ctas = t.ctas();
    const double dims = t.head_dim + t.head_dim_v, again = t.two_pass() ? t.head_dim : 0;
    const double scores = (n + m / ctas) * (dims + again), keys = m * dims / ctas;
    const double queries = n * (m + t.head_dim);
    const double written = m * n + m * iteration_columns(kernel) + (t.two_cta ? m * n : 0);
    const double dq = t.ds_gmem() ? kElement * n * (2 * m + t.head_dim / 2.0) : 2 * kFloat * t.dq_floats();
    return ctas * kElement * (scores + keys + queries + written) + dq;
  }
  double iteration_columns(const BackwardKernel& kernel) const override {
    return kernel.two_pass ? 3 * kernel.head_dim + 2 * kernel.head_dim_v : kernel.head_dim + kernel.head_dim_v;
  }
  double flops_per_clock() const override { return 8192; }
  // The exponential unit is twice as fast from compute capability 10.3 (B300) on.
  double exp_per_clock(const gpu::Properties& device) const override { return device.compute_minor >= 3 ? 32 : 16; }
};

constexpr Sm100Planner kPlanner;

}  // namespace

const ArchPlanner& kSm100Planner = kPlanner;

}  // namespace tandem::plan
