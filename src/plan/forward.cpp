#include "plan/forward.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/text.h"
#include "config/block_mask.h"
#include "config/forward.h"
#include "plan/arch_planner.h"
#include "plan/arithmetic.h"
#include "plan/check.h"
#include "problem/bound_expression.h"

namespace tandem::plan {
namespace {

// Returns the maximum number of query heads of a key head that can share a tile. The number is a power of two, so that
// a warpgroup's 64 rows are whole queries or half of one.
int max_pack_gqa(const Problem& p, const ArchPlanner& planner) {
  const int64_t group = p.group();
  int pack_gqa = 1;
  while (pack_gqa < planner.max_pack_gqa() && group % (2 * pack_gqa) == 0) pack_gqa *= 2;
  return pack_gqa;
}

// Returns the m_blocks of a packed head, or a bound over all sequences if only the device knows the lengths.
int64_t count_m_blocks(const Problem& p, const ForwardSchedule& t) {
  const int64_t rows = t.tile.tile_m(), pack_gqa = t.pack_gqa, longest = ceil_div(p.seqlen_q * pack_gqa, rows);
  if (!t.tile.varlen) return longest;
  if (!p.packed_q()) return p.batch * longest;
  // The last m_block of each sequence with rows may be partial.
  const int64_t partly = std::min(p.batch, p.total_q);
  return std::min((p.total_q * pack_gqa + partly * (rows - 1)) / rows, p.batch * longest);
}

// Returns the number of consecutive heads over the batch that share a bias, so that their tiles read it at the same
// time. Keys and values of these heads and the bias must fit in the L2 cache.
double l2_heads_sharing_bias(const Problem& p, double heads, double max_heads) {
  if (!p.bias) return 1;
  const bool of_batch = p.bias.stride[0] == 0, of_heads = p.bias.stride[1] == 0;
  const double sharing = (of_batch ? static_cast<double>(p.batch) : 1) * (of_heads ? heads : 1);
  return std::min(sharing, max_heads);
}

// Without a mask the heads run one after the other, because the tiles of a head read the same keys at the same time.
int choose_l2_heads(const Problem& p, const ForwardSchedule& t, const ForwardOrderTuning& tuning, int sm_count) {
  double wanted, packed_heads = t.packed_heads;
  if (t.tile.varlen) {
    wanted = tuning.l2_waves * sm_count / std::max(t.m_blocks, 1);
  } else {
    const double of_bias = l2_heads_sharing_bias(p, packed_heads, tuning.l2_bias_heads);
    if (!t.tile.bounded_left && !t.tile.bounded_right && of_bias <= 1) return 1;
    packed_heads *= static_cast<double>(p.batch);
    wanted = !t.tile.bounded_left && !t.tile.bounded_right
                 ? of_bias
                 : tuning.l2_heads * (t.tile.head_dim <= 64 ? 2 : 1) *
                       std::sqrt(16384.0 / (static_cast<double>(std::max<int64_t>(p.seqlen_k, 1)) * t.pack_gqa));
  }
  const double groups = std::clamp(std::round(packed_heads / std::max(wanted, 1.0)), 1.0, std::max(packed_heads, 1.0));
  return static_cast<int>(std::ceil(packed_heads / groups));
}

// The splits of the keys: as many as the caller wants, or as few tiles leave SMs for. The choice changes the order of
// sums, so that it depends on no property of the device.
int64_t choose_splits(const Problem& p, const ForwardSchedule& t, const ArchPlanner& planner, const Tuning& tuning) {
  if (p.block_mask || t.no_keys) return 1;
  const int64_t n_blocks = ceil_div(p.seqlen_k, t.tile.tile_n);
  if (p.num_splits > 0) return std::min<int64_t>(p.num_splits, n_blocks);
  const ForwardTiles tiles{std::max(t.tiles, 1), t.tile.tile_m(), t.tile.tile_n, t.pack_gqa, t.tile.ctas()};
  return predict_splits(p, tiles, planner.forward_times(t.tile), planner.forward_order(tuning)).splits;
}

// Splits begin at multiples of split_n_blocks, and the last one may be short.
void set_splits(const Problem& p, const ArchPlanner& planner, const Tuning& tuning, ForwardSchedule* t) {
  const int64_t splits = choose_splits(p, *t, planner, tuning);
  if (splits <= 1) return;
  t->tile = planner.split_keys(t->tile);
  const int64_t n_blocks = ceil_div(p.seqlen_k, t->tile.tile_n);
  t->split_n_blocks = static_cast<int>(ceil_div(n_blocks, splits));
  t->splits = static_cast<int>(ceil_div(n_blocks, t->split_n_blocks));
}

// The splits that schedule() makes of a sequence: their least keys, whole n_blocks, and their most number, a power of
// two. Both depend on the heads alone. Splits with many rows are longer, because their results take memory traffic.
struct SplitRule {
  int64_t keys, splits;

