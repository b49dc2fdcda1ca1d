#include "plan/forward_time.h"

#include <algorithm>

#include "plan/arithmetic.h"
#include "plan/forward.h"

namespace tandem::plan {
namespace {

// The n_blocks of the first and of the last m_block. Under a causal mask the m_blocks between them increase linearly,
// after m_blocks that see no key.
struct NBlocks {
  int64_t all, first, last;
  double mean;

  NBlocks(const Problem& p, const ForwardTiles& t) : all(ceil_div(p.seqlen_k, t.tile_n)) {
    const int64_t queries = std::max(t.tile_m / t.pack_gqa, 1);
    first = seen_by(p, t, std::min(p.seqlen_q, queries)), last = seen_by(p, t, p.seqlen_q);
    const double seeing = needs_right_mask(p) ? static_cast<double>(p.seqlen_q + std::min<int64_t>(offset(p), 0)) : 0;
    const double share = seeing > 0 ? seeing / static_cast<double>(p.seqlen_q) : 1;
    mean = share * static_cast<double>(first + last) / 2;
    if (!needs_left_mask(p)) return;
    const int64_t left = std::min(p.window_left, p.seqlen_k);
    const int64_t right = needs_right_mask(p) ? std::clamp<int64_t>(p.window_right, 0, p.seqlen_k) : p.seqlen_k;
    const int64_t most = ceil_div(left + right + queries, t.tile_n) + 1;
    first = std::min(first, most), last = std::min(last, most);
    mean = static_cast<double>(first + last) / 2;
  }
  static int64_t offset(const Problem& p) { return p.diagonal_offset + (p.bottom_right ? p.seqlen_k - p.seqlen_q : 0); }
  // The n_blocks before the end of the keys that the query before `end` sees.
  int64_t seen_by(const Problem& p, const ForwardTiles& t, int64_t end) const {
    if (!needs_right_mask(p)) return all;
    const int64_t keys = std::clamp<int64_t>(end + std::min(p.window_right, p.seqlen_k) + offset(p), 1, p.seqlen_k);
    return ceil_div(keys, t.tile_n);
  }
};

double predict(const Problem& p, const ForwardTiles& t, const ForwardTimes& times, const ForwardOrderTuning& tuning,
               const NBlocks& n_blocks, int64_t splits) {
  const int64_t of_split = ceil_div(n_blocks.all, splits), sms = tuning.sms / t.ctas;
  splits = ceil_div(n_blocks.all, of_split);
  const auto first = static_cast<double>(std::min(n_blocks.first, of_split));
  const auto longest = static_cast<double>(std::min(n_blocks.last, of_split));
  const auto tiles = static_cast<double>(t.tiles), parts = static_cast<double>(splits), count = tiles * parts;
  double iterations = longest + times.tile;
  if (n_blocks.first == n_blocks.last) {
    iterations *= static_cast<double>(ceil_div(t.tiles * splits, sms));
  } else if (t.tiles * splits > sms) {
    // A CTA that ends takes the longest tile left.
    const double total = tiles * (n_blocks.mean + times.tile * parts);
    iterations = std::max(iterations, total / static_cast<double>(sms) + first + times.tile);
  }
  // One warpgroup with rows has the tensor core for itself.
  const bool is_one = p.seqlen_q * t.pack_gqa <= 64;
  const double bytes = 2.0 * static_cast<double>(p.batch * p.heads_k * n_blocks.last * t.tile_n) *
                       static_cast<double>(p.head_dim + p.head_dim_v);
  const double mma = times.iteration * (is_one ? tuning.one_warpgroup : 1);
  const bool may_load = is_one || p.page_table;  // loads may bind
  const double of_cta = iterations * (may_load ? std::max(mma, times.load) : mma), of_memory = bytes / tuning.read_rate;
  double time =
      tuning.launch + std::max(of_cta, of_memory) + (may_load ? tuning.both * std::min(of_cta, of_memory) : 0);
  if (splits > 1) {
    const double results = 4.0 * count / tiles * static_cast<double>(p.batch * p.seqlen_q * p.heads_q * p.head_dim_v);
    time += tuning.combine + parts * tuning.combine_split + results / tuning.combine_rate;
  }
  return time;
}

}  // namespace

PredictedSplits predict_splits(const Problem& p, const ForwardTiles& t, const ForwardTimes& times,
                               const ForwardOrderTuning& tuning) {
  const NBlocks n_blocks(p, t);
  PredictedSplits best{1, predict(p, t, times, tuning, n_blocks, 1)};
  if (p.batch_invariant || t.tiles * t.ctas >= tuning.sms) return best;
  for (const int64_t splits : {2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64}) {
    if (splits > n_blocks.all || t.tiles * splits > 4 * tuning.sms) break;
    const double time = predict(p, t, times, tuning, n_blocks, splits);
    if (time < best.microseconds * (best.splits == 1 ? tuning.worth : 1)) best = {splits, time};
  }
  return best;
}

}  // namespace tandem::plan
