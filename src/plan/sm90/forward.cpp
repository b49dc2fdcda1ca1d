#include "plan/sm90/forward.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>

#include "config/forward.h"
#include "plan/arithmetic.h"
#include "plan/forward.h"
#include "plan/sm90/tuning.h"
#include "problem/bound_expression.h"

namespace tandem::plan {
namespace {

// The kind of scores by their registers. A softcap with ALiBi needs few registers, and so does dropout alone. head_dim
// 64 has registers for only one of these options, without a window; a softcap also requires dense tensors there. A
// block mask leaves no registers for ALiBi.
Scores scores_of(const Problem& p, const Sm90ForwardConfig& t) {
  Sm90ForwardConfig rest = t;
  const bool narrow = t.head_dim <= 64;
  if (!t.options.dropout && !(narrow && ((t.options.softcap && (t.options.alibi || t.options.bounded_left)) ||
                                         t.options.varlen || p.batch_invariant)))
    rest.options.softcap = rest.options.alibi = false;
  if (p.block_mask) rest.options.alibi = t.options.alibi;
  const bool biased = t.options.bias != Bias::none;
  if (biased && (t.options.dropout || t.has_score_mod())) return Scores::any;
  if (!rest.has_score_mod()) {
    if (t.options.dropout && t.options.bounded_left && narrow) return Scores::any;
    return biased ? Scores::bias : t.options.softcap ? Scores::capped : Scores::plain;
  }
  rest = t;
  rest.options.score_mod = false;
  return !rest.has_score_mod() && !t.options.dropout && p.score_mod->program->light ? Scores::light : Scores::any;
}

// Returns true if TMA can copy a bias: not for packed or padded sequences, and not with several heads per tile.
bool has_bias_map(const Problem& p, const Sm90ForwardConfig& t, int pack_gqa) {
  if (pack_gqa > 1 || p.seqlen_k == 0 || t.options.bias == Bias::none || t.options.bias == Bias::boolean ||
      t.options.varlen || t.options.block_mask || t.options.score_mod || t.options.mask_mod)
    return false;
  constexpr int64_t kFar = int64_t{1} << 40;
  const int64_t element = bytes_of(t.options.bias);
  const auto is_far = [&](int64_t stride) { return stride < 0 || stride >= kFar / element; };
  const int64_t *const shape = p.bias.shape, *const stride = p.bias.stride;
  for (int dim = 0; dim < 3; ++dim)
    if (is_far(stride[dim]) || stride[dim] * element % 16 != 0) return false;
  return shape[2] == p.seqlen_q && stride[2] > 0 && shape[3] == p.seqlen_k && stride[3] == 1 &&
         reinterpret_cast<uintptr_t>(p.bias.data) % 16 == 0;
}

// Returns the number of heads that are consecutive in the order of tiles and share a bias: device/coords.cuh.
int64_t heads_sharing_bias(const Problem& p, int64_t heads) {
  const bool of_batch = p.bias.stride[0] == 0, of_heads = p.bias.stride[1] == 0;
  if (of_batch) return p.batch * (of_heads ? heads : 1);
  return of_heads ? heads : 1;
}

// Returns the number of CTAs of a cluster that copy a bias for each other. The CTAs process the same n_blocks at the
// same time, so that all must have the same number of n_blocks.
int choose_bias_ctas(const Problem& p, const Sm90ForwardConfig& t, int pack_gqa) {
  if (!has_bias_map(p, t, pack_gqa)) return 0;
  const bool even =
      !t.options.bounded_left && !t.options.bounded_right && heads_sharing_bias(p, p.heads_q) % kBiasCtas == 0;
  if (even) return kBiasCtas;
  return t.head_dim > 64 ? 1 : 0;  // without multicast TMA is slower at head_dim 64
}

// Returns the number of CTAs of a cluster that copy keys and values for each other if they cannot share a bias. The
// CTAs process neighbouring tiles of a head with an even number of tiles.
int choose_kv_ctas(const Problem& p, const Sm90ForwardConfig& t) {
  const bool in_order =
      t.bias_ctas == 1 && !t.options.bounded_left && !t.options.bounded_right && heads_sharing_bias(p, p.heads_q) == 1;
  return in_order && ceil_div(p.seqlen_q, t.tile_m()) % kBiasKvCtas == 0 ? kBiasKvCtas : 1;
}

double predict(const Problem& p, const Sm90ForwardConfig& t, int pack_gqa, const ForwardOrderTuning& tuning) {
  const int64_t m_blocks = ceil_div(p.seqlen_q * pack_gqa, t.tile_m());
  const ForwardTiles tiles{m_blocks * p.heads_q / pack_gqa * p.batch, t.tile_m(), t.tile_n, pack_gqa, 1};
  return predict_splits(p, tiles, forward_times_of(t), tuning).microseconds;
}

// Returns the tile with the least predicted time: t, or another tile that is clearly faster. Dense problems have known
// lengths. The order of sums with batch_invariant must not depend on them.
Sm90ForwardConfig fastest_tile(const Problem& p, const Sm90ForwardConfig& t, int pack_gqa, const Sm90Tuning& tuning) {
  if (t.options.varlen || t.options.bounded_left || p.batch_invariant || p.seqlen_k == 0) return t;
  const ForwardOrderTuning& order = tuning.forward_order;
  Sm90ForwardConfig best = t;
  double least = predict(p, t, pack_gqa, order);
  for (const Sm90OtherTile& other : kSm90OtherTiles) {
    if (t.head_dim > other.head_dim || t.head_dim_v > other.head_dim_v) continue;
    Sm90ForwardConfig tile = t;
    tile.warpgroups = other.warpgroups, tile.tile_n = other.tile_n, tile.stages = other.stages;
    if (tuning.other_tile) {
      if (static_cast<size_t>(&other - kSm90OtherTiles) == *tuning.other_tile) return tile;
      continue;
    }
    const double time = predict(p, tile, pack_gqa, order);
    if (time < order.worth * least) best = tile, least = time;
  }
  return best;
}

// Returns the microseconds in which a CTA loads an iteration's keys and values.
double load_time(const Sm90ForwardConfig& t) {
  const int blocks = t.blocks(t.head_dim) + t.blocks(t.head_dim_v);
  if (t.gathers_pages) return kSm90GatheredKiB * t.tile_n * blocks * 128 / 1024;
  const int rows = t.page_rows == 0 ? t.tile_n : std::min(t.page_rows, t.tile_n);
  return (kSm90PageBox + kSm90PageBoxRow * rows) * blocks * t.tile_n / rows;
}

}  // namespace

ForwardTimes forward_times_of(const Sm90ForwardConfig& t) {
  const double dims = std::max((t.head_dim + t.head_dim_v) / 2.0, 64.0);  // below 64 exponentials bind
  const double load = load_time(t);
  for (const Sm90ForwardTimes& c : kSm90ForwardTimes)
    if (c.warpgroups == t.warpgroups && c.tile_n == t.tile_n) return {c.fixed + c.per_dim * dims, c.tile, load};
  const Sm90ForwardTimes& c = kSm90ForwardTimes[0];
  const double share = static_cast<double>(t.warpgroups * t.tile_n) / (c.warpgroups * c.tile_n);
  return {share * (c.fixed + c.per_dim * dims), c.tile, load};
}

bool gathers_pages(const Problem& p, const Sm90ForwardConfig& t) {
  constexpr int64_t kSmallPage = 64, kUnit = PagedValues::kUnit, kFar = int64_t{1} << 32;
  // Other scores leave too few registers to the loading warpgroup.
  const ScoreOptions& o = t.options;
  const bool plain = !o.mask_mod && o.bias == Bias::none && !o.changes_products();
  if (!p.page_table || p.page_table.page_size >= kSmallPage || !plain || t.warpgroups > 2) return false;
  return std::ranges::all_of(std::array{&p.k, &p.v}, [&](const View* view) {
    const int64_t strides[] = {view->batch, view->row, view->head};
    return std::ranges::all_of(strides, [](int64_t x) { return x >= 0 && x % kUnit == 0 && x < kFar; }) &&
           p.page_table.pages * (view->batch / kUnit) < kFar;
  });
}

// Lengths only affect speed. A batch_invariant call ignores them, because in a packed or padded batch lengths belong to
// other sequences.
Sm90ForwardConfig select_sm90_forward(const Problem& p, int pack_gqa, const Sm90Tuning& tuning) {
  auto t = forward_options<Sm90ForwardConfig>(p);
  int64_t rows = p.seqlen_q * pack_gqa;
  t.bias_ctas = choose_bias_ctas(p, t, pack_gqa);
  t.options.scale_outside_exp2 = t.options.scale_outside_exp2 || (p.bias && !is_near_one(p.softmax_scale));
  const Scores scores = scores_of(p, t);
  if (p.block_mask) {
    for (const Sm90TuningRow& c : kSm90BlockTuningRows) {
      if (!c.matches(
              {t.head_dim, t.head_dim_v, rows, p.seqlen_k, t.options.bounded_left, t.options.bounded_right, scores}))
        continue;
      t = c.applied_to(t);
      while (t.tile_n > kLeastBlockKeys && !fits_blocks(p, 1, t.tile_n)) t.tile_n /= 2;
      return t;
    }
  }
  if (p.batch_invariant) rows = INT64_MAX;
  int64_t keys = p.batch_invariant ? 0 : p.seqlen_k;
  int query_heads = p.seqlen_q == 1 && !p.batch_invariant ? pack_gqa : 0;
  if (tuning.forward_row) rows = keys = INT64_MAX, query_heads = INT_MAX;
  for (const Sm90TuningRow& c : kSm90TuningRows) {
    if (tuning.forward_row && &c != &kSm90TuningRows[*tuning.forward_row]) continue;
    if (!c.matches({t.head_dim, t.head_dim_v, rows, keys, t.options.bounded_left, t.options.bounded_right, scores,
                    query_heads}))
      continue;
    t = c.applied_to(t);
    if (scores == Scores::plain && !tuning.forward_row) t = fastest_tile(p, t, pack_gqa, tuning);
    t.kv_ctas = choose_kv_ctas(p, t);
    return t;
  }
  return t;
}

}  // namespace tandem::plan