  SplitRule(const Problem& p, int tile_n, const ArchPlanner& planner, const ForwardOrderTuning& tuning) {
    const int64_t pack_gqa = max_pack_gqa(p, planner), heads = std::max<int64_t>(p.heads_q / pack_gqa, 1);
    keys = round_up(tuning.invariant_split_keys * std::clamp<int64_t>(pack_gqa / 16, 1, 4), tile_n);
    splits = std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(tuning.invariant_splits / heads, 1)));
  }
};

// Bounds of the splits that schedule() makes. further: of all sequences, after the first splits. rows: of results.
struct DeviceSplits {
  int64_t splits, further, rows;

  DeviceSplits(const Problem& p, const SplitRule& rule, int64_t max_queries)
      : splits(std::min(ceil_div(p.seqlen_k, rule.keys), rule.splits)) {
    const int64_t keys = rule.keys;
    if (needs_left_mask(p) && needs_right_mask(p)) {
      const int64_t visible =
          std::max<int64_t>(int64_t{clamped_bound(p.window_left)} + clamped_bound(p.window_right) + max_queries, 1);
      splits = std::min(splits, ceil_div(visible, keys) + 1);
    }
    const int64_t sequences = std::min(p.batch, p.total_q);
    further = sequences * std::max<int64_t>(splits - 1, 0);
    if (p.packed_k()) further = std::min(further, p.total_k / keys);
    rows = p.batch * splits * split_queries(p, max_queries);
  }
};

bool may_split_on_device(const Problem& p) {
  return p.batch_invariant && p.num_splits == 0 && !p.block_mask && p.total_k > 0 && p.seqlen_k > 0;
}

// batch_invariant: sequences with few queries are split at multiples of a fixed number of keys. Only the device knows
// the lengths. The kernel does not depend on lengths, except that dense tensors without such sequences need no list.
// Returns the list's entries for splits after the first ones.
int64_t set_device_splits(const Problem& p, const ArchPlanner& planner, const Tuning& tuning, ForwardSchedule* t) {
  if (!may_split_on_device(p)) return 0;
  const SplitRule rule(p, t->tile.tile_n, planner, planner.forward_order(tuning));
  const int64_t max_queries = std::clamp<int64_t>(kMaxSplitTileRows / t->pack_gqa, 1, kMaxSplitQueries);
  const DeviceSplits bounds(p, rule, max_queries);
  if (!t->tile.varlen && (p.seqlen_q > max_queries || bounds.splits == 1)) return 0;
  t->tile = planner.device_splits(t->tile);
  if (bounds.splits == 1) return 0;
  t->split_n_blocks = static_cast<int>(rule.keys / t->tile.tile_n);
  t->max_splits = static_cast<int>(rule.splits);
  t->split_count = static_cast<int>(bounds.splits);
  t->split_max_queries = static_cast<int>(max_queries);
  t->split_rows = static_cast<int>(bounds.rows);
  return bounds.further;
}

Status check_sizes(const Problem& p, const ArchPlanner& planner, const ForwardOrderTuning& tuning) {
  if (p.seqlen_q > kLongestSequence || p.seqlen_q * p.group() > kLongestSequence) {
    return Status::unsupported(str_cat("q.seqlen (", p.seqlen_q, ") times the query heads of a key head (", p.group(),
                                       ") must be at most 2^28 on a GPU: split the queries over several calls"));
  }
  if (p.seqlen_k > kLongestSequence) {
    return Status::unsupported(str_cat(
        "k.seqlen (", p.seqlen_k, ") must be at most 2^28 on a GPU: split the keys and merge the parts by their lse"));
  }
  // The maximum number of tiles, each with 64 rows or more. A launch may have several CTAs per tile.
  constexpr int64_t kMaxTiles = (int64_t{1} << 29) - 1;
  const int64_t heads = p.heads_q, m_blocks = p.packed_q() ? p.total_q / 64 + p.batch : p.batch * (p.seqlen_q / 64 + 1);
  if (heads > 0 && m_blocks > kMaxTiles / heads / std::max(p.num_splits, 1)) {
    return Status::unsupported(
        str_cat("batch (", p.batch, ") and q.heads (", heads,
                p.num_splits > 1 ? str_cat(") with num_splits (", p.num_splits) : std::string(),
                ") must give fewer than 2^29 tiles of 64 queries on a GPU: split the call over batch"));
  }
  if (may_split_on_device(p) && heads > 0 &&
      DeviceSplits(p, SplitRule(p, 1, planner, tuning), kMaxSplitQueries).rows > kMaxTiles / heads) {
    return Status::unsupported(str_cat("batch (", p.batch, "), q.heads (", heads, ") and k.seqlen (", p.seqlen_k,
                                       ") with batch_invariant must give fewer than 2^29 results of splits on a GPU: "
                                       "set num_splits to 1"));
  }
  return {};
}

