#include "plan/sm90/parts.h"

#include <algorithm>
#include <cmath>

#include "config/backward_tiles.h"
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

constexpr auto kSms = static_cast<double>(kH200Sms);

const Sm90BackwardTimes& times_of(const Problem& p, const Sm90BackwardConfig& t) {
  const bool is_narrow = t.head_dim <= 64 && t.head_dim_v <= 64;
  if (needs_right_mask(p)) return is_narrow ? kSm90CausalTimes64 : kSm90CausalTimes128;
  return is_narrow ? kSm90FullTimes64 : kSm90FullTimes128;
}

// The sizes that a prediction depends on, and the predicted microseconds of parts.
struct RsSizes {
  const Problem& p;
  const Sm90BackwardConfig& config;
  const Sm90BackwardTimes& times;
  const BackwardOrderTuning& order;
  int64_t n_blocks, iterations, heads;  // iterations: of an n_block that every query sees
  Visible visible;
  int64_t heads_together;  // key heads that run at once; see choose_l2_heads()

  RsSizes(const Problem& problem, const Sm90BackwardConfig& t, const BackwardOrderTuning& order_tuning)
      : p(problem),
        config(t),
        times(times_of(problem, t)),
        order(order_tuning),
        n_blocks(ceil_div(p.seqlen_k, t.tile_n())),
        iterations(p.group() * ceil_div(p.seqlen_q, t.tile_m)),
        heads(p.batch * p.heads_k),
        visible(p),
        heads_together(count_heads_together()) {}

  int64_t count_heads_together() const {
    const int64_t all = std::max<int64_t>(heads, 1);
    if (!visible.all()) return std::min(all, 2 * order.min_causal_heads);
    const int64_t most = std::max(full_l2_heads(p, config.head_dim, config.head_dim_v, order), int64_t{2});
    const int64_t together = std::clamp<int64_t>(most, 1, all);
    return ceil_div(all, ceil_div(all, together));  // groups of nearly one size
  }

  // In many waves other tiles run while an n_block waits.
  bool is_few() const { return n_blocks * heads <= 4 * kH200Sms; }

  double iteration() const {
    return config.head_dim > 64 && p.head_dim < config.head_dim ? times.narrow_iteration : times.iteration;
  }

  // Without a mask tiles are equal: whole waves.
  double time_of_equal_tiles(const RsParts& parts, double tiles, double one_iteration) const {
    const auto of_part = static_cast<double>(ceil_div(iterations, parts.m_splits));
    double time = std::ceil(tiles / kSms) * (times.tile + of_part * one_iteration);
    if (parts.unsplit_tiles > 0) {
      const auto unsplit = static_cast<double>(parts.unsplit_tiles);
      time += std::ceil(unsplit / kSms) * (times.tile + static_cast<double>(iterations) * one_iteration);
    }
    return time;
  }

  // With a causal mask CTAs take tiles one by one, the longest first. wait: until the last n_block of the first wave
  // may add its first dq. together: n_blocks of a head in this wave.
  double time_of_triangle(const RsParts& parts, double tiles, double wait, double together) const {
    const double of_part = static_cast<double>(ceil_div(iterations, parts.m_splits)) * iteration();
    const double waves = tiles / kSms, tile = times.tile + times.masked_tile;
    const double longest = of_part * std::min(1.0, 2 * visible.mean);
    if (waves <= 1) return tile + std::max(longest, wait);
    const double balanced = waves * (of_part * visible.mean + tile) + wait / 2;
    if (waves >= 2) return std::max(longest + tile, balanced + times.tail * longest);
    // The shortest tile of the first wave ends first, and the longest tile of the second wave follows.
    const double shortest = longest * (1 - (1 - visible.full) * together / static_cast<double>(n_blocks));
    return std::max({longest + tile, balanced, wait + 2 * (shortest + tile)});
  }

  // The time of additional sums.
  double time_of_sums(int64_t tiles, int64_t m_splits, int64_t dq_splits) const {
    const auto dq = static_cast<double>(p.batch * p.heads_q * p.seqlen_q * config.head_dim * dq_splits);
    double time = 8 * dq / times.dq_byte_rate;
    if (dq_splits > 1) time += static_cast<double>(dq_splits) * times.dq_split;
    if (m_splits > 1) time += times.m_split + 8 * static_cast<double>(tiles) * config.dkv_floats() / times.byte_rate;
    return time;
  }

