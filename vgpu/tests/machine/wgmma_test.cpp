// Tests of wgmma: products under every schedule, registers that products hold, and findings.
#include <bit>
#include <random>

#include "vgpu/tests/machine/support.h"

namespace tandem::vgpu {
namespace {

// A (64 x 16) and B (16 x 16) as one image of shared memory: K-major without swizzle, and the product.
struct Operands {
  alignas(16) uint16_t image[64 * 16 + 16 * 16];
  float product[64][16];

  Operands() {
    std::mt19937 random(7);
    std::uniform_int_distribution<int> small(-4, 4);
    float a[64][16], b[16][16];
    for (int m = 0; m < 64; ++m)
      for (int k = 0; k < 16; ++k) {
        a[m][k] = static_cast<float>(small(random));
        image[m / 8 * 64 + m % 8 * 8 + k / 8 * 512 + k % 8] = bf16(a[m][k]);
      }
    for (int n = 0; n < 16; ++n)
      for (int k = 0; k < 16; ++k) {
        b[k][n] = static_cast<float>(small(random));
        image[1024 + n / 8 * 64 + n % 8 * 8 + k / 8 * 128 + k % 8] = bf16(b[k][n]);
      }
    for (int m = 0; m < 64; ++m)
      for (int n = 0; n < 16; ++n) {
        product[m][n] = 0;
        for (int k = 0; k < 16; ++k) product[m][n] += a[m][k] * b[k][n];
      }
  }
  static uint16_t bf16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
};

// %f0..7: D of this thread; %rd10, %rd11: descriptors. The image has been loaded.
const char* const kLoad = R"(
    .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<10>; .reg .f32 %f<40>;
    .shared .align 128 .b8 image[2560];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    mov.u32 %r1, bar; mov.u32 %r2, image; mov.u32 %r3, %tid.x;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 2560;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 2560, [%r1];
  READY:
    bar.sync 0;
  LOADED: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r1], 0;
    @!%p9 bra LOADED;
    and.b32 %r4, %r2, 262143; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd3, %r4;
    or.b64 %rd10, %rd3, )"
                          "34363932672;\n"  // leading offset 1024, stride 128: 64 << 16 | 8 << 32
                          R"(
    add.u32 %r5, %r2, 2048;
    and.b32 %r4, %r5, 262143; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd3, %r4;
    or.b64 %rd11, %rd3, )"
                          "34360786944;\n"  // leading offset 256: 16 << 16 | 8 << 32
    ;

std::string product(const std::string& d, int accumulate) {
  return "setp.ne.b32 %p2, " + std::to_string(accumulate) +
         ", 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" + d + "}, %rd10, %rd11, %p2, 1, 1, 0, 0;\n";
}
std::string names(int first) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += (i > 0 ? ", %f" : "%f") + std::to_string(first + i);
  return text;
}

const char* const kStore = R"(
    mul.wide.u32 %rd5, %r3, 32; add.s64 %rd6, %rd2, %rd5;
    st.global.v4.f32 [%rd6], {%f0, %f1, %f2, %f3};
    st.global.v4.f32 [%rd6+16], {%f4, %f5, %f6, %f7};
    ret;)";

std::string move(int to, int from) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += "mov.f32 %f" + std::to_string(to + i) + ", %f" + std::to_string(from + i) + ";\n";
  return text;
}

const char* const kFence = "wgmma.fence.sync.aligned;\n";
const char* const kCommit = "wgmma.commit_group.sync.aligned;\n";
const char* const kWaitAll = "wgmma.wait_group.sync.aligned 0;\n";

TestKernel kernel_of(const std::string& body) { return TestKernel(kernel(kLoad + body + kStore, 2)); }

void expect_product(const std::vector<float>& out, const Operands& operands, float times) {
  for (int t = 0; t < 128; ++t)
    for (int r = 0; r < 8; ++r) {
      const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (r / 2 % 2), column = 8 * (r / 4) + 2 * (t % 4) + r % 2;
      ASSERT_EQ(out[static_cast<size_t>(8 * t + r)], times * operands.product[row][column])
          << "thread " << t << ", register " << r;
    }
}