// The rows that combine_splits() visits: queries of all heads.
int64_t combined_rows(const Problem& p, const ForwardSchedule& t) {
  return (t.split_rows > 0 ? p.batch * combined_queries(p, t) : p.total_q) * p.heads_q;
}

// Returns the threads of combine_splits() that share a row. A thread computes its row's place and weights once, so that
// many rows use few threads. Few rows need threads for their loads.
int choose_combine_lanes(const Problem& p, const ForwardSchedule& t, const ForwardOrderTuning& tuning) {
  const int64_t rows = combined_rows(p, t);
  if (rows < tuning.combine_few_rows) return kCombineThreads;
  const uint64_t most = rows >= tuning.combine_many_rows ? kFewCombineLanes : 32;
  return static_cast<int>(std::min(most, std::bit_ceil(static_cast<uint64_t>(p.head_dim_v / kCombineColumns))));
}

// Returns bytes of shared memory that spread the CTAs of combine_splits() over all SMs. Without these bytes, the SMs
// that the main kernel leaves first would run most of the CTAs.
uint32_t combine_smem_bytes(int64_t ctas, int64_t sms) {
  constexpr int64_t kSmBytes = 220 << 10, kStaticBytes = 20 << 10;
  return static_cast<uint32_t>(
      std::clamp<int64_t>(kSmBytes / std::max<int64_t>(ceil_div(ctas, sms), 1) - kStaticBytes, 0, kCombineSmemBytes));
}

// Returns true if every sequence of a varlen problem has one tile of each head and split, and all tiles run at once.
// The order of tiles is then of no use. Only Hopper's kernel skips tiles without queries. ctas: that run at once, or
// clusters.
bool sequences_are_tiles(const Problem& p, const ForwardSchedule& t, int64_t ctas) {
  if ((p.packed_q() || t.split_rows > 0) && t.tile.blackwell()) return false;
  return !p.block_mask && p.seqlen_q * t.pack_gqa <= t.tile.tile_m() &&
         p.batch * t.packed_heads * t.splits * t.split_count <= ctas;
}

void make_schedule(const Problem& p, const gpu::Properties& device, const Tuning& tuning, ForwardSchedule* plan) {
  const ArchPlanner& planner = planner_for(device);
  ForwardSchedule& t = *plan;
  t.pack_gqa = p.block_mask ? 1 : max_pack_gqa(p, planner);  // each head has separate lists
  t.tile = planner.select_forward(p, device, t.pack_gqa, tuning);
  // Under a mask, few queries of many heads see fewer keys than many queries of one head.
  if (t.pack_gqa > 1 && !t.tile.varlen && !t.tile.bounded_left && !t.tile.bounded_right && !p.batch_invariant) {
    const int64_t rows = t.tile.tile_m();
    const int64_t apart = ceil_div(p.seqlen_q, rows) * t.pack_gqa, joined = ceil_div(p.seqlen_q * t.pack_gqa, rows);
    if (joined >= apart) {
      t.pack_gqa = 1;
      t.tile = planner.select_forward(p, device, t.pack_gqa, tuning);
    }
  }
  t.no_keys = p.total_k == 0 || p.seqlen_k == 0;
  int64_t further = set_device_splits(p, planner, tuning, &t);
  const int64_t packed_heads = p.heads_q / t.pack_gqa, m_blocks = count_m_blocks(p, t);
  const int64_t tiles = m_blocks * packed_heads * (t.tile.varlen ? 1 : p.batch);
  t.packed_heads = static_cast<int>(packed_heads);
  t.m_blocks = static_cast<int>(m_blocks);
  t.tiles = static_cast<int>(tiles);
  set_splits(p, planner, tuning, &t);
  t.combine_lanes = choose_combine_lanes(p, t, planner.forward_order(tuning));
  const int ctas = t.tile.ctas(), sms = usable_sms(p, device, ctas);
  t.lists_tiles = t.tile.varlen && !sequences_are_tiles(p, t, sms / ctas);
  if (t.tile.varlen && !t.lists_tiles) {
    t.m_blocks = static_cast<int>(p.batch) * t.split_count;
    t.tiles = t.m_blocks * t.packed_heads;
    further = 0;
  }
  const int64_t work_tiles = (t.tiles + further * packed_heads) * t.splits;
  t.l2_heads = choose_l2_heads(p, t, planner.forward_order(tuning), sms);
  const int bias_heads = std::max(t.tile.bias_ctas(), 1);  // number of heads of a cluster
  t.l2_heads = static_cast<int>(ceil_div(t.l2_heads, bias_heads)) * bias_heads;
  t.m_blocks += static_cast<int>(further);
  t.tiles += static_cast<int>(further * packed_heads);
  if (t.tile.cluster_has_tile()) {
    t.grid = ctas * static_cast<int>(t.tile.clc() ? work_tiles : std::min<int64_t>(sms / ctas, work_tiles));
  } else {
    t.grid = static_cast<int>(std::min<int64_t>(sms / ctas * ctas, work_tiles));
  }
  const bool uneven = t.tile.bounded_left || t.tile.bounded_right || p.block_mask;
  t.dynamic_scheduler = t.lists_tiles || (!t.tile.varlen && !t.tile.clc() && work_tiles > sms && uneven);
}

