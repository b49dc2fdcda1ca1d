// The switches of TANDEM_SM100 reach every plan of a Blackwell GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "plan/plan.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

plan::Tuning tuning_of(const std::string& switches) {
  Env env;
  env.sm100 = switches;
  EXPECT_TRUE(check(env).ok()) << switches;
  return plan::tuning_of(env);
}

Sm100ForwardConfig forward_of(const Problem& p, const std::string& switches, int minor = 0) {
  gpu::Properties device = blackwell();
  device.compute_minor = minor;
  return plan::make_plan(p, device, tuning_of(switches)).forward.tile.for_blackwell();
}
Sm100BackwardConfig backward_of(const Problem& p, const std::string& switches) {
  return plan::make_plan(backward(p), blackwell(), tuning_of(switches)).backward.tile.for_blackwell();
}
Problem of_head_dim(int64_t head_dim, int64_t seqlen = 4096) {
  Sizes sizes{.seqlen_q = seqlen, .seqlen_k = seqlen};
  sizes.batch = 2;
  sizes.heads_q = sizes.heads_k = 16;
  sizes.head_dim = sizes.head_dim_v = head_dim;
  return dense(sizes);
}

TEST(Sm100Switches, TwoCtas) {
  const Problem p = of_head_dim(128);
  EXPECT_TRUE(forward_of(p, "").two_cta && backward_of(p, "").two_cta);
  EXPECT_FALSE(forward_of(p, "no_two_cta").two_cta || backward_of(p, "exact_n,no_two_cta").two_cta);
  EXPECT_TRUE(forward_of(of_head_dim(256), "no_two_cta").two_cta);  // no other kernel
  const Problem wide_keys = dense({.seqlen_q = 4096, .seqlen_k = 4096, .head_dim = 192});
  EXPECT_TRUE(backward_of(wide_keys, "").two_cta_ring());
  EXPECT_TRUE(backward_of(wide_keys, "no_two_cta").two_pass());
}

TEST(Sm100Switches, ClusterLaunchControl) {
  const Problem p = causal(of_head_dim(256));
  EXPECT_TRUE(forward_of(p, "").clc);
  EXPECT_FALSE(forward_of(p, "no_clc").clc);
  EXPECT_FALSE(forward_of(p, "", 3).clc);
  EXPECT_TRUE(forward_of(p, "clc", 3).clc);
}

TEST(Sm100Switches, WidthsOfProducts) {
  for (const int64_t head_dim : {80, 96, 112}) {
    const Sm100ForwardConfig forward = forward_of(of_head_dim(head_dim), "no_two_cta");
    EXPECT_EQ(forward.o_columns(), 128);
    EXPECT_EQ(forward_of(of_head_dim(head_dim), "").columns_v(), 64);
    EXPECT_EQ(forward_of(of_head_dim(head_dim), "no_two_cta,exact_n").o_columns(), head_dim);
    const Sm100BackwardConfig gradients = backward_of(of_head_dim(head_dim), "no_two_cta");
    EXPECT_EQ(gradients.dk_columns(), 128);
    EXPECT_EQ(gradients.dv_columns(), 128);
    EXPECT_FALSE(gradients.dq_has_place());
    EXPECT_EQ(backward_of(of_head_dim(head_dim), "no_two_cta,exact_n").dk_columns(), head_dim);
  }
  EXPECT_EQ(forward_of(of_head_dim(192), "").o_columns(), 256);
  EXPECT_EQ(forward_of(of_head_dim(192), "exact_n").o_columns(), 192);
}

TEST(Sm100Switches, WaitsAndOverlap) {
  const Problem p = of_head_dim(128);
  EXPECT_TRUE(forward_of(p, "wait_products").wait_products && backward_of(p, "wait_products").wait_products);
  EXPECT_FALSE(forward_of(p, "").wait_products || backward_of(p, "").wait_products);
  const auto overlaps = [&](const std::string& switches) {
    const auto launches = plan::make_plan(backward(p), blackwell(), tuning_of(switches)).launches;
    return std::any_of(launches.begin(), launches.end(), [](const auto& launch) { return launch.overlap_previous; });
  };
  EXPECT_TRUE(overlaps(""));
  EXPECT_FALSE(overlaps("no_overlap"));
}

}  // namespace
}  // namespace tandem::test
