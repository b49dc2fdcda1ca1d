// The forward plan's treatment of a bias.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "plan/forward.h"
#include "plan/sm90/tuning.h"
#include "plan/tuning.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

plan::ForwardSchedule biased_plan(const Problem& p) { return plan::make_plan(p, hopper()).forward; }

// Heads that share a bias run together, up to the capacity of the L2 cache. If dividing the bias by the scale would
// overflow, scores are scaled before the exponential.
TEST(ForwardPlan, HeadsThatShareABias) {
  Problem p = dense({.batch = 4, .seqlen_q = 4096, .seqlen_k = 4096, .heads_q = 16, .heads_k = 16});
  p.bias.present = true;
  p.bias.dtype = DType::f32;
  const auto group_of = [&](int64_t batch, int64_t head) {
    p.bias.stride[0] = batch;
    p.bias.stride[1] = head;
    return biased_plan(p).l2_heads;
  };
  EXPECT_EQ(group_of(1 << 28, 1 << 24), 1);
  for (const auto& [batch, head] : {std::pair<int64_t, int64_t>{0, 1 << 24}, {1 << 24, 0}, {0, 0}}) {
    EXPECT_GT(group_of(batch, head), 1);
    EXPECT_LE(group_of(batch, head), std::max(plan::kTuning.sm90.forward_order.l2_bias_heads, 1.0));
  }
  EXPECT_LE(group_of(0, 1 << 24), 4);  // the batch
  for (const auto& [scale, scale_outside_exp2] : {std::pair{0.1, false}, {1e-9, true}, {1e9, true}, {-0.1, true}}) {
    p.softmax_scale = scale;
    EXPECT_EQ(biased_plan(p).tile.for_hopper().options.scale_outside_exp2, scale_outside_exp2) << scale;
  }
}

// TMA copies a bias if its strides and address allow. Consecutive tiles that share a bias run in a cluster, which
// copies it once. All clusters then have the same number of tiles.
TEST(ForwardPlan, HowABiasIsCopied) {
  const auto biased = [](const Sizes& sizes) {
    Problem p = dense(sizes);
    p.bias.present = true;
    p.bias.dtype = DType::f32;
    const int64_t shape[4] = {1, p.heads_q, p.seqlen_q, p.seqlen_k},
                  stride[4] = {0, p.seqlen_q * p.seqlen_k, p.seqlen_k, 1};
    std::ranges::copy(shape, p.bias.shape);
    std::ranges::copy(stride, p.bias.stride);
    return p;
  };
  const auto ctas_of = [](const Problem& p) { return biased_plan(p).tile.bias_ctas(); };
  constexpr int kShared = plan::kBiasCtas, kAlone = std::min(kShared, 1);
  const Problem p = biased({.batch = 4, .seqlen_q = 300, .seqlen_k = 304, .heads_q = 3, .heads_k = 3});
  EXPECT_EQ(ctas_of(p), kShared);
  EXPECT_EQ(biased_plan(p).tile.ctas(), std::max(kShared, 1));
  EXPECT_EQ(biased_plan(p).l2_heads % std::max(kShared, 1), 0);
  EXPECT_EQ(biased_plan(p).grid, biased_plan(p).tiles);
  Problem limited = p;
  limited.sm_limit = 7;
  EXPECT_EQ(biased_plan(limited).grid, 7 - 7 % std::max(kShared, 1));

  // Clusters are excluded by a single head, an odd number of heads that share the bias, or unequal tiles.
  EXPECT_EQ(ctas_of(biased({.batch = 3, .seqlen_q = 300, .seqlen_k = 304, .heads_q = 3, .heads_k = 3})), kAlone);
  EXPECT_EQ(ctas_of(causal(p)), kAlone);
  Problem of_each = p, of_heads = biased({.batch = 3, .seqlen_q = 300, .seqlen_k = 304, .heads_q = 4, .heads_k = 4});
  of_each.bias.stride[0] = of_each.bias.stride[1] * 3;
  EXPECT_EQ(ctas_of(of_each), kAlone);
  EXPECT_EQ(biased_plan(of_each).tile.ctas(), 1);  // an odd number of tiles
  of_each.seqlen_q = of_each.bias.shape[2] = 450;
  EXPECT_EQ(biased_plan(of_each).tile.ctas(), kAlone > 0 ? plan::kBiasKvCtas : 1);
  EXPECT_EQ(biased_plan(of_each).l2_heads, 1);
  EXPECT_EQ(biased_plan(causal(of_each)).tile.ctas(), 1);
  of_heads.bias.stride[0] = of_heads.bias.stride[1];
  of_heads.bias.stride[1] = 0;
  EXPECT_EQ(ctas_of(of_heads), kShared);

  // cp.async copies other strides and addresses, broadcast rows or columns, lengths, and rows of several heads.
  const auto expect_none = [&](const auto& change) {
    Problem other = p;
    change(other);
    EXPECT_EQ(ctas_of(other), 0);
    EXPECT_EQ(biased_plan(other).tile.ctas(), 1);
  };
  expect_none([](Problem& o) { o.bias.stride[1] += 2; });
  expect_none([](Problem& o) { o.bias.stride[2] += 1; });
  expect_none([](Problem& o) { o.bias.stride[3] = 2; });
  expect_none([](Problem& o) { o.bias.stride[2] = 0; });
  expect_none([](Problem& o) { o.bias.stride[3] = 0; });
  expect_none([](Problem& o) { o.bias.stride[1] = -o.bias.stride[1]; });
  expect_none([](Problem& o) { o.bias.stride[1] = int64_t{1} << 38; });  // 2^40 bytes
  expect_none([](Problem& o) { o.bias.data = reinterpret_cast<std::byte*>(uintptr_t{8}); });
  expect_none([](Problem& o) { o.bias.dtype = DType::boolean; });
  expect_none([](Problem& o) { o.seqused_k.present = true; });
  expect_none([](Problem& o) { o.seqlen_k = o.bias.shape[3] = 0; });
  Problem packs = biased({.batch = 4, .seqlen_q = 10, .seqlen_k = 304, .heads_q = 8, .heads_k = 2});
  EXPECT_EQ(biased_plan(packs).pack_gqa, 4);
  EXPECT_EQ(ctas_of(packs), 0);
  Problem same = p;
  same.bias.dtype = DType::bf16;
  EXPECT_EQ(ctas_of(same), kShared);
  same.bias.stride[2] = 308;  // 8 bytes beyond a multiple of 16
  EXPECT_EQ(ctas_of(same), 0);
}

}  // namespace
}  // namespace tandem::test