Rule rule_of(const std::string& body, int schedules = 4) {
  const Operands operands;
  const TestKernel k = kernel_of(body);
  EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
  Findings findings;
  for (int n = 0; n < schedules; ++n) {
    std::vector<float> out(1024);
    (void)k.run({address(operands.image), address(out.data())}, {1}, {128}, {Schedule::nth(n), 1, 0}, &findings);
  }
  return findings.all.empty() ? Rule::count : findings.all[0].rule;
}

// The body repeats the product this number of times, with and without an observer, without a finding.
void expect_times(float times, const std::string& body) {
  const Operands operands;
  const TestKernel k = kernel_of(body);
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  for (const bool watched : {false, true}) {
    under_schedules(10, [&](RunOptions options) {
      std::vector<float> out(1024, -1);
      Findings findings;
      const Status s =
          k.run({address(operands.image), address(out.data())}, {1}, {128}, options, watched ? &findings : nullptr);
      ASSERT_TRUE(s.ok()) << s.message;
      EXPECT_TRUE(findings.all.empty()) << findings.all[0].message;
      expect_product(out, operands, times);
    });
  }
}

TEST(Wgmma, SumsOfChainedProducts) {
  expect_times(3, kFence + product(names(0), 0) + product(names(0), 1) + product(names(0), 1) + kCommit + kWaitAll);
}

// Compilers insert copies between consecutive products. A copy is performed when the product completes.
TEST(Wgmma, CopiesOfPendingRegistersAreRenamings) {
  expect_times(
      2, kFence + product(names(10), 0) + move(20, 10) + product(names(20), 1) + kCommit + move(0, 20) + kWaitAll);
}

// A product may complete before a copy of its accumulators is performed.
TEST(Wgmma, CopiesAfterTheProduct) {
  expect_times(1, kFence + product(names(10), 0) + kCommit + "bar.sync 0;\n" + move(0, 10) + kWaitAll);
}

// The older of two groups is complete; the younger group may not be.
TEST(Wgmma, GroupsCompleteInOrder) {
  expect_times(1, kFence + product(names(0), 0) + kCommit + product(names(10), 0) + kCommit +
                      "wgmma.wait_group.sync.aligned 1;\n" + move(20, 0) + kWaitAll);
}

TEST(Wgmma, MisuseIsFound) {
  const std::string once = product(names(0), 0) + kCommit;
  EXPECT_EQ(rule_of(kFence + once + kWaitAll), Rule::count);
  EXPECT_EQ(rule_of(once + kWaitAll), Rule::missing_wgmma_fence);
  EXPECT_EQ(rule_of(kFence + once), Rule::pending_register) << "no wait before the stores";
  EXPECT_EQ(rule_of(kFence + once + "add.f32 %f0, %f0, %f0;" + kWaitAll), Rule::pending_register);
  EXPECT_EQ(rule_of(kFence + once + kCommit + product(names(10), 0) + kCommit +
                    "wgmma.wait_group.sync.aligned 1; add.f32 %f20, %f10, %f10;" + kWaitAll),
            Rule::pending_register);
  EXPECT_EQ(rule_of(kFence + once + kWaitAll + "add.f32 %f0, %f0, %f0;" + product(names(0), 1) + kCommit + kWaitAll),
            Rule::missing_wgmma_fence);
  EXPECT_EQ(rule_of(kFence + product(names(0), 0) + kWaitAll), Rule::pending_register) << "never committed";
  EXPECT_EQ(rule_of("or.b64 %rd10, %rd10, 1073741824;" + std::string("mov.b64 %rd10, 4611686018427404288;") + kFence +
                    once + kWaitAll),
            Rule::invalid_descriptor)
      << "beyond the window";
  std::string zeros;
  for (int n = 0; n < 8; ++n) zeros += "mov.f32 %f" + std::to_string(n) + ", 0f00000000;\n";
  EXPECT_EQ(rule_of(zeros + "setp.lt.u32 %p3, %r3, 32;\n@!%p3 bra X;\n" + kFence + once + "X:" + kWaitAll),
            Rule::deadlock)
      << "one warp of four";
  EXPECT_EQ(
      rule_of("setp.lt.u32 %p3, %r3, 16;\n@!%p3 bra X;\n" + std::string(kFence) + "X:" + kFence + once + kWaitAll),
      Rule::divergent_aligned);
}

}  // namespace
}  // namespace tandem::vgpu
