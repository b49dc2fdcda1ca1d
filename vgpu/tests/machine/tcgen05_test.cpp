// Tests of tensor memory: allocation, loads and stores, products of one block and of a pair, commits, and findings.
#include <bit>
#include <random>

#include "vgpu/tests/machine/support.h"

namespace tandem::vgpu {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

std::string blackwell_kernel(const std::string& body, int parameters) {
  return kernel(body, parameters, "", "", "sm_100a");
}

// Allocates columns into %r10 by warp 0; all threads know the address afterwards.
const char* const kAllocate = R"(
    .reg .b32 %r<60>; .reg .b64 %rd<20>; .reg .pred %p<10>;
    .shared .align 4 .b32 given;
    mov.u32 %r3, %tid.x; mov.u32 %r4, given; shr.u32 %r5, %r3, 5;
    setp.eq.u32 %p1, %r5, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 64;
    bar.sync 0;
    ld.shared.u32 %r10, [given];
    shl.b32 %r6, %r5, 21; add.u32 %r11, %r10, %r6;
)";
const char* const kFree = "\nbar.sync 0;\n@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;\nret;";

// A value is stored to tensor memory in one shape and loaded again.
TEST(Tcgen05, StoresAndLoads) {
  const TestKernel k(blackwell_kernel(std::string("ld.param.u64 %rd1, [p0];\n").insert(0, kAllocate) + R"(
    mul.lo.u32 %r20, %r3, 10; add.u32 %r21, %r20, 1;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r11], {%r20, %r21};
    mov.u32 %r20, 0;
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r22}, [%r11+1];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r22;
)" + kFree,
                                      1),
                     blackwell());
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(128, 0);
    Findings findings;
    const Status s = k.run({address(out.data())}, {1}, {128}, options, &findings);
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_TRUE(findings.all.empty()) << findings.all[0].message;
    for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(out[i], 10 * i + 1);
  });
}

// The result is valid even without a wait, because the compiler inserts one. By the letter this is a finding.
TEST(Tcgen05, AMissingWaitIsFoundByTheLetter) {
  const TestKernel k(blackwell_kernel(std::string(kAllocate) + R"(
    ld.param.u64 %rd1, [p0];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {%r3};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r22}, [%r11];
    add.u32 %r22, %r22, 5;
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r22;
)" + kFree,
                                      1),
                     blackwell());
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    std::vector<uint32_t> out(128, 0);
    Findings findings;
    const Status s = k.run({address(out.data())}, {1}, {128}, options, &findings);
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_TRUE(findings.has(Rule::pending_load));
    for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(out[i], i + 5);
    ASSERT_TRUE(k.run({address(out.data())}, {1}, {128}, options).ok()) << "it ends nothing";
  });
}

// Hardware ignores the bits of an address that select a warp's lanes.
TEST(Tcgen05, AWarpHasItsOwnLanes) {
  const TestKernel k(blackwell_kernel(std::string(kAllocate) + R"(
    ld.param.u64 %rd1, [p0];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%r3};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r22}, [%r11];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r22;
)" + kFree,
                                      1),
                     blackwell());
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    std::vector<uint32_t> out(128, 0);
    Findings findings;
    const Status s = k.run({address(out.data())}, {1}, {128}, options, &findings);
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_TRUE(findings.has(Rule::tmem_quadrant));
    for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(out[i], i);
    EXPECT_TRUE(k.run({address(out.data())}, {1}, {128}, options).ok());
  });
}

TEST(Tcgen05, MisuseIsFound) {
  const auto rule_of = [](const std::string& body, const std::string& end = kFree) {
    const TestKernel k(blackwell_kernel(kAllocate + body + end, 0), blackwell());
    EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
    Findings findings;
    (void)k.run({}, {1}, {128}, {{}, 1, 0}, &findings);
    return findings.all.empty() ? Rule::count : findings.all[0].rule;
  };
  const std::string wait = "tcgen05.wait::ld.sync.aligned;";
  EXPECT_EQ(rule_of("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r22}, [%r11];" + wait), Rule::count);
  EXPECT_EQ(rule_of("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r22}, [%r11+64];" + wait), Rule::tmem_unallocated);
  EXPECT_EQ(rule_of("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r22}, [%r10];" + wait), Rule::tmem_quadrant)
      << "lanes of warp 0";
  EXPECT_EQ(rule_of("", "ret;"), Rule::tmem_leak);
  EXPECT_EQ(rule_of("add.u32 %r30, %r10, 32; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 64;"),
            Rule::tmem_unallocated);
  EXPECT_EQ(rule_of("@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 48;"), Rule::invalid_shape);
  EXPECT_EQ(rule_of("@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 512;"), Rule::deadlock);
}