  double predict(const RsParts& parts) const {
    if (parts.wraps) return predict_wrapped(parts);
    const int64_t tiles = (n_blocks * heads - parts.unsplit_tiles) * parts.m_splits;
    // The n_blocks of a sum that run at once add their first dq one after the other.
    const int64_t of_first = parts.unsplit_tiles > 0 ? 1 : parts.m_splits;
    const double sums = static_cast<double>(parts.dq_splits), all = static_cast<double>(n_blocks);
    const double together = std::min(all, std::max(kSms / static_cast<double>(of_first * heads_together), 1.0));
    const double wait = together / sums * times.dq_wait;
    const double full_iteration = iteration() + (is_few() && together > sums ? times.shared_wait : 0);
    double time = visible.all() ? time_of_equal_tiles(parts, static_cast<double>(tiles), full_iteration) + wait
                                : time_of_triangle(parts, static_cast<double>(tiles), wait, together) +
                                      wait * visible.full * times.full_wait;
    // All n_blocks that every query sees add to each m_block, one after the other.
    time = std::max(time, visible.full * all / sums * times.dq_addition);
    return times.launch + time + time_of_sums(tiles, parts.m_splits, parts.dq_splits);
  }

  // WrappedIterations: n_blocks of a sum that begin together wait for each other.
  double predict_wrapped(const RsParts& parts) const {
    const int64_t tiles = n_blocks * heads * parts.m_splits, of_part = ceil_div(iterations, parts.m_splits);
    const int64_t stride = parts.dq_splits / 2, together = ceil_div(n_blocks, of_part * stride);
    const double wait = static_cast<double>(together - 1) * times.dq_wait +
                        static_cast<double>(std::min(of_part, kWrappedWaits)) * times.wrapped_wait;
    const double time = time_of_equal_tiles(parts, static_cast<double>(tiles), iteration()) + wait;
    const double chain = static_cast<double>(n_blocks) / static_cast<double>(stride) * times.dq_addition;
    return times.launch + std::max(time, chain) + time_of_sums(tiles, parts.m_splits, parts.dq_splits);
  }

  // DiagonalParts of up to 1.5 waves of tiles, the shortest tiles first.
  double predict_diagonal(int64_t length, int64_t head_parts, int64_t tiles) const {
    const int64_t m_blocks = config.tile_n() / config.tile_m * (p.group() / head_parts);
    const double of_n_block = static_cast<double>(m_blocks) * iteration(), tile = times.tile + times.masked_tile;
    double time = times.launch + tile + static_cast<double>(length) * of_n_block;
    // The longest tile begins when enough short tiles have ended.
    int64_t left = tiles - kH200Sms, ended = 0;
    for (int64_t diagonal = n_blocks - 1; diagonal >= 0 && left > 0; --diagonal) {
      left -= (diagonal / length + 1) * heads * head_parts;
      ended = std::min(length, n_blocks - diagonal);
    }
    if (ended > 0) time += static_cast<double>(ended) * of_n_block + tile;
    const int64_t parts = ceil_div(n_blocks, length);
    return time + time_of_sums(tiles, parts * head_parts, parts);
  }
};

}  // namespace

bool may_wrap(const Problem& p, const Sm90BackwardConfig& t) {
  if (t.options.varlen || t.options.block_mask || t.options.bounded_left || t.options.bounded_right) return false;
  if (t.schedule != Sm90BackwardConfig::Schedule::rs || t.single_n_block || t.short_q || p.batch_invariant)
    return false;
  if (wants_captured(p)) return false;  // registers do not suffice
  const int64_t n_blocks = ceil_div(p.seqlen_k, t.tile_n()), iterations = p.group() * ceil_div(p.seqlen_q, t.tile_m);
  return n_blocks > 1 && iterations > 0 && (iterations + 1) * (n_blocks + 1) < (int64_t{1} << 27);
}

