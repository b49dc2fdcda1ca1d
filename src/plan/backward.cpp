#include "plan/backward.h"

#include <algorithm>

#include "base/text.h"
#include "config/backward_addresses.h"
#include "config/block_mask.h"
#include "plan/arch_planner.h"
#include "plan/arithmetic.h"
#include "plan/backward_needs.h"
#include "plan/check.h"
#include "plan/forward.h"
#include "problem/bound_expression.h"

namespace tandem::plan {
namespace {

constexpr int64_t kLongest = int64_t{1} << 28;

Status check_sizes(const Problem& p) {
  if (p.seqlen_q > kLongest) {
    return Status::unsupported(
        str_cat("q.seqlen (", p.seqlen_q, ") must be at most 2^28 on a GPU: split the queries over several calls"));
  }
  if (p.seqlen_k > kLongest) {
    return Status::unsupported(
        str_cat("k.seqlen (", p.seqlen_k, ") must be at most 2^28 on a GPU: split the keys over several calls"));
  }
  const int64_t blocks = std::max(std::max(p.seqlen_q, p.seqlen_k), p.packed_q() ? p.total_q : 0) / 64 + 2;
  constexpr int64_t kMaxBlocks = (int64_t{1} << 27) - 1;  // a launch may have a dozen CTAs per block
  if (p.heads_q > 0 && p.batch > kMaxBlocks / blocks / p.heads_q) {
    return Status::unsupported(
        str_cat("batch (", p.batch, ") and q.heads (", p.heads_q,
                ") must give fewer than 2^27 tiles of 64 queries or keys on a GPU: split the call over batch"));
  }
  return {};
}

// Gradients of a score_mod's tensors are exact up to a number of scores that takes a GPU seconds.
Status check_captured(const Problem& p) {
  if (!wants_captured(p)) return {};
  const auto reads = static_cast<int64_t>(p.score_mod->program->captures.size());
  const double most = static_cast<double>(int64_t{1} << kSumsLog2);
  double scores = 1;
  for (const int64_t x : {p.total_q, p.seqlen_k, p.heads_q, reads}) scores *= static_cast<double>(x);
  constexpr int64_t kMaxCells = int64_t{1} << 38;  // below half of a grid of 2^31 CTAs
  if (p.score_mod->cells > kMaxCells) {
    return Status::unsupported(
        str_cat("score_mod.tensors[].gradient (", p.score_mod->cells,
                " elements in total) must be at most 2^38 elements on a GPU: pass NULL for some gradients"));
  }
  if (scores < most) return {};
  return Status::unsupported(str_cat("score_mod.tensors[].gradient must be NULL on a GPU for 2^", kSumsLog2,
                                     " or more scores times elements read per score (here q.seqlen ", p.seqlen_q,
                                     ", k.seqlen ", p.seqlen_k, ", q.heads ", p.heads_q, ", elements ", reads,
                                     "): split the call over batch or heads, and set accumulate"));
}

// Heads that run together with a left bound. The heads' active n_blocks see the rows between the first and the last
// n_block, and one more window. With more heads n_blocks wait less for each other, but their dq must fit in the L2
// cache. In long iterations of clusters, waiting costs less than memory.
int64_t window_heads(const Problem& p, const BackwardSchedule& t, const BackwardOrderTuning& tuning, int64_t ctas) {
  const int64_t left = std::min(p.window_left, p.seqlen_q), right = needs_right_mask(p) ? p.window_right : p.seqlen_q;
  const int64_t rows =
      tuning.window_l2_bytes / query_bytes(t.tile.head_dim, t.tile.head_dim_v) - ctas * int64_t{t.tile.tile_n};
  return std::clamp<int64_t>(rows / std::max<int64_t>(left + right, t.tile.tile_n),
                             t.tile.ctas > 1 ? tuning.min_cluster_window_heads : tuning.min_window_heads,
                             tuning.max_window_heads);
}

// Returns the number of groups of about `most` heads, equal groups if possible. The n_blocks of a small last group
// would wait for each other at the end, without other work.
int64_t even_groups(int64_t heads, int64_t most) {
  for (int64_t n = most; 4 * n >= 3 * most; --n)
    if (heads % n == 0) return heads / n;
  return ceil_div(heads, most);
}

// The key heads that run together (docs/design/sm90_backward.md). Without a mask, their n_blocks run at once, at most
// one per iteration of a head. At least two long heads run together. Causal masks use more heads, because their
// n_blocks are unequal and add in order.
int choose_l2_heads(const Problem& p, const BackwardSchedule& t, const BackwardOrderTuning& tuning, int sm_count) {
  const int64_t heads = std::max<int64_t>(p.batch * p.heads_k, 1), ctas = sm_count / t.tile.ctas;
  if (tuning.l2_heads) return static_cast<int>(std::min<int64_t>(*tuning.l2_heads, heads));
  const int m_splits = t.unsplit_tiles > 0 ? 1 : t.m_splits;
  const int64_t head_tiles = std::max(int64_t{t.n_blocks} * m_splits, int64_t{1});
  const int64_t epilogue = t.tile.short_q ? 0 : tuning.epilogue_iterations;
  const int64_t iterations = std::max<int64_t>(p.group() * t.sequence_m_blocks / m_splits + epilogue, 1);
  int64_t wanted = std::max<int64_t>(ctas / std::min(head_tiles, iterations), 1), groups = 1;
  if (needs_left_mask(p)) {
    groups = ceil_div(heads, window_heads(p, t, tuning, ctas));
  } else if (needs_right_mask(p)) {
    if (t.tile.tile_m > 64) wanted *= tuning.short_iteration_factor;
    wanted = std::max(wanted, varlen(p) ? tuning.packed_heads : tuning.min_causal_heads) * m_splits / p.group();
    groups = heads / std::max<int64_t>(wanted, 1);
  } else {
    if (head_tiles >= tuning.long_head_n_blocks && head_tiles <= iterations)
      wanted = std::max<int64_t>(t.tile.head_dim > 64 ? wanted : 2 * wanted, 2);
    if (t.tile.ctas == 1 && !varlen(p))
      wanted = std::max(wanted, full_l2_heads(p, t.tile.head_dim, t.tile.head_dim_v, tuning));
    groups = tuning.prefers_even_groups ? even_groups(heads, wanted) : ceil_div(heads, wanted);
  }
  return static_cast<int>(ceil_div(heads, std::max<int64_t>(groups, 1)));
}

// Returns the number of spt heads: all heads except the last heads. The last heads keep all SMs busy while the longest
// n_block of another head finishes. The result assumes a whole GPU and, with batch_invariant, does not depend on other
// sequences.
int count_spt_heads(const Problem& p, const BackwardSchedule& t, const BackwardOrderTuning& tuning) {
  const int64_t heads = p.batch * (t.tile.dkv_semaphores > 0 ? p.heads_q : p.heads_k);
  if (p.batch_invariant) return static_cast<int>(heads);
  const int64_t last = ceil_div(2 * tuning.sms / t.tile.ctas, t.n_blocks + 1);  // half of the n_blocks see an m_block
  return static_cast<int>(std::max<int64_t>(heads - last, 0));
}

void set_tiles(const Problem& p, BackwardSchedule* schedule) {
  BackwardSchedule& t = *schedule;
  const int64_t heads = p.heads_k * p.batch;
  int64_t split = t.n_blocks * heads - t.unsplit_tiles, tiles = t.unsplit_tiles + split * t.m_splits;
  if (t.part_n_blocks > 0) {
    split = heads * (t.head_parts > 1 ? t.n_blocks : t.n_blocks - t.part_n_blocks);
    tiles = heads * t.head_parts * DiagonalParts{t.n_blocks, t.part_n_blocks}.tiles();
  }
  t.split_n_blocks = static_cast<int>(split);
  t.tiles = static_cast<int>(tiles);
}

void make_schedule(const Problem& p, const gpu::Properties& device, const Tuning& tuning, BackwardSchedule* schedule) {
  const ArchPlanner& planner = planner_for(device);
  const BackwardOrderTuning& order = planner.backward_order(tuning);
  BackwardSchedule& t = *schedule;
  planner.select_backward(p, tuning, &t);
  const int ctas = t.tile.ctas, sms = usable_sms(p, device, ctas);
  t.sequence_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, t.tile.tile_m));
  // In packed tensors the last m_block of each sequence may be partial.
  t.m_blocks = static_cast<int>(p.packed_q() ? p.total_q / t.tile.tile_m + p.batch + 1 : p.batch * t.sequence_m_blocks);
  if (p.total_q == 0) t.m_blocks = 0;
  t.n_blocks = static_cast<int>(ceil_div(p.seqlen_k, t.tile.tile_n));
  set_tiles(p, schedule);
  t.l2_heads = choose_l2_heads(p, t, order, sms);
  t.spt_heads = count_spt_heads(p, t, order);
  const bool twice = t.tile.two_pass && p.dv && (p.dq || p.dk);  // tiles of dv follow the tiles of dk
  t.grid = ctas * std::min(sms / ctas, t.tiles * (twice ? 2 : 1));
  t.accumulates_dq = !t.tile.single_n_block && !t.tile.ds_gmem;
  if (t.tile.ds_gmem) planner.set_ds_chunks(p, tuning, &t);
  if (t.tile.captured && !t.tile.captured_per_score && p.total_q > 0)
    t.captured_blocks = p.batch * p.heads_q * ctas * t.n_blocks;
  if (!p.dbias) return;
  const int64_t* const shape = p.dbias.shape;
  t.dbias_blocks =
      shape[0] * shape[1] * (shape[2] == 1 ? 1 : t.sequence_m_blocks) * (shape[3] == 1 ? 1 : ctas * t.n_blocks);
}

