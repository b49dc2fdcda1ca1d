// Plans random problems of every size for each GPU, and checks that the plans are consistent. The test launches no
// kernel.
#include "support/random.h"

#include <algorithm>
#include <limits>
#include <variant>

#include "plan/plan.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

// Returns 0, 1, a number near the edges of tiles, or the maximum.
int64_t random_count(Random& r, int64_t most) {
  switch (r.between(0, 7)) {
    case 0: return r.between(0, 1);
    case 1: return most;
    case 2: return r.between(0, most);
    case 3: return std::min(most, int64_t{64} * r.between(0, 80) + r.between(0, 1));
    default: return std::min(most, int64_t{1} << r.between(0, 30)) + (r.chance(0.2) ? -1 : 0);
  }
}

int64_t random_dim(Random& r) {
  static constexpr int64_t kUsual[] = {64, 128, 192, 256};
  return r.chance(0.6) ? kUsual[r.between(0, 3)] : 8 * r.between(1, 32);
}

Problem random_problem(Random& r) {
  constexpr int64_t kLongest = int64_t{1} << 28;
  Sizes s;
  s.batch = random_count(r, r.chance(0.1) ? 1 << 20 : 64);
  s.heads_k = random_count(r, r.chance(0.1) ? 1 << 16 : 16);
  s.heads_q = s.heads_k * r.between(1, r.chance(0.5) ? 1 : 16);
  s.seqlen_q = random_count(r, r.chance(0.1) ? kLongest : 1 << 15);
  s.seqlen_k = r.chance(0.4) ? s.seqlen_q : random_count(r, r.chance(0.1) ? kLongest : 1 << 15);
  s.head_dim = random_dim(r);
  s.head_dim_v = r.chance(0.7) ? s.head_dim : random_dim(r);
  const bool is_packed = r.chance(0.2);
  Problem p = is_packed ? packed(s, std::min(s.batch * s.seqlen_q, random_count(r, kLongest)),
                                 std::min(s.batch * s.seqlen_k, random_count(r, kLongest)))
                        : dense(s);
  if (r.chance(0.7)) {
    p = backward(p);
    if (r.chance(0.1)) p.dq = {};
    if (r.chance(0.1)) p.dk = p.dv = {};
    if (r.chance(0.1)) p.dq.dtype = DType::f32;
    if (r.chance(0.1)) p.dout.dtype = DType::f32;
    if (r.chance(0.1)) p.dsink = {.dtype = DType::f32, .head = 1, .present = true};
    p.accumulate = r.chance(0.05);
  }
  if (r.chance(0.5)) p.window_right = r.chance(0.6) ? 0 : r.between(0, kLongest);
  if (r.chance(0.3)) p.window_left = r.between(0, r.chance(0.5) ? 2000 : kLongest);
  if (p.window_left != TANDEM_UNBOUNDED && p.window_right != TANDEM_UNBOUNDED && r.chance(0.3)) {
    const int64_t beyond = r.between(-kLongest, kLongest);  // the offset of the diagonal
    p.window_left += beyond, p.window_right -= beyond;
  }
  if (r.chance(0.2)) p.bottom_right = false;
  if (!p.bottom_right && r.chance(0.5)) p.diagonal_offset = r.between(-kFarDiagonal, kFarDiagonal);
  if (r.chance(0.1)) p.softcap = 30;
  if (r.chance(0.1)) p.alibi_slopes = {.dtype = DType::f32, .head = 1, .present = true};
  if (r.chance(0.1)) p.dropout.p = 0.5;
  if (r.chance(0.1)) p.seqused_k.present = true;
  if (r.chance(0.1)) p.bias = {.dtype = DType::bf16, .shape = {1, 1, 1, p.seqlen_k}, .present = true};
  if (p.bias && p.pass == TANDEM_BACKWARD && r.chance(0.5)) p.dbias = p.bias;
  p.batch_invariant = r.chance(0.1);
  if (r.chance(0.1)) p.sm_limit = static_cast<int32_t>(r.between(1, 200));
  return p;
}

// The engine's check before it plans.
bool writes_something(const Problem& p) {
  const bool queries = p.total_q > 0 && p.heads_q > 0, keys = p.total_k > 0 && p.heads_k > 0;
  if (p.pass == TANDEM_FORWARD) return queries;
  return (p.dq && queries) || ((p.dk || p.dv) && keys) || p.dbias || p.dsink;
}

void expect_sound(const plan::Plan& plan, const gpu::Properties& device) {
  size_t end = 0;
  for (const plan::Region& region : plan.regions) {
    ASSERT_GE(region.offset, end) << region.name;
    ASSERT_LT(region.bytes, size_t{1} << 62) << region.name;
    ASSERT_GE(region.first_writer, plan::kMemset) << region.name;
    if (region.bytes > 0) {
      ASSERT_LT(region.first_writer, static_cast<int>(plan.launches.size())) << region.name;
    }
    end = region.offset + region.bytes;
  }
  for (const plan::Fill& fill : plan.fills) end = std::max(end, fill.offset + fill.bytes);
  if (end > 0) {
    ASSERT_LE(end + plan::kWorkspaceAlignment - 1, plan.workspace_bytes);
  }
  for (const plan::PlannedLaunch& launch : plan.launches) {
    ASSERT_LT(launch.kernel, plan.kernels.size());
    ASSERT_GE(launch.grid, 1u);
    ASSERT_LE(launch.grid, static_cast<uint32_t>(std::numeric_limits<int32_t>::max()));
    ASSERT_GE(launch.block, 32u);
    ASSERT_LE(launch.block, 1024u);
    ASSERT_LE(launch.shared_bytes, static_cast<uint32_t>(device.max_dynamic_smem_bytes));
  }
  ASSERT_LE(plan.repeat.begin, plan.repeat.end);
  ASSERT_LE(plan.repeat.end, plan.launches.size());
  ASSERT_GE(plan.repeat.times, 1);
}

// A kernel that accumulates dk and dv in separate tiles needs memory for the sums, and a launch that converts them.
void expect_key_sums(const plan::Plan& plan) {
  const plan::BackwardSchedule& t = plan.backward;
  if (plan.pass != plan::pass_of(TANDEM_BACKWARD)) return;
  const auto* config = std::get_if<Sm90BackwardConfig>(&t.tile.kernel);
  ASSERT_EQ(config && config->m_split, t.m_splits > 1);
}

TEST(RandomPlans, HoldTogether) {
  constexpr uint64_t kProblems = 100000;
  uint64_t planned = 0;
  for (uint64_t seed = 1; seed <= kProblems; ++seed) {
    Random r(seed);
    const Problem p = random_problem(r);
    for (const gpu::Properties& device : {hopper(), blackwell()}) {
      if (!plan::check(p, device).ok() || !writes_something(p)) continue;
      SCOPED_TRACE(testing::Message() << device.name << ", seed " << seed << ": batch " << p.batch << ", heads "
                                      << p.heads_q << " on " << p.heads_k << ", lengths " << p.seqlen_q << " and "
                                      << p.seqlen_k << ", head_dim " << p.head_dim << " and " << p.head_dim_v);
      const plan::Plan plan = plan::make_plan(p, device);
      expect_sound(plan, device);
      expect_key_sums(plan);
      if (testing::Test::HasFatalFailure()) return;
      ++planned;
    }
  }
  EXPECT_GT(planned, kProblems);  // most problems on both devices
}

}  // namespace
}  // namespace tandem::test