// Counts the lists of a block mask, one per tile.
void count_step_lists(const Problem& p, ForwardSchedule* t) {
  if (!p.block_mask) return;
  t->list_batch = lists_of(p, 0);
  t->list_heads = lists_of(p, 1);
  t->list_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, t->tile.tile_m()));
  t->list_words = kListHeader + std::max<int64_t>(1, ceil_div(p.seqlen_k, t->tile.tile_n)) + 1;
}

// Adds launches that list the tiles of varlen problems and the iterations of a block mask, before the main kernel.
void add_launches(const Problem& p, ForwardSchedule& t, int64_t sms, Plan* plan) {
  const bool overlaps = t.tile.overlaps_launches();
  if (t.list_words > 0) {
    const auto tiles = static_cast<uint32_t>(t.list_batch * t.list_heads * t.list_m_blocks);
    plan->launches.push_back(
        {.entry = EntryId::list_n_blocks, .grid = tiles, .block = kListBlocksThreads, .overlap_previous = overlaps});
    if (!t.tile.varlen)
      plan->launches.push_back(
          {.entry = EntryId::order_tiles, .grid = tiles, .block = kListBlocksThreads, .overlap_previous = overlaps});
  }
  if (t.lists_tiles)
    plan->launches.push_back({.entry = EntryId::schedule, .block = kScheduleThreads, .overlap_previous = overlaps});
  plan->launches.push_back({.entry = EntryId::main,
                            .grid = static_cast<uint32_t>(t.grid),
                            .block = static_cast<uint32_t>(t.tile.threads()),
                            .shared_bytes = static_cast<uint32_t>(t.tile.smem_bytes()),
                            .overlap_previous = overlaps});
  if (t.splits > 1 || t.split_rows > 0) {
    const int64_t rows = combined_rows(p, t);
    const int64_t ctas = t.combine_lanes == kCombineThreads ? rows * ceil_div(p.head_dim_v, kCombineCtaColumns)
                                                            : ceil_div(rows, kCombineThreads / t.combine_lanes);
    plan->launches.push_back({.entry = EntryId::combine_splits,
                              .grid = static_cast<uint32_t>(ctas),
                              .block = kCombineThreads,
                              .shared_bytes = combine_smem_bytes(ctas, sms),
                              .overlap_previous = overlaps});
  }
  if (!p.max_scores) return;
  t.max_scores_launch = static_cast<int>(plan->launches.size());
  plan->launches.push_back({.entry = EntryId::max_scores,
                            .grid = static_cast<uint32_t>(int64_t{t.tiles} * (t.tile.tile_m() / kMaxScoresRows)),
                            .block = kMaxScoresThreads});
}