bool has_main(const Problem& p, const BackwardSchedule& t) { return t.tiles > 0 && (p.dq || p.dk || p.dv); }

// Adds the launches that list the iterations of a block mask, for the main kernel and the kernels that compute scores
// again.
void add_step_launches(const Problem& p, BackwardSchedule* schedule, Plan* plan) {
  BackwardSchedule& t = *schedule;
  if (!t.tile.block_mask || t.tiles == 0) return;
  t.list_batch = lists_of(p, 0);
  t.list_heads = lists_of(p, 1);
  t.list_words = 2 + p.group() * t.sequence_m_blocks;
  const auto rows = static_cast<uint32_t>(t.list_batch * t.list_heads * t.sequence_m_blocks);
  if (rows > 0) plan->launches.push_back({.entry = EntryId::mark_n_blocks, .grid = rows, .block = kListBlocksThreads});
  plan->launches.push_back({.entry = EntryId::list_m_blocks,
                            .grid = static_cast<uint32_t>(p.batch * p.heads_k * t.n_blocks),
                            .block = kListBlocksThreads});
}

// Adds the main kernel's launch and later launches. Later kernels may begin before the main kernel has ended, unless
// their CTAs would wait on multiprocessors that a limit reserves for other work.
void add_launches(const Problem& p, const BackwardSchedule& t, uint32_t blocks, Plan* plan) {
  if (has_main(p, t)) {
    plan->launches.push_back({.entry = EntryId::main,
                              .grid = static_cast<uint32_t>(t.grid),
                              .block = static_cast<uint32_t>(t.tile.threads),
                              .shared_bytes = static_cast<uint32_t>(t.tile.smem_bytes),
                              .overlap_previous = blocks > 0});
  }
  const bool may_overlap = p.sm_limit == 0;
  if (t.dq_ctas > 0) {
    plan->launches.push_back({.entry = EntryId::dq,
                              .grid = static_cast<uint32_t>(t.dq_ctas),
                              .block = static_cast<uint32_t>(t.tile.threads),
                              .shared_bytes = static_cast<uint32_t>(t.dq_smem_bytes),
                              .overlap_previous = may_overlap});
    if (has_main(p, t)) plan->repeat = {plan->launches.size() - 2, plan->launches.size(), t.ds_chunks};
  }
  const auto threads = static_cast<uint32_t>(t.tile.postprocess_threads);
  const uint32_t dq_ctas = t.dq_splits > 1 ? t.tile.for_hopper().postprocess_ctas(t.dq_splits) : 1;
  const bool accumulates_dkv = t.m_splits > 1 && (p.dk || p.dv);
  const uint32_t converted = (p.dq && !t.tile.single_n_block && !t.tile.ds_gmem ? blocks * dq_ctas : 0) +
                             (accumulates_dkv ? t.tile.ctas * t.split_n_blocks * t.tile.dkv_accum_ctas : 0);
  if (converted > 0) {
    plan->launches.push_back({.kernel = kPrepostKernel,
                              .entry = EntryId::postprocess,
                              .grid = converted,
                              .block = threads,
                              .overlap_previous = may_overlap});
  }
  if (p.dsink && p.heads_q > 0) {
    plan->launches.push_back({.kernel = kPrepostKernel,
                              .entry = EntryId::dsink,
                              .grid = static_cast<uint32_t>(p.heads_q),
                              .block = 32,
                              .overlap_previous = may_overlap});
  }
  if (t.dbias_blocks > 0) {
    plan->kernels.push_back(kernel_of(p, t.tile.kernel, Unit::dbias));
    plan->launches.push_back({.kernel = kDbiasKernel,
                              .entry = EntryId::dbias,
                              .grid = static_cast<uint32_t>(t.dbias_blocks),
                              .block = static_cast<uint32_t>(t.tile.score_threads),
                              .shared_bytes = static_cast<uint32_t>(t.tile.dbias_smem_bytes),
                              .overlap_previous = may_overlap && !plan->launches.empty()});
  }
  if (t.captured_blocks > 0) {
    plan->launches.push_back({.entry = EntryId::captured,
                              .grid = static_cast<uint32_t>(t.captured_blocks),
                              .block = static_cast<uint32_t>(t.tile.score_threads),
                              .shared_bytes = static_cast<uint32_t>(t.tile.captured_smem_bytes),
                              .overlap_previous = may_overlap && !plan->launches.empty()});
  }
  if (t.tile.captured) {
    plan->launches.push_back(
        {.entry = EntryId::postprocess_captured,
         .grid = static_cast<uint32_t>(ceil_div(p.score_mod->cells, int64_t{kPostprocessCapturedThreads})),
         .block = kPostprocessCapturedThreads,
         .overlap_previous = may_overlap && !plan->launches.empty()});
  }
}

}  // namespace

