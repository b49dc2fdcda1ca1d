// Properties of a backward problem that the choice of a kernel depends on, for every architecture.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/order_tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// Returns true if a score_mod reads tensors whose gradients must be computed.
bool wants_captured(const Problem& p);

// Returns true if the main kernel can accumulate these gradients from a sum of dS per tile.
bool captured_per_tile(const Problem& p);

// Returns true if the main kernel can accumulate these gradients from each score.
bool captured_per_score(const Problem& p);

// Returns true if dk or dv is float32 or accumulated into. Both are then stored from registers, two columns at a time.
bool stores_from_registers(const Problem& p);

// Bytes of q, dout and dq_accum that one iteration accesses per query: the working set that should fit in the L2 cache.
constexpr int64_t query_bytes(int64_t head_dim, int64_t head_dim_v) {
  return 2 * (head_dim + head_dim_v) + 4 * head_dim;
}

// Returns the key heads whose q, dout and dq_accum fit in the L2 cache together, without a mask.
inline int64_t full_l2_heads(const Problem& p, int64_t head_dim, int64_t head_dim_v,
                             const BackwardOrderTuning& tuning) {
  const int64_t queries = std::max<int64_t>(p.seqlen_q * p.group(), 1);
  return std::min(tuning.full_l2_bytes / (queries * query_bytes(head_dim, head_dim_v)), tuning.max_full_heads);
}

// Returns true if the n_blocks of a causal mask may be scheduled shortest first (spt). The order of sums differs, so a
// batch_invariant problem must not decide by lengths.
template <class Config>
bool may_use_spt(const Problem& p, const Config& config) {
  if (config.options.block_mask || p.total_q == 0 || (p.batch_invariant && p.group() > 1)) return false;
  if (p.batch_invariant) return p.window_right != TANDEM_UNBOUNDED && p.window_left == TANDEM_UNBOUNDED;
  return config.options.bounded_right && !config.options.bounded_left;
}

}  // namespace tandem::plan