// The float32 results of the splits, after everything else in the workspace.
void add_split_results(const Problem& p, ForwardSchedule& t, Plan* plan) {
  if (t.splits <= 1 && t.split_rows == 0) return;
  const int64_t queries = t.split_rows > 0 ? t.split_rows : p.total_q * t.splits;
  const auto rows = static_cast<size_t>(queries * p.heads_q);
  const auto main = std::ranges::find(plan->launches, EntryId::main, &PlannedLaunch::entry);
  const int writer = static_cast<int>(main - plan->launches.begin());
  t.split_out_offset = round_up(plan->workspace_bytes, kWorkspaceAlignment);
  const size_t out = rows * static_cast<size_t>(p.head_dim_v) * sizeof(float), lse = rows * sizeof(float);
  t.split_lse_offset = t.split_out_offset + out;
  plan->regions.push_back({"workspace.split_out", t.split_out_offset, out, writer});
  plan->regions.push_back({"workspace.split_lse", t.split_lse_offset, lse, writer});
  plan->workspace_bytes = kWorkspaceAlignment - 1 + t.split_lse_offset + lse;
}

void add_workspace(ForwardSchedule& t, Plan* plan) {
  if (!t.dynamic_scheduler && !t.no_keys && t.list_words == 0) return;
  const size_t work = t.lists_tiles ? static_cast<size_t>(t.m_blocks) * sizeof(ListedTile) : 0;
  t.steps_offset = kTileListOffset + work;
  const size_t lists = static_cast<size_t>(t.list_batch) * static_cast<size_t>(t.list_heads * t.list_m_blocks);
  const size_t steps = lists * static_cast<size_t>(t.list_words) * sizeof(int);
  const size_t order = t.tile.varlen ? 0 : lists * sizeof(int);
  plan->workspace_bytes = kWorkspaceAlignment - 1 + t.steps_offset + steps + order;
  // The schedule kernel sets the counter of listed tiles. Without that kernel list_n_blocks() may set the counter.
  const int schedule = steps > 0 ? 1 : 0;
  const int writer = t.lists_tiles ? schedule : steps > 0 && t.tile.lists_reset_counter() ? 0 : kMemset;
  if (t.dynamic_scheduler) plan->regions.push_back({"workspace.counter", kCounterOffset, 2 * sizeof(int), writer});
  if (t.no_keys) plan->regions.push_back({"workspace.zeros", kZerosOffset, 16, kMemset});
  if (t.lists_tiles) plan->regions.push_back({"workspace.tile_list", kTileListOffset, work, schedule});
  if (steps > 0) {
    plan->regions.push_back({"workspace.steps", t.steps_offset, steps, 0});
    if (order > 0) plan->regions.push_back({"workspace.order", t.steps_offset + steps, order, 1});
  }
  if (t.no_keys || writer == kMemset) plan->fills.push_back({0, kTileListOffset});
}

// A batch_invariant forward has the same mask, and so the same kernel, for all lengths.
bool ignores_lengths(const Problem& p) { return p.batch_invariant && p.pass == TANDEM_FORWARD; }

Bias bias_of(const Problem& p) {
  if (!p.bias) return Bias::none;
  if (p.bias.boolean()) return Bias::boolean;
  return p.bias.dtype == DType::f32 ? Bias::f32 : Bias::element;
}

}  // namespace

ScoreOptions options_of(const Problem& p) {
  return {.dropout = static_cast<bool>(p.dropout),
          .block_mask = static_cast<bool>(p.block_mask),
          .f16 = p.dtype == DType::f16,
          .bounded_left = needs_left_mask(p),
          .bounded_right = needs_right_mask(p),
          .varlen = varlen(p),
          .scale_outside_exp2 = static_cast<float>(p.softmax_scale) <= 0,
          .softcap = p.softcap > 0,
          .alibi = p.alibi_slopes.present,
          .bias = bias_of(p),
          .score_mod = p.score_mod.present,
          .mask_mod = p.mask_mod.present,
          .placed = p.placed && (p.dropout || p.alibi_slopes)};
}

int combined_queries(const Problem& p, const ForwardSchedule& t) {
  const int64_t queries = p.seqused_q ? ceil_div(t.tile.tile_m(), t.pack_gqa) : t.split_max_queries;
  return static_cast<int>(std::min(p.seqlen_q, queries));
}

bool is_near_one(double scale) { return scale > 0x1p-20 && scale < 0x1p20; }

int clamped_bound(int64_t bound) { return static_cast<int>(std::clamp<int64_t>(bound, -kFarWindow, kFarWindow)); }

int usable_sms(const Problem& p, const gpu::Properties& device, int ctas) {
  const int sms = p.sm_limit > 0 ? std::min(p.sm_limit, device.sm_count) : device.sm_count;
  return std::max(sms, ctas);
}

