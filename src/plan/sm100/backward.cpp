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
  if (!may_use_spt(p, config) || config.ds_gmem()) return false;
  const int64_t bytes = p.group() * p.seqlen_q * query_bytes(config.head_dim, config.head_dim_v);
  return p.batch_invariant || bytes <= tuning.spt_l2_bytes;
}

void set_head_dims(const Problem& p, int64_t multiple, Sm100BackwardConfig* config) {
  config->head_dim = static_cast<int>(round_up(p.head_dim, multiple));
  config->head_dim_v = static_cast<int>(round_up(p.head_dim_v, multiple));
}

// Bytes of the dS of an m_block and n_block.
constexpr int64_t kDsBlockBytes = int64_t{2} * Sm100BackwardConfig::tile_m * Sm100BackwardConfig::kCtaKeys;

// Returns the maximum number of n_blocks that an m_block sees.
int64_t row_n_blocks(const Problem& p, const Sm100BackwardConfig& config, int64_t n_blocks) {
  if (!config.options.bounded_left || p.window_right == TANDEM_UNBOUNDED) return n_blocks;
  const int64_t visible = std::clamp<int64_t>(p.window_left + p.window_right, 0, p.seqlen_k);  // one may be negative
  return std::min(n_blocks, ceil_div(visible + config.tile_m, int64_t{config.kCtaKeys}) + 1);
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
    // Tensor memory has no space for all accumulators of wide heads: dk and dS, then dv, in two passes.
    set_head_dims(p, 64, &t);
    t.accumulators = Accumulators::dk;
    t.q_stages = t.dout_stages = t.dq_stages = 1;
  }
  t.spt = uses_spt(p, t, tuning.backward);
  return t;
}

// A chunk has whole heads if they fit, else some n_blocks of one head.
void set_sm100_ds_chunks(const Problem& p, const Sm100BackwardTuning& tuning, BackwardSchedule* schedule) {
  BackwardSchedule& t = *schedule;
  ChunkSizes& chunk = t.chunk;
  const int64_t group = p.group(), n_blocks = std::max(t.n_blocks, 1);
  int64_t heads_k = std::max<int64_t>(p.heads_k, 1);
  chunk.n_blocks = n_blocks;
  if (p.dq) {
    const int64_t tile_bytes = std::max<int64_t>(group * t.m_blocks * kDsBlockBytes, 1);
    const int64_t rows_q = p.packed_q() ? p.total_q : p.batch * p.seqlen_q;
    const int64_t rows_k = p.packed_k() ? p.total_k : p.batch * p.seqlen_k;
    const int64_t elements = rows_q * p.heads_q * p.head_dim + rows_k * p.heads_k * (p.head_dim + p.head_dim_v);
    const int64_t bytes = std::max(tuning.ds_bytes_per_gradient * elements, tuning.min_ds_bytes);
    const int64_t sm_tiles =
        std::min(ceil_div(tuning.order.sms, std::max<int64_t>(p.batch, 1)), tuning.max_ds_bytes / tile_bytes);
    const int64_t chosen = tuning.ds_chunk_tiles.value_or(std::max(bytes / tile_bytes, sm_tiles));
    const int64_t most = std::max<int64_t>(chosen, 1);
    chunk.row_n_blocks = row_n_blocks(p, t.tile.for_blackwell(), n_blocks);
    if (chunk.row_n_blocks <= most) {
      heads_k = ceil_div(heads_k, ceil_div(heads_k, std::min(most / chunk.row_n_blocks, heads_k)));
    } else {
      heads_k = 1;
      chunk.n_blocks = chunk.row_n_blocks = ceil_div(n_blocks, ceil_div(n_blocks, most));
    }
    chunk.bytes = heads_k * chunk.row_n_blocks * tile_bytes;
  }
  chunk.tile_heads = group;
  chunk.heads = heads_k * group;
  chunk.all_heads = p.heads_q;
  t.ds_chunks = ceil_div(std::max<int64_t>(p.heads_k, 1), heads_k) * ceil_div(n_blocks, chunk.n_blocks);
  const int64_t tiles = p.batch * heads_k * chunk.n_blocks, passes = p.dv && (p.dq || p.dk) ? 2 : 1;
  t.grid = static_cast<int>(std::min(int64_t{t.grid}, tiles * passes));
  t.l2_heads = static_cast<int>(std::clamp<int64_t>(t.l2_heads, 1, std::max<int64_t>(p.batch * heads_k, 1)));
  t.accumulates_dq = p.dq && chunk.n_blocks < n_blocks;
  if (!p.dq || p.total_q == 0) return;
  constexpr int64_t kRows = Sm100BackwardConfig::kDqRows, kMBlocks = Sm100BackwardConfig::kDqMBlocks;
  const int64_t blocks =
      p.packed_q() ? p.total_q / kRows + p.batch + 1 : p.batch * ceil_div(int64_t{t.sequence_m_blocks}, kMBlocks);
  t.dq_ctas = std::min(chunk.heads, p.heads_q) * blocks;
  t.dq_smem_bytes = t.tile.for_blackwell().dq_smem_bytes();
}

}  // namespace tandem::plan
