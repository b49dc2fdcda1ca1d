#include "plan/sm90/rs_parts.h"

#include <algorithm>

#include "plan/arithmetic.h"
#include "plan/forward.h"

namespace tandem::plan {
namespace {

// The sizes that a prediction depends on.
struct RsSizes {
  const Problem& p;
  const Sm90BackwardConfig& config;
  const Sm90BackwardTimes& times;
  int64_t n_blocks, iterations, heads;  // iterations: of an n_block that every query sees
  double full;                          // share of the keys that every query sees
  double visible;                       // share of the m_blocks that an n_block visits, on average

  RsSizes(const Problem& problem, const Sm90BackwardConfig& t, const Sm90BackwardTimes& constants)
      : p(problem),
        config(t),
        times(constants),
        n_blocks(ceil_div(p.seqlen_k, t.tile_n())),
        iterations(p.group() * ceil_div(p.seqlen_q, t.tile_m)),
        heads(p.batch * p.heads_k),
        full(1),
        visible(1) {
    if (!needs_right_mask(p)) return;
    const double queries = static_cast<double>(p.seqlen_q), keys = static_cast<double>(p.seqlen_k);
    full = std::max(0.0, 1 - queries / keys);
    visible = queries > keys ? 0.5 * keys / queries : full + (1 - full) / 2;
  }

  double predict(const RsParts& parts) const {
    const double m_splits = static_cast<double>(parts.m_splits), sms = static_cast<double>(kH200Sms);
    const double iteration =
        config.head_dim > 64 && p.head_dim < config.head_dim ? times.narrow_iteration : times.iteration;
    const double count = static_cast<double>(iterations), tiles = static_cast<double>(n_blocks * heads) * m_splits;
    double time = times.launch;
    if (visible == 1) {
      const int64_t waves = ceil_div(n_blocks * heads * parts.m_splits, kH200Sms);
      const int64_t of_part = ceil_div(iterations, parts.m_splits);
      time += static_cast<double>(waves) * (static_cast<double>(of_part) * iteration + times.tile);
    } else {
      const double longest = count * std::min(1.0, 2 * visible) / m_splits * iteration;
      const double mean = count * visible / m_splits * iteration + times.tile;
      time += std::max(longest + times.tile, tiles / sms * mean + (tiles > sms ? longest / 4 : 0));
    }
    // The n_blocks of a range add their first dq one after the other.
    const int64_t together = kH200Sms / parts.m_splits / (heads == 1 ? 1 : 2);
    const int64_t chain = std::min(ceil_div(n_blocks, parts.dq_splits), std::max<int64_t>(together, 1));
    time += static_cast<double>(chain) * times.dq_wait * full;
    const double dq = static_cast<double>(p.batch * p.heads_q * p.seqlen_q * config.head_dim * parts.dq_splits);
    time += 8 * dq / times.byte_rate;
    if (parts.m_splits > 1) time += times.m_split + 8 * tiles * config.dkv_floats() / times.byte_rate;
    return time;
  }
};

}  // namespace

bool has_many_full_n_blocks(const Problem& p) { return 4 * p.seqlen_k > 5 * p.seqlen_q; }

RsParts choose_rs_parts(const Problem& p, const Sm90BackwardConfig& t, const Sm90BackwardTuning& tuning) {
  RsParts best;
  if (p.total_q == 0 || p.seqlen_k == 0 || p.batch_invariant) return best;
  const RsSizes sizes(p, t, t.head_dim > 64 || t.head_dim_v > 64 ? kSm90Times128 : kSm90Times64);
  const bool is_causal = needs_right_mask(p);
  // Under a causal mask parts that begin within a head's m_blocks would wait for the semaphores of its dq.
  const int64_t most_m =
      std::min(tuning.max_m_splits, is_causal ? p.group() : sizes.iterations / tuning.min_split_iterations);
  const int64_t dq_bytes = 4 * p.batch * p.heads_q * p.seqlen_q * t.head_dim;
  const bool waits = !t.options.block_mask && (!is_causal || has_many_full_n_blocks(p));
  double least = sizes.predict(best);
  for (int64_t m_splits = 1; m_splits <= std::max<int64_t>(most_m, 1); ++m_splits) {
    if (is_causal && p.group() % m_splits != 0) continue;
    for (int64_t dq_splits = 1; dq_splits <= 16; dq_splits *= 2) {
      if (dq_splits > 1 && (!waits || dq_splits > sizes.n_blocks || dq_splits * dq_bytes > tuning.max_dq_split_bytes))
        break;
      const RsParts parts{m_splits, dq_splits};
      const double time = sizes.predict(parts);
      if (time < least) best = parts, least = time;
    }
  }
  return best;
}

}  // namespace tandem::plan
