#include "plan/sm90/backward.h"

#include <algorithm>

#include "plan/arithmetic.h"
#include "plan/backward_needs.h"
#include "plan/forward.h"
#include "plan/sm90/ds_chunks.h"
#include "plan/sm90/parts.h"

namespace tandem::plan {
namespace {

using Schedule = Sm90BackwardConfig::Schedule;

int pad_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// Returns the number of CTAs, or clusters, that share the m_blocks of an n_block. The number exceeds 1 if n_blocks are
// too few or too unequal to fill the GPU (causal masks). The choice assumes a whole H200, so that bits do not depend on
// the available SMs. The number is 1 for batch_invariant.
int choose_m_splits(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning) {
  if (p.batch_invariant || p.total_q == 0) return 1;
  const int64_t tiles = std::max<int64_t>(1, ceil_div(p.seqlen_k, config.tile_n()) * p.heads_k * p.batch);
  const int64_t iterations = p.group() * ceil_div(p.seqlen_q, config.tile_m), ctas = kH200Sms / config.ctas();
  const int64_t m_splits =
      std::clamp(std::min(ctas / tiles, iterations / tuning.min_split_iterations), int64_t{1}, tuning.max_m_splits);
  if (!needs_right_mask(p) || needs_left_mask(p)) return static_cast<int>(m_splits);
  // Splits by query heads, because parts that begin within a head's m_blocks would wait for the semaphores of its dq.
  int64_t heads = 1;
  while (heads < p.group() && (heads * tiles < tuning.head_split_waves * ctas || p.group() % heads != 0)) ++heads;
  return static_cast<int>(std::max(m_splits, std::min(heads, tuning.max_m_splits)));
}

// Shortest-first order spreads the CTAs over all m_blocks of a head, which must then fit in the L2 cache. Query heads
// that share keys are therefore scheduled one by one (split_q_heads).
bool uses_spt(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning) {
  if (!may_use_spt(p, config)) return false;
  if (p.batch_invariant) return true;
  if ((config.m_split && p.group() == 1) || config.short_q) return false;
  const int64_t most = config.head_dim > 192 && p.group() == 1 ? tuning.spt_wide_l2_bytes : tuning.spt_l2_bytes;
  if (p.seqlen_q * query_bytes(config.head_dim, config.head_dim_v) > most) return false;
  // With grouped heads each query head accumulates dk and dv in memory. Only long tiles can hide the time of these
  // additions.
  const int64_t tiles = ceil_div(p.seqlen_k, config.tile_n()) * p.heads_q * p.batch, sms = kH200Sms;
  // In few waves the longest tiles must come first.
  if (p.group() == 1) return config.shared_p() || tiles <= sms || 2 * tiles > 5 * sms;
  return p.seqlen_q >= tuning.spt_min_grouped_seqlen && tiles * config.ctas() >= tuning.spt_min_grouped_ctas;
}

// Returns true if one n_block has all keys and its CTAs visit every query, so that dq needs no sum in memory. Lengths
// and diagonals known only on the device might leave queries unvisited; some options lack registers. batch_invariant
// must not decide by lengths, because the bits differ.
bool has_single_n_block(const Problem& p, const Sm90BackwardConfig& t) {
  if (p.batch_invariant || p.accumulate || p.dq.dtype == DType::f32) return false;
  if (t.options.bias != Bias::none || t.options.score_mod || t.options.mask_mod || t.options.dropout ||
      (t.options.softcap && t.options.alibi))
    return false;
  if (p.seqlen_k == 0 || p.seqlen_k > t.cta_keys() || t.options.varlen || t.options.block_mask ||
      t.options.bounded_left)
    return false;
  if (!t.options.bounded_right) return true;
  const bool is_known = !p.diagonal_offsets && p.diagonal_offset == 0;
  return is_known && p.window_right >= 0 && (!p.bottom_right || p.seqlen_k >= p.seqlen_q);
}

// Returns true if dS may go through global memory. Only the device knows the lengths of packed sequences and the blocks
// of a mask. For batch_invariant a sequence must have the same bits dense and packed.
bool may_use_ds_gmem(const Problem& p, const Sm90BackwardConfig& config) {
  if (config.single_n_block || config.options.varlen || config.options.block_mask || p.batch_invariant) return false;
  return p.total_q > 0 && p.heads_q > 0 && p.seqlen_k > config.cta_keys();
}

// Returns true if warpgroups may have separate keys: the sums of dk and dv must leave registers for the scores of half
// an iteration. Dropout, a bias and expressions need more registers than that.
bool may_use_ds_gmem_sub_m(const Problem& p, const Sm90BackwardConfig& config) {
  return config.options.bias == Bias::none && !config.options.dropout && !config.options.score_mod &&
         !config.options.mask_mod &&
         round_up(p.head_dim, 64) + round_up(p.head_dim_v, 64) <= Sm90BackwardConfig::kMaxQSubtileDims;
}

bool may_use_cluster(const Problem& p, const Sm90BackwardConfig& config) {
  return config.head_dim == 256 && (p.seqlen_k > config.cta_keys() || p.batch_invariant);
}

void set_head_dims(int64_t head_dim, int64_t head_dim_v, Sm90BackwardConfig* config) {
  config->head_dim = static_cast<int>(head_dim);
  config->head_dim_v = static_cast<int>(head_dim_v);
}

// Tries a schedule of wide heads; returns false if the schedule does not serve the problem. With ds_gmem the function
// also sets the chunk.
bool try_schedule(const Problem& p, Schedule schedule, const Sm90BackwardTuning& tuning, Sm90BackwardConfig* config,
                  ChunkSizes* chunk) {
  if (tuning.schedule && *tuning.schedule != schedule) return false;
  Sm90BackwardConfig t = *config;
  t.schedule = schedule;
  const int64_t blocks = round_up(p.head_dim, 64), blocks_v = round_up(p.head_dim_v, 64);
  switch (schedule) {
    case Schedule::ds_gmem_sub_m:
      set_head_dims(blocks, blocks_v, &t);
      if (!may_use_ds_gmem_sub_m(p, t) || !may_use_ds_gmem(p, t)) return false;
      break;
    case Schedule::ds_gmem:
      if (!may_use_ds_gmem(p, t)) return false;
      break;
    case Schedule::warpgroup_roles:
      // Up to 192 one warpgroup has registers for dk, one has registers for dv, and shared memory has space for dq.
      if (p.head_dim > 192 || p.head_dim_v > 192 || !config->plain_scores()) return false;
      if (!may_use_cluster(p, *config)) return false;
      t.warpgroups = 3;
      set_head_dims(192, blocks_v, &t);
      break;
    case Schedule::cluster2:
      // The cluster halves the traffic of dq to memory, which is the bottleneck at head_dim 256.
      if (!may_use_cluster(p, *config)) return false;
      break;
    default: break;
  }
  if (t.ds_gmem()) {
    *chunk = choose_ds_chunk(p, t, tuning);
    if (chunk->heads == 0) return false;
  }
  *config = t;
  return true;
}

// The first schedule that serves the problem; shared_p serves all.
void select_wide_schedule(const Problem& p, const Sm90BackwardTuning& tuning, Sm90BackwardConfig* config,
                          ChunkSizes* chunk) {
  for (const Schedule schedule :
       {Schedule::ds_gmem_sub_m, Schedule::warpgroup_roles, Schedule::ds_gmem, Schedule::cluster2}) {
    if (try_schedule(p, schedule, tuning, config, chunk)) return;
  }
}

// Predictions need lengths that are known to the host. With batch_invariant the bits must not depend on them.
bool predicts_parts(const Problem& p, const Sm90BackwardConfig& t) {
  return t.schedule == Schedule::rs && !t.options.varlen && !needs_left_mask(p) && !p.batch_invariant;
}

// Grouped heads: many tiles, or with short iterations few tiles of many queries. Otherwise parts of the query heads are
// faster.
bool grouped_spt_helps(const Problem& p, const Sm90BackwardConfig& t, const Sm90BackwardTuning& tuning) {
  const int64_t tiles = ceil_div(p.seqlen_k, t.tile_n()) * p.heads_q * p.batch;
  const bool has_many = tiles > tuning.spt_min_grouped_waves * kH200Sms;
  return t.tile_m == 64 ? has_many : !has_many && p.seqlen_q >= tuning.spt_min_short_seqlen;
}

// Chooses DiagonalParts and sets spt if they take less time than other parts.
void set_diagonal_parts(const Problem& p, const Sm90BackwardTuning& tuning, Sm90BackwardConfig* config,
                        RsParts* parts) {
  Sm90BackwardConfig& t = *config;
  constexpr int64_t kMostForcedTiles = 1 << 20;  // at most one part for each pair of n_blocks
  const int64_t n_blocks = ceil_div(p.seqlen_k, t.tile_n());
  const bool is_small = n_blocks < 1024 && n_blocks * n_blocks * p.heads_q * p.batch < kMostForcedTiles;
  const bool is_forced = tuning.part_n_blocks.value_or(0) > 0 && is_small;
  if (is_forced && may_use_spt(p, t) && !t.single_n_block && p.seqlen_k > 0) {
    const auto length = std::min<int64_t>(*tuning.part_n_blocks, n_blocks);
    const int64_t head_parts = tuning.head_parts.value_or(1), m_splits = head_parts * ceil_div(n_blocks, length);
    if (m_splits > 1 && p.group() % head_parts == 0)
      *parts = {
          .m_splits = m_splits, .dq_splits = m_splits / head_parts, .part_n_blocks = length, .head_parts = head_parts};
  } else if (!tuning.part_n_blocks && !tuning.spt && !tuning.m_splits && !tuning.dq_splits) {
    consider_diagonal_parts(p, t, tuning, parts);
  }
  if (parts->part_n_blocks > 0) t.spt = true;
}

// Returns the parts of a kernel with the schedule rs, and sets spt.
RsParts select_rs_parts(const Problem& p, const Sm90BackwardTuning& tuning, Sm90BackwardConfig* config) {
  Sm90BackwardConfig& t = *config;
  RsParts parts;
  if (predicts_parts(p, t)) {
    // n_blocks that every query sees do not benefit from spt.
    const bool may_help = !has_many_full_n_blocks(p) && (p.group() == 1 || grouped_spt_helps(p, t, tuning));
    t.spt = !t.single_n_block && may_help && uses_spt(p, t, tuning);
    if (!t.spt) parts = choose_rs_parts(p, t, tuning);
    set_diagonal_parts(p, tuning, &t, &parts);
    if (parts.part_n_blocks > 0) return parts;
  } else {
    parts.m_splits = choose_m_splits(p, t, tuning);
    t.m_split = parts.m_splits > 1;
    t.spt = !t.single_n_block && uses_spt(p, t, tuning);
  }
  if (tuning.spt) t.spt = *tuning.spt && may_use_spt(p, t) && !t.single_n_block;
  if (tuning.m_splits) parts.m_splits = *tuning.m_splits;
  const bool may_split_dq = !t.spt && !t.single_n_block && !t.options.block_mask && !p.batch_invariant;
  if (tuning.m_splits || tuning.unsplit_tiles) parts.unsplit_tiles = tuning.unsplit_tiles.value_or(0);
  if (tuning.dq_splits) parts.dq_splits = *tuning.dq_splits, parts.wraps = false;
  if (tuning.wraps) parts.wraps = *tuning.wraps;
  const bool is_whole = parts.m_splits == 1 || parts.unsplit_tiles == 0;
  parts.wraps = parts.wraps && is_whole && may_wrap(p, t);
  const int64_t n_blocks = std::max<int64_t>(ceil_div(p.seqlen_k, t.tile_n()), 1);
  parts.dq_splits = may_split_dq ? std::min(parts.dq_splits, n_blocks) : 1;
  if (parts.wraps) parts.dq_splits = std::max<int64_t>(parts.dq_splits / 2 * 2, 2);
  return parts;
}

// The number of tiles that the query heads of a group are divided into, with split_q_heads.
int count_head_splits(const Problem& p, const ChunkSizes& chunk) {
  return static_cast<int>(p.group() / chunk.tile_heads);
}

}  // namespace

void select_sm90_backward(const Problem& p, const Sm90BackwardTuning& tuning, BackwardSchedule* schedule) {
  Sm90BackwardConfig t;
  set_head_dims(pad_head_dim(p.head_dim), pad_head_dim(p.head_dim_v), &t);
  const bool is_wide = t.head_dim > 128 || t.head_dim_v > 128;
  if (is_wide) t.schedule = Schedule::shared_p;
  t.options = options_of(p);
  t.options.scale_outside_exp2 = t.options.scale_outside_exp2 || (p.bias && !is_near_one(p.softmax_scale));
  t.single_n_block = has_single_n_block(p, t);
  // Packed queries may have rows beyond the longest length, whose dq must be zero.
  const bool is_short = p.seqlen_q <= t.kShortQ && !p.packed_q() && !is_wide && !t.single_n_block;
  // Short MMAs benefit from more queries per iteration, if registers suffice.
  if (t.head_dim <= 64 && t.head_dim_v <= 64 && t.plain_scores() && !t.single_n_block && !is_short) t.tile_m = 128;
  RsParts parts;
  if (is_wide) {
    select_wide_schedule(p, tuning, &t, &schedule->chunk);
    parts.m_splits = choose_m_splits(p, t, tuning);
    t.m_split = parts.m_splits > 1;
    t.spt = !t.single_n_block && !t.ds_gmem() && uses_spt(p, t, tuning);
  } else {
    t.short_q = is_short;
    parts = select_rs_parts(p, tuning, &t);
    t.short_q = is_short && parts.m_splits == 1;
  }
  t.split_q_heads = ((t.spt && parts.part_n_blocks == 0) || t.ds_gmem()) && p.group() > 1;
  if (t.split_q_heads) parts.m_splits = count_head_splits(p, schedule->chunk);
  t.m_split = parts.m_splits > 1;
  t.dq_split = parts.dq_splits > 1;
  t.wraps = parts.wraps;
  t.store_from_registers = stores_from_registers(p) && t.has_unsplit_tiles();
  t.captured = wants_captured(p);
  t.captured_per_tile = captured_per_tile(p) && !t.shared_p();
  t.captured_per_score = captured_per_score(p) && !t.shared_p();
  // Wide heads and iterations of many queries leave shared memory for fewer stages.
  while (!t.fits() && t.q_stages > 1) --(t.q_stages > t.dout_stages ? t.q_stages : t.dout_stages);
  schedule->tile = t;
  schedule->m_splits = static_cast<int>(parts.m_splits);
  schedule->part_n_blocks = static_cast<int>(parts.part_n_blocks);
  schedule->head_parts = static_cast<int>(parts.head_parts);
  const int64_t n_blocks = ceil_div(p.seqlen_k, t.tile_n());
  if (t.m_split && t.has_unsplit_tiles()) {
    const int64_t most = std::max<int64_t>(n_blocks * p.heads_k * p.batch - 1, 0);
    schedule->unsplit_tiles = static_cast<int>(std::min(parts.unsplit_tiles, most));
  }
  schedule->dq_splits = static_cast<int>(parts.dq_splits);
}

void set_sm90_ds_chunks(const Problem& p, BackwardSchedule* schedule) {
  BackwardSchedule& t = *schedule;
  const Sm90BackwardConfig& config = t.tile.for_hopper();
  // Without dq no dS is stored, and all tiles are one chunk.
  if (!p.dq) {
    t.chunk.heads = p.batch * p.heads_q;
    t.chunk.n_blocks = t.n_blocks;
    t.chunk.row_n_blocks = t.chunk.bytes = 0;
  }
  t.chunk.all_heads = p.batch * p.heads_q;
  t.ds_chunks = ceil_div(p.batch * p.heads_q, t.chunk.heads) * ceil_div(t.n_blocks, t.chunk.n_blocks);
  const int64_t heads = t.chunk.heads / t.chunk.tile_heads, parts = config.split_q_heads ? 1 : t.m_splits;
  t.grid = static_cast<int>(std::min<int64_t>(t.grid, heads * t.chunk.n_blocks * parts));
  // Without a mask tiles are equal, so that few heads at once can share the L2 cache.
  const int64_t head_bytes = std::max<int64_t>(2 * p.seqlen_q * (p.head_dim + p.head_dim_v), 1);
  const bool has_mask = config.options.bounded_left || config.options.bounded_right;
  t.l2_heads = static_cast<int>(has_mask ? heads : std::clamp<int64_t>(kDsL2Bytes / head_bytes, 1, heads));
  if (!p.dq) return;
  t.dq_ctas = count_dq_ctas(t.chunk, t.sequence_m_blocks, config);
  t.dq_smem_bytes = config.dq_smem_bytes();
  t.accumulates_dq = count_dq_accums(t.n_blocks, t.chunk, config) > 1;
}

}  // namespace tandem::plan