Status BackwardPass::check(const Problem& p, const gpu::Properties& device, const Tuning& tuning) const {
  TANDEM_TRY(check_options(p));
  if (p.block_mask) {
    BackwardSchedule schedule;
    planner_for(device).select_backward(p, tuning, &schedule);
    TANDEM_TRY(check_blocks(p, schedule.tile.tile_m, schedule.tile.tile_n / schedule.tile.ctas));
  }
  TANDEM_TRY(check_tensors(p));
  TANDEM_TRY(check_captured(p));
  return check_sizes(p);
}

void BackwardPass::plan(const Problem& p, const gpu::Properties& device, const Tuning& tuning, Plan* plan) const {
  BackwardSchedule& t = plan->backward;
  make_schedule(p, device, tuning, &t);
  for (const Unit unit : {Unit::main, Unit::prepost}) plan->kernels.push_back(kernel_of(p, t.tile.kernel, unit));
  const int64_t blocks = p.total_q > 0 ? p.heads_q * t.m_blocks : 0;
  const auto count = static_cast<uint32_t>(blocks);
  const int64_t preprocess_ctas = blocks * t.tile.preprocess_ctas;
  // Without queries no kernel computes delta, and a memset zeroes the counter.
  const int delta = count > 0 ? 0 : kMemset;
  if (count > 0) {
    plan->launches.push_back({.kernel = kPrepostKernel,
                              .entry = EntryId::preprocess,
                              .grid = static_cast<uint32_t>(preprocess_ctas),
                              .block = static_cast<uint32_t>(t.tile.preprocess_threads)});
  } else {
    plan->fills.push_back({0, kBackwardCounters * sizeof(int)});
  }
  const int before_steps = static_cast<int>(plan->launches.size());
  add_step_launches(p, &t, plan);
  const int main = static_cast<int>(plan->launches.size());
  add_launches(p, t, count, plan);
  size_t end = 0;
  const auto region = [&](const char* name, int64_t bytes, int writer) {
    const size_t begin = end;
    plan->regions.push_back({name, begin, static_cast<size_t>(bytes), writer});
    end = begin + static_cast<size_t>(ceil_div(bytes, 128) * 128);
    return begin;
  };
  region("workspace.counter", kBackwardCounters * sizeof(int), delta);
  t.dq_semaphore_offset = region(
      "workspace.dq_semaphore", blocks * t.dq_splits * t.tile.dq_semaphores * static_cast<int64_t>(sizeof(int)), delta);
  t.lse_delta_offset =
      region("workspace.lse_delta", blocks * 2 * t.tile.tile_m * static_cast<int64_t>(sizeof(float)), delta);
  const int64_t sums = has_main(p, t) && t.accumulates_dq ? blocks * t.dq_splits * t.tile.dq_floats : 0;
  t.dq_accum_offset = region("workspace.dq_accum", sums * static_cast<int64_t>(sizeof(float)), main);
  if (t.tile.ds_gmem && has_main(p, t) && p.dq) {
    t.ds_offset = region("workspace.ds", t.chunk.bytes, main);
    t.ds_semaphore_count = static_cast<int>(p.batch * p.heads_q * t.n_blocks);
    t.ds_semaphore_offset =
        region("workspace.ds_semaphore", t.ds_semaphore_count * static_cast<int64_t>(sizeof(int)), delta);
  }
  if (t.m_splits > 1 && (p.dk || p.dv)) {
    const int64_t n_blocks = has_main(p, t) ? int64_t{t.tile.ctas} * t.split_n_blocks : 0;
    const int64_t floats = n_blocks * t.tile.dkv_floats * (t.tile.dkv_semaphores > 0 ? 1 : t.m_splits);
    t.dkv_semaphore_count = static_cast<int>(n_blocks * t.tile.dkv_semaphores);
    t.dkv_semaphore_offset =
        region("workspace.dkv_semaphore", t.dkv_semaphore_count * static_cast<int64_t>(sizeof(int)), delta);
    t.dkv_accum_offset = region("workspace.dkv_accum", floats * static_cast<int64_t>(sizeof(float)), main);
  }
  if (p.dsink) {
    t.dsink_offset = region("workspace.dsink", preprocess_ctas * static_cast<int64_t>(sizeof(float)), delta);
  }
  if (p.dout.dtype == DType::f32) {
    const int64_t rows = p.packed_q() ? p.total_q : p.batch * p.seqlen_q;
    t.dout_offset = region("workspace.dout", rows * p.heads_q * p.head_dim_v * size_of(p.dtype), delta);
  }
  if (t.tile.captured) {
    const int64_t words = p.score_mod->cells * kCellWords;
    t.captured_offset = region("workspace.captured", words * static_cast<int64_t>(sizeof(uint64_t)), kMemset);
    plan->fills.push_back({t.captured_offset, plan->regions.back().bytes});
  }
  if (t.list_words > 0) {
    const int64_t rows = int64_t{t.list_batch} * t.list_heads * t.sequence_m_blocks;
    const int64_t lists = p.batch * p.heads_k * t.n_blocks, bytes = static_cast<int64_t>(sizeof(int));
    t.table_offset = region("workspace.table", rows * t.n_blocks * bytes, before_steps);
    t.steps_offset = region("workspace.steps", lists * t.list_words * bytes, main - 1);
  }
  plan->workspace_bytes = kWorkspaceAlignment - 1 + end;
}

}  // namespace tandem::plan
