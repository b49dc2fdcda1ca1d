#include "plan/sm100/forward.h"

#include "plan/arithmetic.h"
#include "plan/forward.h"
#include "plan/sm100/tuning.h"

namespace tandem::plan {
namespace {

// Returns true if rows fill the tiles of two CTAs as well as the tiles of one CTA.
bool fills_pairs(const Sm100ForwardConfig& t, int64_t rows) {
  Sm100ForwardConfig alone = t;
  alone.two_cta = false;
  return 2 * ceil_div(rows, 2 * alone.tile_m()) <= ceil_div(rows, alone.tile_m());
}

}  // namespace

Sm100ForwardConfig select_sm100_forward(const Problem& p, const gpu::Properties& device, int64_t rows,
                                        const Sm100Switches& switches) {
  auto t = forward_options<Sm100ForwardConfig>(p);
  t.exact_n = switches.exact_n;
  t.wait_products = switches.wait_products;
  // The exponential unit has twice the rate from B300 on, and kernels of others hung there with CLC.
  const bool b300 = device.compute_minor >= 3;
  for (const Sm100TuningRow& c : kSm100TuningRows) {
    if (t.head_dim > c.head_dim || t.head_dim_v > c.head_dim_v) continue;
    const bool full = !t.options.bounded_left && !t.options.bounded_right && !t.options.varlen && !t.has_score_mod() &&
                      !t.options.block_mask;
    t.two_cta = c.cluster == Cluster::two_cta || (c.cluster == Cluster::two_cta_if_full && switches.two_cta && full &&
                                                  !p.batch_invariant && fills_pairs(t, rows));
    // CLC launches one CTA per tile, which sm_limit forbids.
    t.clc = (b300 ? switches.clc_b300 : switches.clc) && t.two_cta &&
            (t.options.bounded_left || t.options.bounded_right || t.options.varlen) && p.sm_limit == 0;
    if (t.has_score_mod() || t.options.dropout || b300) {
      t.ex2_emu_pairs = 0;
    } else {
      const bool few = t.options.bounded_left || t.options.block_mask;  // few scores in registers at once
      t.ex2_emu_pairs = !t.lazy_max() ? c.ex2_emu_pairs_strict
                        : t.two_cta   ? c.ex2_emu_pairs_two_cta
                        : few         ? c.ex2_emu_pairs_window
                                      : c.ex2_emu_pairs_lazy;
    }
    break;
  }
  return t;
}

}  // namespace tandem::plan
