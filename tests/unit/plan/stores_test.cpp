// Evaluates on the host the address of every store of random problems' launches, for both GPUs and forced schedules.
// Each must lie within its part of the workspace or within its tensor. Launches nothing.
#include "unit/plan/stores.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "unit/plan/random_problem.h"

namespace tandem::test {
namespace {

using Schedule = Sm90BackwardConfig::Schedule;

std::byte* address_of(int n) { return reinterpret_cast<std::byte*>(uintptr_t(n) << 56); }
std::byte* const kWorkspace = address_of(1);

// A problem with addresses: no two buffers are within reach of each other.
struct Placed {
  Problem p;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;

  Placed(const Problem& problem, Random& r) : p(problem) {
    int n = 2;
    for (View* view : {&p.q, &p.k, &p.v, &p.out, &p.lse, &p.max_scores, &p.dout, &p.dlse, &p.dq, &p.dk, &p.dv})
      if (*view) view->data = address_of(n++);
    for (BiasView* view : {&p.bias, &p.dbias})
      if (*view) view->data = address_of(n++);
    for (HeadView* view : {&p.sink, &p.dsink, &p.alibi_slopes})
      if (*view) view->data = address_of(n++);
    place_lengths(p.total_q, p.seqlen_q, r, &p.cu_seqlens_q, &cu_seqlens_q);
    place_lengths(p.total_k, p.seqlen_k, r, &p.cu_seqlens_k, &cu_seqlens_k);
    p.seqused_q = p.seqused_k = {};  // only shorten what is stored
  }

