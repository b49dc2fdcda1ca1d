#include "plan/sm90/parts.h"

#include <algorithm>

#include "plan/arithmetic.h"
#include "plan/backward_needs.h"
#include "plan/forward.h"

namespace tandem::plan {
namespace {

// The share of the keys that every query sees, and the share of the m_blocks that an n_block visits, on average.
struct Visible {
  double full = 1, mean = 1;

  explicit Visible(const Problem& p) {
    if (!needs_right_mask(p)) return;
    const auto queries = static_cast<double>(p.seqlen_q), keys = static_cast<double>(p.seqlen_k);
    full = std::max(0.0, 1 - queries / keys);
    mean = queries > keys ? 0.5 * keys / queries : full + (1 - full) / 2;
  }
  bool all() const { return mean == 1; }
};

// Returns the time of tiles that take `tile` and at most `iterations` of their time. CTAs take tiles one by one.
double time_of_tiles(const Visible& visible, int64_t tiles, double tile, double iterations) {
  const auto count = static_cast<double>(tiles), sms = static_cast<double>(kH200Sms);
  if (visible.all()) return static_cast<double>(ceil_div(tiles, kH200Sms)) * (tile + iterations);
  const double longest = iterations * std::min(1.0, 2 * visible.mean), mean = iterations * visible.mean + tile;
  return std::max(longest + tile, count / sms * mean + (count > sms ? longest / 4 : 0));
}

// The sizes that a prediction depends on.
struct RsSizes {
  const Problem& p;
  const Sm90BackwardConfig& config;
  const Sm90BackwardTimes& times;
  const BackwardOrderTuning& order;
  int64_t n_blocks, iterations, heads;  // iterations: of an n_block that every query sees
  Visible visible;

  RsSizes(const Problem& problem, const Sm90BackwardConfig& t, const Sm90BackwardTimes& constants,
          const BackwardOrderTuning& order_tuning)
      : p(problem),
        config(t),
        times(constants),
        order(order_tuning),
        n_blocks(ceil_div(p.seqlen_k, t.tile_n())),
        iterations(p.group() * ceil_div(p.seqlen_q, t.tile_m)),
        heads(p.batch * p.heads_k),
        visible(p) {}

  // The number of key heads that run at once, as choose_l2_heads() has it.
  int64_t heads_together(int64_t m_splits) const {
    const int64_t most = visible.all()
                             ? std::max(full_l2_heads(p, config.head_dim, config.head_dim_v, order), int64_t{2})
                             : order.min_causal_heads * m_splits / p.group();
    const int64_t all = std::max<int64_t>(heads, 1), together = std::clamp<int64_t>(most, 1, all);
    return ceil_div(all, ceil_div(all, together));  // groups of nearly one size
  }

  double predict(const RsParts& parts) const {
    const double iteration =
        config.head_dim > 64 && p.head_dim < config.head_dim ? times.narrow_iteration : times.iteration;
    const int64_t tiles = (n_blocks * heads - parts.unsplit_tiles) * parts.m_splits;
    const int64_t of_part = ceil_div(iterations, parts.m_splits);
    double time = times.launch + time_of_tiles(visible, tiles, times.tile, static_cast<double>(of_part) * iteration);
    if (parts.unsplit_tiles > 0)
      time += time_of_tiles(visible, parts.unsplit_tiles, times.tile, static_cast<double>(iterations) * iteration);
    // The n_blocks of a range that run at once add their first dq one after the other.
    const int64_t of_first = parts.unsplit_tiles > 0 ? 1 : parts.m_splits;
    const int64_t together = kH200Sms / of_first / heads_together(of_first);
    const int64_t chain = std::min(ceil_div(n_blocks, parts.dq_splits), std::max<int64_t>(together, 1));
    time += static_cast<double>(chain) * times.dq_wait * std::max(visible.full, times.causal_wait);
    const double dq = static_cast<double>(p.batch * p.heads_q * p.seqlen_q * config.head_dim * parts.dq_splits);
    time += 8 * dq / times.byte_rate;
    if (parts.m_splits > 1)
      time += times.m_split + 8 * static_cast<double>(tiles) * config.dkv_floats() / times.byte_rate;
    return time;
  }
};

}  // namespace

bool has_many_full_n_blocks(const Problem& p) { return 4 * p.seqlen_k > 5 * p.seqlen_q; }

RsParts choose_rs_parts(const Problem& p, const Sm90BackwardConfig& t, const Sm90BackwardTuning& tuning) {
  RsParts best;
  if (p.total_q == 0 || p.seqlen_k == 0 || p.batch_invariant) return best;
  const RsSizes sizes(p, t, t.head_dim > 64 || t.head_dim_v > 64 ? kSm90Times128 : kSm90Times64, tuning.order);
  const bool is_causal = needs_right_mask(p);
  // Under a causal mask parts that begin within a head's m_blocks would wait for the semaphores of its dq.
  const int64_t most_m =
      std::min(tuning.max_m_splits, is_causal ? p.group() : sizes.iterations / tuning.min_split_iterations);
  if (is_causal && p.group() > 1 && !has_many_full_n_blocks(p)) {
    // The predictions of unequal tiles with several heads are too rough.
    const double tiles = tuning.rs_head_split_waves * static_cast<double>(kH200Sms);
    while (best.m_splits < most_m && (static_cast<double>(best.m_splits * sizes.n_blocks * sizes.heads) < tiles ||
                                      p.group() % best.m_splits != 0))
      ++best.m_splits;
    while (p.group() % best.m_splits != 0) --best.m_splits;
    return best;
  }
  const int64_t dq_bytes = 4 * p.batch * p.heads_q * p.seqlen_q * t.head_dim;
  double least = sizes.predict(best);
  const auto consider = [&](RsParts parts) {
    for (parts.dq_splits = 1; parts.dq_splits <= 16; parts.dq_splits *= 2) {
      if (parts.dq_splits > 1 && (t.options.block_mask || parts.dq_splits > sizes.n_blocks ||
                                  parts.dq_splits * dq_bytes > tuning.max_dq_split_bytes))
        break;
      const double time = sizes.predict(parts);
      if (time < least) best = parts, least = time;
    }
  };
  for (int64_t m_splits = 1; m_splits <= std::max<int64_t>(most_m, 1); ++m_splits)
    if (!is_causal || p.group() % m_splits == 0) consider({.m_splits = m_splits});
  if (!sizes.visible.all() || t.options.block_mask) return best;
  // Equal tiles fill whole waves, and the parts of the last tiles fill one to three waves.
  const int64_t tiles = sizes.n_blocks * sizes.heads;
  for (int64_t unsplit = tiles / kH200Sms * kH200Sms; unsplit > 0 && tiles - unsplit < 2 * kH200Sms;
       unsplit -= kH200Sms) {
    for (int waves = 1; waves <= 3 && unsplit < tiles; ++waves) {
      const int64_t m_splits = std::min(waves * kH200Sms / (tiles - unsplit), most_m);
      if (m_splits > 1) consider({.m_splits = m_splits, .unsplit_tiles = unsplit});
    }
  }
  return best;
}

}  // namespace tandem::plan