// A (rows x 16) and B (n x 16), bf16, K-major without swizzle. Blocks have 8 x 16 bytes, with a distance of rows * 16
// bytes in k.
std::vector<uint16_t> image_of(const std::vector<float>& x, int rows) {
  std::vector<uint16_t> image(x.size());
  for (int m = 0; m < rows; ++m)
    for (int k = 0; k < 16; ++k)
      image[wide(m / 8 * 64 + m % 8 * 8 + k / 8 * rows * 8 + k % 8)] =
          static_cast<uint16_t>(std::bit_cast<uint32_t>(x[wide(m * 16 + k)]) >> 16);
  return image;
}
std::vector<float> small_numbers(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> small(-4, 4);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = static_cast<float>(small(random));
  return x;
}

// group: the number of blocks that compute the product together, each with 128 rows of A and 64 / group columns of B.
std::string product_kernel(int group) {
  const std::string g = ".cta_group::" + std::to_string(group);
  const int b_rows = 64 / group;
  const uint64_t fixed = uint64_t{1} << 46 | uint64_t{8} << 32;  // stride 128 bytes between groups of 8 rows
  const uint64_t a_bits = fixed | uint64_t{128} << 16, b_bits = fixed | uint64_t(b_rows) << 16;
  const uint32_t instruction =
      1u << 4 | 1u << 7 | 1u << 10 | (64u / 8) << 17 | (128u * static_cast<unsigned>(group) / 16) << 24;
  const std::string bytes_b = std::to_string(b_rows * 32);
  return R"(
    .reg .b32 %r<100>; .reg .b64 %rd<20>; .reg .pred %p<10>; .reg .b16 %rs<3>;
    .shared .align 128 .b8 a[4096]; .shared .align 128 .b8 b[2048];
    .shared .align 8 .b64 loaded; .shared .align 8 .b64 made; .shared .align 4 .b32 given;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];
    mov.u32 %r1, loaded; mov.u32 %r2, made; mov.u32 %r3, %tid.x; mov.u32 %r4, given; shr.u32 %r5, %r3, 5;
    mov.u32 %r6, %cluster_ctarank; mov.u32 %r7, a; mov.u32 %r8, b;
    setp.eq.u32 %p1, %r5, 0; setp.ne.u32 %p2, %r3, 0; setp.ne.u32 %p3, %r6, 0;
    @%p1 tcgen05.alloc)" +
         g + R"(.sync.aligned.shared::cta.b32 [%r4], 64;
    @%p1 tcgen05.relinquish_alloc_permit)" +
         g + R"(.sync.aligned;
    @%p2 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1; mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], )" +
         std::to_string(4096 + b_rows * 32) + R"(;
    mul.wide.u32 %rd4, %r6, 4096; add.s64 %rd5, %rd1, %rd4; mul.wide.u32 %rd6, %r6, )" +
         bytes_b + R"(; add.s64 %rd7, %rd2, %rd6;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd5], 4096, [%r1];
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd7], )" +
         bytes_b + R"(, [%r1];
  READY:
    bar.sync 0;
    ld.shared.u32 %r10, [given];
  L: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r1], 0;
    @!%p9 bra L;
    barrier.cluster.arrive; barrier.cluster.wait;
    or.pred %p4, %p2, %p3;
    @%p4 bra MADE;
    and.b32 %r11, %r7, 262143; shr.u32 %r11, %r11, 4; cvt.u64.u32 %rd8, %r11; or.b64 %rd8, %rd8, )" +
         std::to_string(a_bits) + R"(;
    and.b32 %r12, %r8, 262143; shr.u32 %r12, %r12, 4; cvt.u64.u32 %rd9, %r12; or.b64 %rd9, %rd9, )" +
         std::to_string(b_bits) + R"(;
    setp.ne.u32 %p5, 0, 0; setp.eq.u32 %p6, 0, 0;
    tcgen05.mma)" +
         g + ".kind::f16 [%r10], %rd8, %rd9, " + std::to_string(instruction) + R"(, %p5;
    tcgen05.mma)" +
         g + ".kind::f16 [%r10], %rd8, %rd9, " + std::to_string(instruction) + ", %p6;\n" +
         (group == 2 ? "mov.u16 %rs1, "
                       "3;\ntcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
                       "[%r2], %rs1;"
                     : "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];") +
         R"(
  MADE:
  M: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r2], 0;
    @!%p9 bra M;
    tcgen05.fence::after_thread_sync;
    shl.b32 %r13, %r5, 21; add.u32 %r14, %r10, %r13;
    mad.lo.u32 %r15, %r6, 128, %r3; mul.wide.u32 %rd10, %r15, 256; add.s64 %rd11, %rd3, %rd10;
    mov.u32 %r16, 0;
  COLUMNS:
    add.u32 %r17, %r14, %r16;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r18}, [%r17];
    tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%rd11], %r18;
    add.s64 %rd11, %rd11, 4;
    add.u32 %r16, %r16, 1;
    setp.lt.u32 %p7, %r16, 64;
    @%p7 bra COLUMNS;
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 tcgen05.dealloc)" +
         g + R"(.sync.aligned.b32 %r10, 64;
    barrier.cluster.arrive; barrier.cluster.wait;
    ret;)";
}

