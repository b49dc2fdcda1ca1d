// Plans random problems of every size for each GPU, and checks that the plans are consistent. The test launches no
// kernel.
#include <algorithm>
#include <limits>
#include <variant>

#include "plan/plan.h"
#include "unit/plan/random_problem.h"

namespace tandem::test {
namespace {

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