// Returns false if the first query sees the last key for all lengths up to the problem's. A diagonal that only the
// device knows may hide keys.
bool needs_right_mask(const Problem& p) {
  if (p.window_right == TANDEM_UNBOUNDED) return false;
  if (ignores_lengths(p)) return true;
  if (p.bottom_right) return p.window_right < p.seqlen_q - 1;
  return p.diagonal_offsets || p.window_right + clamp_diagonal(p.diagonal_offset) < p.seqlen_k - 1;
}
bool needs_left_mask(const Problem& p) {
  if (p.window_left == TANDEM_UNBOUNDED) return false;
  if (ignores_lengths(p)) return true;
  if (p.bottom_right) return p.window_left < p.seqlen_k - 1;
  return p.diagonal_offsets || p.window_left - clamp_diagonal(p.diagonal_offset) < p.seqlen_q - 1;
}

bool fits_blocks(const Problem& p, int64_t queries, int64_t keys) {
  const BlockMaskView& mask = p.block_mask;
  return (mask.block_q % queries == 0 || mask.block_q >= p.seqlen_q) &&
         (mask.block_k % keys == 0 || mask.block_k >= p.seqlen_k);
}

Status check_blocks(const Problem& p, int64_t queries, int64_t keys) {
  if (!p.block_mask) return {};
  if (fits_blocks(p, queries, keys)) return {};
  return Status::unsupported(str_cat(
      "mask_block_q (", p.block_mask.block_q, ") and mask_block_k (", p.block_mask.block_k, ") must be multiples of ",
      queries, " and ", keys, " on this GPU, or at least seqlen_q and seqlen_k: pass mask_mod without block lists"));
}

void set_block_lists(const Problem& p, int keys, int heads, int batch, BlockMaskParams* params) {
  constexpr int64_t kMax = int64_t{1} << 30;  // longer than any sequence
  const BlockMaskView& mask = p.block_mask;
  const auto set = [](const BlockList& list, BlockListParams* to) {
    if (!list.present) return;
    to->count = list.count;
    to->index = list.index;
    to->count_batch = list.count_stride[0];
    to->count_head = list.count_stride[1];
    to->count_row = list.count_stride[2];
    to->index_batch = list.index_stride[0];
    to->index_head = list.index_stride[1];
    to->index_row = list.index_stride[2];
    to->index_column = list.index_stride[3];
    to->columns = static_cast<int>(std::min<int64_t>(list.shape[3], INT32_MAX));
  };
  set(mask.partial, &params->partial);
  set(mask.full, &params->full);
  params->block_q = static_cast<int>(std::min(mask.block_q, kMax));
  params->block_n_blocks = static_cast<int>(ceil_div(std::min(mask.block_k, kMax), keys));
  params->batch = batch;
  params->heads = heads;
}

int lists_of(const Problem& p, int dim) {
  const int64_t size = dim == 0 ? p.batch : p.heads_q;
  if (dim == 0 && varlen(p)) return static_cast<int>(size);  // sequences have other lengths
  return static_cast<int>(p.block_mask.partial.varies(dim) || p.block_mask.full.varies(dim) ? size : 1);
}

Status ForwardPass::check(const Problem& p, const gpu::Properties& device, const Tuning& tuning) const {
  TANDEM_TRY(check_options(p));
  const ArchPlanner& planner = planner_for(device);
  if (p.num_splits > 1 && (p.block_mask || p.batch_invariant)) {
    return Status::unsupported(str_cat("num_splits (", p.num_splits, ") must be 0 or 1 with ",
                                       p.block_mask ? "block lists" : "batch_invariant",
                                       " on a GPU: set num_splits to 0"));
  }
  TANDEM_TRY(check_blocks(p, planner.block_mask_queries(), planner.block_mask_keys()));
  TANDEM_TRY(check_tensors(p));
  return check_sizes(p, planner, planner.forward_order(tuning));
}

void ForwardPass::plan(const Problem& p, const gpu::Properties& device, const Tuning& tuning, Plan* plan) const {
  ForwardSchedule& t = plan->forward;
  make_schedule(p, device, tuning, &t);
  count_step_lists(p, &t);
  plan->kernels.push_back(kernel_of(p, t.tile.kernel));
  add_launches(p, t, device.sm_count, plan);
  add_workspace(t, plan);
  add_split_results(p, t, plan);
}

}  // namespace tandem::plan