 private:
  // Lengths up to the longest, of which many are the shortest or the longest possible.
  void place_lengths(int64_t total, int64_t longest, Random& r, IndexView* view, std::vector<int32_t>* ends) const {
    if (!*view) return;
    ends->assign(1, 0);
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t most = std::min(longest, total - ends->back());
      const int64_t length = r.chance(0.3) ? 0 : r.chance(0.5) ? most : r.between(0, most);
      ends->push_back(static_cast<int32_t>(ends->back() + length));
    }
    view->data = ends->data();
  }
};

// The index tensors of a plan that may have many sequences take long to fill.
bool is_small_enough(const Problem& p) { return p.batch <= 4096 || !(p.packed_q() || p.packed_k()); }

// A number for each query and head.
View rows_of(const Problem& p) {
  View view{.dtype = DType::f32, .row = 1, .present = true};
  view.head = p.packed_q() ? p.total_q : p.seqlen_q;
  view.batch = p.packed_q() ? 0 : p.heads_q * p.seqlen_q;
  return view;
}

Problem with_blocks(Problem p, Random& r) {
  const int64_t sizes[] = {128, 256, 512, 1 << 20};
  p.block_mask.block_q = sizes[r.between(0, 3)];
  p.block_mask.block_k = sizes[r.between(0, 3)];
  BlockList& list = p.block_mask.partial;
  list.present = true;
  const int64_t rows = (p.seqlen_q + p.block_mask.block_q - 1) / p.block_mask.block_q;
  const int64_t shape[] = {r.chance(0.5) ? p.batch : 1, r.chance(0.5) ? p.heads_q : 1, rows, 1};
  std::copy_n(shape, 4, list.shape);
  std::copy_n(shape, 3, list.count_shape);
  return p;
}

// Reads two tensors, whose gradients are wanted.
Problem with_captured(Problem p, Random& r) {
  static const Problem kRead = modified(p, "score * t0 + t1", 2, 0);
  const auto mod = std::make_shared<BoundExpression>(*kRead.score_mod.read);
  mod->cells = 0;
  mod->gradients.clear();
  for (int n = 0; n < 2; ++n) {
    CapturedGradient gradient;
    gradient.first = mod->cells;
    BiasView& to = gradient.to;
    to = {.data = address_of(30 + n), .dtype = r.chance(0.5) ? DType::f32 : DType::bf16, .present = true};
    int64_t elements = 1;
    for (int i = n == 0 ? 3 : 2; i < 4; ++i) elements *= to.shape[i] = r.between(1, 70);
    for (int64_t i = 3, stride = r.between(1, 3); i >= 0; stride *= to.shape[i], --i) to.stride[i] = stride;
    score_mod::TensorView view;
    std::copy_n(to.stride, 4, view.stride);
    for (int i = 0; i < 4; ++i) view.size[i] = static_cast<int32_t>(to.shape[i]);
    mod->values.tensors.push_back(view);
    mod->dtypes.push_back(DType::f32);
    mod->gradients.push_back(gradient);
    mod->cells += elements;
  }
  p.score_mod = {.present = true, .read = mod};
  return p;
}

// Random constants, so that every schedule of wide heads, chunk and split comes at sizes that would not choose it.
plan::Tuning random_tuning(Random& r) {
  plan::Tuning tuning;
  plan::Sm90BackwardTuning& t = tuning.sm90.backward;
  if (r.chance(0.7)) t.schedule = static_cast<Schedule>(r.between(1, static_cast<int64_t>(Schedule::ds_gmem_sub_m)));
  if (r.chance(0.8)) t.ds_chunk_tiles = r.chance(0.6) ? r.between(1, 40) : 512;
  t.ds_bytes_per_gradient = r.between(0, 12);
  if (r.chance(0.7)) t.min_ds_bytes = 0;
  if (r.chance(0.5)) t.dq_splits = static_cast<int>(r.between(1, 20));
  if (r.chance(0.3)) t.wraps = true;
  if (r.chance(0.5))
    t.part_n_blocks = static_cast<int>(r.between(0, 9)), t.head_parts = static_cast<int>(r.between(1, 2));
  t.two_head_tile_min_tiles = r.chance(0.7) ? 0 : 330;
  t.two_head_tile_max_m_blocks = r.chance(0.7) ? 1 << 20 : r.between(0, 200);
  t.min_split_iterations = r.between(1, 4);
  t.head_split_waves = r.between(0, 20);
  t.spt_min_grouped_seqlen = t.spt_min_grouped_ctas = r.chance(0.5) ? 1 : 4096;
  t.spt_l2_bytes = tuning.sm100.backward.spt_l2_bytes = r.chance(0.7) ? int64_t{1} << 40 : 0;
  if (r.chance(0.5))
    tuning.sm90.forward_order.invariant_split_keys = tuning.sm100.forward_order.invariant_split_keys =
        r.between(64, 700);
  if (r.chance(0.7)) tuning.sm100.backward.ds_chunk_tiles = r.between(1, 40);
  tuning.sm100.backward.two_cta_clocks = r.chance(0.5) ? 0 : int64_t{1} << 30;
  if (r.chance(0.5))
    tuning.sm90.forward_row = static_cast<size_t>(r.between(0, int64_t{std::size(plan::kSm90TuningRows)} - 1));
  return tuning;
}

// Every region must be within the workspace, and no two may overlap.
std::string overlapping_regions(const plan::Plan& plan) {
  for (const plan::Region& a : plan.regions) {
    if (a.bytes > 0 && a.offset + a.bytes + plan::kWorkspaceAlignment - 1 > plan.workspace_bytes) return a.name;
    for (const plan::Region& b : plan.regions)
      if (&a != &b && a.bytes > 0 && b.bytes > 0 && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes)
        return std::string(a.name) + " and " + b.name;
  }
  return "";
}

// Counts of the walks: plans, stores, schedules of Hopper's backward, launches of each entry.
struct Seen {
  int64_t plans = 0, stores = 0, schedules[6] = {}, chunked = 0, entries[plan::kEntryIds] = {};
  int64_t chunked_blackwell = 0, continued = 0;  // continued: sums of dq pass from chunk to chunk