void check_product(int group) {
  const TestKernel k(blackwell_kernel(product_kernel(group), 3), blackwell());
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  const int rows = 128 * group;
  const std::vector<float> a = small_numbers(rows * 16, 3), b = small_numbers(64 * 16, 4);
  auto* images = static_cast<uint16_t*>(std::aligned_alloc(64, 16384));
  uint16_t* const b_image = images + 4096;
  for (int block = 0; block < group; ++block) {
    const auto part = image_of({a.begin() + block * 2048, a.begin() + (block + 1) * 2048}, 128);
    std::copy(part.begin(), part.end(), images + block * 2048);
    const int columns = 64 / group;
    const auto b_part = image_of({b.begin() + block * columns * 16, b.begin() + (block + 1) * columns * 16}, columns);
    std::copy(b_part.begin(), b_part.end(), b_image + block * columns * 16);
  }
  under_schedules(8, [&](RunOptions options) {
    std::vector<float> out(static_cast<size_t>(rows) * 64, -1);
    Findings findings;
    const Status s = k.run({address(images), address(b_image), address(out.data())}, {static_cast<uint32_t>(group)},
                           {128}, options, &findings, 0, {static_cast<uint32_t>(group)});
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_TRUE(findings.all.empty()) << findings.all[0].message;
    for (int m = 0; m < rows; ++m)
      for (int n = 0; n < 64; ++n) {
        float sum = 0;
        for (int x = 0; x < 16; ++x) sum += a[wide(m * 16 + x)] * b[wide(n * 16 + x)];
        ASSERT_EQ(out[static_cast<size_t>(m * 64 + n)], 2 * sum) << m << ", " << n;
      }
  });
  std::free(images);
}

TEST(Tcgen05, ProductsOfOneBlock) { check_product(1); }
TEST(Tcgen05, ProductsOfAPair) { check_product(2); }

// Three blocks do the work of eight: they take over blocks that have not begun.
TEST(ClusterLaunch, TakesOverWhatHasNotBegun) {
  const TestKernel k(blackwell_kernel(R"(
    .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<10>; .reg .b128 %q<3>;
    .shared .align 16 .b8 answer[16];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, bar; mov.u32 %r2, answer; mov.u32 %r3, %ctaid.x; mov.u32 %r4, 0;
    mbarrier.init.shared::cta.b64 [%r1], 1;
  WORK:
    mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2;
    atom.global.add.u32 %r5, [%rd3], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2], [%r1];
  W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r4;
    @!%p1 bra W;
    xor.b32 %r4, %r4, 1;
    ld.shared.b128 %q1, [%r2];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
    @!%p2 bra END;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r3, %r6, %r7, %r8}, %q1;
    bra WORK;
  END:
    ret;)",
                                      1),
                     blackwell());
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(6, [&](RunOptions options) {
    std::vector<uint32_t> out(8, 0);
    const Status s = k.run({address(out.data())}, {8}, {1}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (const uint32_t times : out) EXPECT_EQ(times, 1u);
  });
}

// Reads the words of the response as kernels do. x is a word, y and z are halves of the next word. Bit 0 of the third
// word is the flag.
TEST(ClusterLaunch, TheWordsOfItsAnswer) {
  const TestKernel k(blackwell_kernel(R"(
    .reg .b32 %r<12>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    .shared .align 16 .b8 answer[16];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, answer; mov.u32 %r2, bar; mov.u32 %r3, 0;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
  NEXT:
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
  WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], %r3;
    @!%p1 bra WAIT;
    xor.b32 %r3, %r3, 1;
    ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r1];
    and.b32 %r8, %r6, 1;
    setp.eq.u32 %p2, %r8, 0;
    @%p2 bra DONE;
    st.global.v4.u32 [%rd1], {%r4, %r5, %r6, %r7};
    add.s64 %rd1, %rd1, 16;
    bra NEXT;
  DONE:
    ret;)",
                                      1),
                     blackwell());
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  std::vector<uint32_t> out(4 * 11, 99);
  const Status s = k.run({address(out.data())}, {3, 2, 2}, {1}, {{}, 1, 0});
  ASSERT_TRUE(s.ok()) << s.message;
  for (uint32_t n = 1; n < 12; ++n) {
    const uint32_t* const words = out.data() + wide(4 * (static_cast<int>(n) - 1));
    EXPECT_EQ(words[0], n % 3) << n;
    EXPECT_EQ(words[1], n / 3 % 2 | n / 6 << 16) << n;
    EXPECT_EQ(words[2] & 1, 1u) << n;
  }
}

}  // namespace
}  // namespace tandem::vgpu