bool has_many_full_n_blocks(const Problem& p) { return 4 * p.seqlen_k > 5 * p.seqlen_q; }

void consider_diagonal_parts(const Problem& p, const Sm90BackwardConfig& t, const Sm90BackwardTuning& tuning,
                             RsParts* parts) {
  if (!may_use_spt(p, t) || t.single_n_block || t.short_q || has_many_full_n_blocks(p)) return;
  if (4 * p.seqlen_q > 5 * p.seqlen_k && !p.bottom_right) return;
  const RsSizes sizes(p, t, tuning.order);
  const int64_t n_blocks = sizes.n_blocks;
  const int64_t tiles_of_heads = n_blocks * sizes.heads * p.group();
  if (tiles_of_heads == 0 || tiles_of_heads > kH200Sms) return;  // none, or enough
  double least = sizes.predict(*parts) * tuning.diagonal_worth;
  for (int64_t head_parts = 1; head_parts <= p.group(); ++head_parts) {
    if (p.group() % head_parts != 0) continue;
    for (int64_t length = n_blocks; length > 0; --length) {
      const DiagonalParts diagonal{static_cast<int>(n_blocks), static_cast<int>(length)};
      const int64_t tiles = diagonal.tiles() * sizes.heads * head_parts, of_heads = ceil_div(n_blocks, length);
      if (2 * tiles > 3 * kH200Sms) break;
      if (of_heads * head_parts == 1) continue;
      const double time = sizes.predict_diagonal(length, head_parts, tiles);
      if (time >= least) continue;
      least = time;
      *parts = {
          .m_splits = of_heads * head_parts, .dq_splits = of_heads, .part_n_blocks = length, .head_parts = head_parts};
    }
  }
}

RsParts choose_rs_parts(const Problem& p, const Sm90BackwardConfig& t, const Sm90BackwardTuning& tuning) {
  RsParts best;
  if (p.total_q == 0 || p.seqlen_k == 0 || p.batch_invariant) return best;
  const RsSizes sizes(p, t, tuning.order);
  const bool is_causal = needs_right_mask(p);
  // Under a causal mask parts that begin within a head's m_blocks would wait for the semaphores of its dq.
  const int64_t most_m =
      std::min(tuning.max_m_splits, is_causal ? p.group() : sizes.iterations / tuning.min_split_iterations);
  const int64_t dq_bytes = 4 * p.batch * p.heads_q * p.seqlen_q * t.head_dim;
  double least = sizes.predict(best);
  const auto keep_if_less = [&](const RsParts& parts) {
    const double time = sizes.predict(parts);
    if (time < least) best = parts, least = time;
  };
  const bool wraps = sizes.is_few() && may_wrap(p, t);
  const auto consider = [&](RsParts parts) {
    for (parts.dq_splits = 1; parts.dq_splits <= tuning.max_dq_splits; parts.dq_splits *= 2) {
      if (parts.dq_splits > 1 && (t.options.block_mask || parts.dq_splits > sizes.n_blocks ||
                                  parts.dq_splits * dq_bytes > tuning.max_dq_split_bytes))
        break;
      keep_if_less(parts);
    }
    parts.wraps = wraps && parts.unsplit_tiles == 0;
    if (!parts.wraps) return;
    for (parts.dq_splits = 2; parts.dq_splits <= 4; parts.dq_splits *= 2)
      if (parts.dq_splits * dq_bytes <= tuning.max_dq_split_bytes) keep_if_less(parts);
  };
  // Without a mask, more parts than a few waves of tiles take longer.
  const int64_t tiles = sizes.n_blocks * sizes.heads, waves_of_parts = 2 * tiles > kH200Sms ? 5 : 3;
  const int64_t fitting =
      is_causal ? most_m : std::min(waves_of_parts * kH200Sms / std::max<int64_t>(tiles, 1), most_m);
  for (int64_t m_splits = 1; m_splits <= std::max<int64_t>(fitting, 1); ++m_splits)
    if (!is_causal || p.group() % m_splits == 0) consider({.m_splits = m_splits});
  if (!sizes.visible.all() || t.options.block_mask) return best;
  // Equal tiles fill whole waves, and the parts of the last tiles fill one to three waves.
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