  void add(const plan::Plan& plan) {
    ++plans;
    for (const plan::PlannedLaunch& launch : plan.launches) ++entries[static_cast<size_t>(launch.entry)];
    const auto* config = std::get_if<Sm90BackwardConfig>(&plan.backward.tile.kernel);
    if (plan.pass != plan::pass_of(TANDEM_BACKWARD)) return;
    if (config == nullptr) {
      chunked_blackwell += plan.backward.ds_chunks > 1;
      continued += plan.backward.accumulates_dq && plan.backward.tile.ds_gmem;
      return;
    }
    ++schedules[static_cast<size_t>(config->schedule)];
    chunked += plan.backward.ds_chunks > 1;
  }
};

// The first store outside its buffer, or nothing.
std::string wrong_store(const Problem& p, const gpu::Properties& device, const plan::Tuning& tuning, Seen* seen) {
  const plan::Plan plan = plan::make_plan(p, device, tuning);
  seen->add(plan);
  if (std::string names = overlapping_regions(plan); !names.empty()) return names;
  plan::Arguments arguments;
  plan.pass->bind(p, plan, kWorkspace, &arguments);
  StoreRanges ranges(plan, kWorkspace);
  if (p.pass == TANDEM_FORWARD) {
    walk_forward(p, plan, arguments, &ranges);
  } else {
    walk_backward(p, plan, arguments, &ranges);
  }
  for (size_t n = 0; ranges.ok() && n < plan.launches.size(); ++n) {
    if (plan.launches[n].entry == plan::EntryId::main) walk_maps(arguments, plan.pass->tensors_of(p, plan, n), &ranges);
  }
  seen->stores += ranges.stores();
  return ranges.ok() ? "" : ranges.failure();
}

std::string described(const Problem& p) {
  std::string text = "batch " + std::to_string(p.batch) + ", heads " + std::to_string(p.heads_q) + " on " +
                     std::to_string(p.heads_k) + ", lengths " + std::to_string(p.seqlen_q) + " and " +
                     std::to_string(p.seqlen_k) + ", head_dim " + std::to_string(p.head_dim) + " and " +
                     std::to_string(p.head_dim_v);
  return text + (p.packed_q() ? ", packed" : "");
}

TEST(Stores, OfRandomProblems) {
  constexpr uint64_t kProblems = 100000;
  Seen seen;
  for (uint64_t seed = 1; seed <= kProblems; ++seed) {
    Random r(seed);
    Problem problem = random_problem(r);
    // A block mask needs dense tensors.
    const bool packed = problem.packed_q() || problem.packed_k();
    if (r.chance(0.1) && !packed) problem = with_blocks(problem, r);
    if (problem.pass == TANDEM_BACKWARD && r.chance(0.1)) problem = with_captured(problem, r);
    if (problem.pass == TANDEM_FORWARD && r.chance(0.5)) problem.lse = rows_of(problem);
    if (problem.pass == TANDEM_FORWARD && r.chance(0.2)) problem.max_scores = rows_of(problem);
    if (!writes_something(problem) || !is_small_enough(problem)) continue;
    const Placed placed(problem, r);
    const plan::Tuning tuning = r.chance(0.5) ? random_tuning(r) : plan::kTuning;
    for (const gpu::Properties& device : {hopper(), blackwell()}) {
      if (!plan::check(placed.p, device, tuning).ok()) continue;
      ASSERT_EQ(wrong_store(placed.p, device, tuning, &seen), "")
          << device.name << ", seed " << seed << ": " << described(placed.p);
    }
  }
  EXPECT_GT(seen.plans, static_cast<int64_t>(kProblems));
  EXPECT_GT(seen.stores, 20 * seen.plans);
  EXPECT_GT(seen.chunked, 1000);
  EXPECT_GT(seen.chunked_blackwell, 1000);
  EXPECT_GT(seen.continued, 1000);
  for (const int64_t plans : seen.schedules) EXPECT_GT(plans, 500);
  for (size_t n = 0; n < plan::kEntryIds; ++n) {
    const auto entry = static_cast<plan::EntryId>(n);
    const bool is_other =
        entry == plan::EntryId::merge || entry >= plan::EntryId::classify_blocks;  // no Pass plans them
    EXPECT_EQ(seen.entries[n] > 200, !is_other) << n;
  }
}

// Tiles with all query heads of a group, and several chunks of dS.
TEST(Stores, OfGroupedWideHeads) {
  const Sizes shapes[] = {{16, 768, 768, 6, 3, 256, 256}, {30, 128, 384, 32, 16, 256, 256}};
  for (const Sizes& s : shapes) {
    Random r(1);
    const Placed placed(backward(causal(dense(s))), r);
    Seen seen;
    plan::Tuning tuning;
    tuning.sm90.backward.ds_chunk_tiles = 512;
    EXPECT_EQ(wrong_store(placed.p, hopper(), tuning, &seen), "") << described(placed.p);
    EXPECT_GT(seen.stores, 100);
    EXPECT_EQ(seen.chunked, 1);
  }
}

// A region that is too short is found.
TEST(Stores, AreFoundOutside) {
  Random r(1);
  const Placed placed(backward(causal(dense({16, 768, 768, 6, 3, 256, 256}))), r);
  plan::Plan plan = plan::make_plan(placed.p, hopper());
  plan::Arguments arguments;
  plan.pass->bind(placed.p, plan, kWorkspace, &arguments);
  for (plan::Region& region : plan.regions) {
    const size_t bytes = region.bytes;
    if (bytes == 0) continue;
    region.bytes = bytes / 2;
    StoreRanges ranges(plan, kWorkspace);
    walk_backward(placed.p, plan, arguments, &ranges);
    region.bytes = bytes;
    EXPECT_FALSE(ranges.ok()) << region.name;
  }
}

}  // namespace
}  // namespace tandem::test
