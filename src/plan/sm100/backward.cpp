#include "plan/sm100/backward.h"

#include <algorithm>

#include "plan/arithmetic.h"
#include "plan/backward_needs.h"
#include "plan/forward.h"

namespace tandem::plan {
namespace {

// Returns true if two CTAs share each MMA. An iteration then moves less data through shared memory, but an n_block is
// twice as long. A longer n_block has more hidden keys, and the last wave may be emptier. With batch_invariant the
// choice is by head_dim alone. The function assumes a whole B200, because bits must not depend on the available SMs.
bool uses_two_cta(const Problem& p, const Sm100BackwardTuning& tuning) {
  constexpr int64_t kKeys = Sm100BackwardConfig::kCtaKeys;
  if (p.head_dim > 128 && p.head_dim <= 192 && p.head_dim_v <= 128) return true;  // one CTA needs two passes
  const auto is_served = [](int64_t head_dim) { return head_dim > 64 && head_dim <= 128; };
  if (!is_served(p.head_dim) || !is_served(p.head_dim_v) || p.seqlen_k <= kKeys || p.batch_invariant) return false;
  const int64_t clocks = tuning.head_dim_clocks * round_up(p.head_dim, 16) +
                         tuning.head_dim_v_clocks * round_up(p.head_dim_v, 16) + tuning.fixed_clocks;
  const int64_t heads = p.batch * p.heads_k;
  const int64_t waves = ceil_div(ceil_div(p.seqlen_k, kKeys) * heads, kB200Sms);
  const int64_t two_cta_waves = ceil_div(ceil_div(p.seqlen_k, 2 * kKeys) * heads, kB200Sms / 2);
  // The products are doubles because they may exceed 64 bits.
  const double cost = static_cast<double>(waves) * static_cast<double>(clocks);
  const double two_cta_cost = static_cast<double>(two_cta_waves) * static_cast<double>(tuning.two_cta_clocks);
  if (!needs_left_mask(p) && !needs_right_mask(p)) return two_cta_cost < cost;
  // In a triangle of blocks each row of a cluster covers one more block.
  const auto m_blocks = static_cast<double>(ceil_div(p.seqlen_q, Sm100BackwardConfig::tile_m));
  return two_cta_cost * (m_blocks + 2) < cost * (m_blocks + 1);
}

bool uses_spt(const Problem& p, const Sm100BackwardConfig& config, const Sm100BackwardTuning& tuning) {
  if (!may_use_spt(p, config)) return false;
  const int64_t bytes = p.group() * p.seqlen_q * query_bytes(config.head_dim, config.head_dim_v);
  return p.batch_invariant || bytes <= tuning.spt_l2_bytes;
}

constexpr int kMinRingBlocks = 5;  // their products take longer than a load

void set_head_dims(const Problem& p, int64_t multiple, Sm100BackwardConfig* config) {
  config->head_dim = static_cast<int>(round_up(p.head_dim, multiple));
  config->head_dim_v = static_cast<int>(round_up(p.head_dim_v, multiple));
}

// Sets the maximum number of stages that fit: first of q, then of dout, then of dq. Returns false if none fit.
bool set_one_cta_stages(Sm100BackwardConfig* config) {
  Sm100BackwardConfig& t = *config;
  for (t.dq_stages = 4; t.dq_stages > 1; t.dq_stages /= 2)
    for (t.dout_stages = 2; t.dout_stages > 0; --t.dout_stages)
      for (t.q_stages = 3; t.q_stages > 1; --t.q_stages)
        if (t.fits()) return true;
  return false;
}

}  // namespace

Sm100BackwardConfig select_sm100_backward(const Problem& p, const Sm100Tuning& tuning) {
  Sm100BackwardConfig t{.exact_n = tuning.switches.exact_n, .wait_products = tuning.switches.wait_products};
  t.options = options_of(p);
  t.store_from_registers = stores_from_registers(p);
  t.captured = wants_captured(p);
  t.captured_per_tile = captured_per_tile(p);
  t.two_cta = tuning.switches.two_cta && uses_two_cta(p, tuning.backward);
  set_head_dims(p, t.two_cta ? 64 : 16, &t);
  if (t.two_cta) {
    t.head_dim = std::max(t.head_dim, 128);
    t.head_dim_v = 128;
    t.q_stages = t.dout_stages = 1;
    t.dq_stages = 2;
  } else if (!set_one_cta_stages(&t)) {
    // Tensor memory has no space for all accumulators of wide heads: dk and dq, then dv, in two passes.
    set_head_dims(p, 64, &t);
    t.accumulators = Accumulators::dk;
    t.q_stages = t.dout_stages = 1;
    t.dq_stages = t.ring_blocks() > kMinRingBlocks ? 4 : 2;  // two more slots take a block of the ring
  }
  t.spt = uses_spt(p, t, tuning.backward);
  return t;
}

}  // namespace tandem::plan
