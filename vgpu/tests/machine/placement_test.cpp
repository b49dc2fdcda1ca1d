// The placement decides when each block begins and which blocks run concurrently.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "vgpu/tests/machine/support.h"

namespace tandem::vgpu {
namespace {

constexpr uint32_t kBlocks = 24;

// p0[block] is the value of the counter p1 when the block began.
std::vector<uint32_t> tickets(const RunOptions& options) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<4>; .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [p0];
    ld.param.u64 %rd1, [p1];
    mov.u32 %r0, %ctaid.x;
    atom.global.add.u32 %r1, [%rd1], 1;
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd3, %rd0, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;)",
                            2));
  EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
  std::vector<uint32_t> of(kBlocks, ~0u);
  uint32_t counter = 0;
  const Status status = k.run({address(of.data()), address(&counter)}, {kBlocks, 1, 1}, {1, 1, 1}, options);
  EXPECT_TRUE(status.ok()) << status.message;
  return of;
}

TEST(VgpuPlacement, BlocksBeginInOrderOrInAnyOther) {
  std::vector<uint32_t> in_order(kBlocks);
  std::iota(in_order.begin(), in_order.end(), 0);
  RunOptions options;
  options.threads = 1;
  EXPECT_EQ(tickets(options), in_order);
  std::set<std::vector<uint32_t>> different;
  for (options.placement = 1; options.placement <= 8; ++options.placement) {
    const std::vector<uint32_t> of = tickets(options);
    EXPECT_TRUE(std::is_permutation(of.begin(), of.end(), in_order.begin())) << "placement " << options.placement;
    EXPECT_EQ(of, tickets(options)) << "placement " << options.placement << ", again";
    different.insert(of);
  }
  EXPECT_EQ(different.size(), 8u);
  options.threads = 0;
  const std::vector<uint32_t> of = tickets(options);
  EXPECT_TRUE(std::is_permutation(of.begin(), of.end(), in_order.begin()));
}

}  // namespace
}  // namespace tandem::vgpu
