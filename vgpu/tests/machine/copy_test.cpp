// Tests of asynchronous copies: data moves when the schedule decides, waits see it, and misuse is reported.
#include <numeric>

#include "vgpu/src/units/tensor_map.h"
#include "vgpu/tests/machine/support.h"

namespace tandem::vgpu {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

// A tensor map in global memory, with the alignment of a kernel parameter.
struct alignas(64) Map {
  gpu::TensorMap map;
};

Map map_of(void* data, std::vector<uint64_t> dims, std::vector<uint32_t> box, gpu::TensorType type, int bytes,
           gpu::Swizzle swizzle) {
  gpu::TensorMapSpec spec;
  spec.address = data;
  spec.type = type;
  spec.rank = static_cast<int32_t>(dims.size());
  uint64_t stride = static_cast<uint64_t>(bytes);
  for (size_t i = 0; i < dims.size(); ++i) {
    spec.dims[i] = dims[i];
    spec.byte_strides[i] = stride;
    stride *= dims[i];
    spec.box[i] = box[i];
  }
  spec.swizzle = swizzle;
  Map map;
  const Status status = units::encode(spec, &map.map);
  EXPECT_TRUE(status.ok()) << status.message;
  return map;
}

// Waits for parity 0 of the mbarrier in %r1, in every thread.
const char* const kWait = "W: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r1], 0; @!%p9 bra W;\n";

// Loads a box of 16 x 8 floats at (x, y), partly outside, with a 64-byte swizzle, and copies it out of shared memory.
TEST(TensorCopy, LoadsABoxSwizzled) {
  const TestKernel k(kernel(std::string(R"(
    .reg .b32 %r<12>; .reg .b64 %rd<8>; .reg .pred %p<10>;
    .shared .align 1024 .b8 box[512];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd5, [p2];
    cvt.u32.u64 %r8, %rd5; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r9, %rd5;
    mov.u32 %r1, bar; mov.u32 %r2, box; mov.u32 %r3, %tid.x;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r8, %r9}], [%r1];
  READY:
    bar.sync 0;
)") + kWait + R"(
    shl.b32 %r4, %r3, 2;
    add.u32 %r5, %r2, %r4;
    ld.shared.u32 %r6, [%r5];
    mul.wide.u32 %rd3, %r3, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r6;
    ret;)",
                            3));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  std::vector<float> tensor(20 * 12);
  std::iota(tensor.begin(), tensor.end(), 1.0f);
  const Map map = map_of(tensor.data(), {20, 12}, {16, 8}, gpu::TensorType::f32, 4, gpu::Swizzle::b64);
  under_schedules(8, [&](RunOptions options) {
    std::vector<float> out(128, -1);
    const int x = 8, y = -2;
    const uint64_t at = static_cast<uint32_t>(x) | static_cast<uint64_t>(static_cast<uint32_t>(y)) << 32;
    const Status s = k.run({address(&map), address(out.data()), at}, {1}, {128}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (int row = 0; row < 8; ++row)
      for (int column = 0; column < 16; ++column) {
        const bool inside = x + column < 20 && y + row >= 0;
        const float expected = inside ? tensor[wide((y + row) * 20 + x + column)] : 0;
        const int bytes = row * 64 + column * 4, swizzled = bytes ^ (bytes >> 3 & 0x30);
        EXPECT_EQ(out[static_cast<size_t>(swizzled / 4)], expected) << row << ", " << column;
      }
  });
}

// Each block of a cluster loads a half for both blocks: all halves and bytes arrive in each block.
TEST(TensorCopy, Multicasts) {
  const TestKernel k(kernel(std::string(R"(
    .reg .b32 %r<14>; .reg .b64 %rd<8>; .reg .pred %p<10>; .reg .b16 %rs<2>;
    .shared .align 128 .b8 box[256];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    mov.u32 %r1, bar; mov.u32 %r2, box; mov.u32 %r3, %tid.x; mov.u32 %r10, %cluster_ctarank;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
  READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 bra LOADED;
    shl.b32 %r4, %r10, 7; add.u32 %r5, %r2, %r4; shl.b32 %r6, %r10, 5;
    mov.u16 %rs1, 3;
    cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r5], [%rd1, {%r6}], [%r1], %rs1;
  LOADED:
)") + kWait + R"(
    shl.b32 %r4, %r3, 2; add.u32 %r5, %r2, %r4; ld.shared.u32 %r6, [%r5];
    mad.lo.u32 %r7, %r10, 64, %r3;
    mul.wide.u32 %rd3, %r7, 4; add.s64 %rd4, %rd2, %rd3; st.global.u32 [%rd4], %r6;
    barrier.cluster.arrive; barrier.cluster.wait;
    ret;)",
                            2));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  std::vector<uint32_t> tensor(64);
  std::iota(tensor.begin(), tensor.end(), 100u);
  const Map map = map_of(tensor.data(), {64}, {32}, gpu::TensorType::u32, 4, gpu::Swizzle::none);
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(128, 0);
    const Status s = k.run({address(&map), address(out.data())}, {2}, {64}, options, nullptr, 0, {2});
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(out[i], 100 + i % 64) << i;
  });
}

// Stores once and adds twice; the second store waits until the first has read its source.
TEST(TensorCopy, StoresAndReduces) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<14>; .reg .b64 %rd<8>; .reg .pred %p<10>;
    .shared .align 128 .b8 box[128];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r2, box; mov.u32 %r3, %tid.x;
    shl.b32 %r4, %r3, 2; add.u32 %r5, %r2, %r4; st.shared.u32 [%r5], %r3;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r3, 0;
    mov.u32 %r6, 0;
    @%p1 bra WAITED;
    cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r6}], [%r2];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%rd1, {%r6}], [%r2];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
  WAITED:
    bar.sync 0;
    mov.u32 %r7, 1000; st.shared.u32 [%r5], %r7;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra END;
    cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%rd1, {%r6}], [%r2];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
  END:
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> tensor(32, 7);
    const Map map = map_of(tensor.data(), {32}, {32}, gpu::TensorType::u32, 4, gpu::Swizzle::none);
    const Status s = k.run({address(&map)}, {1}, {32}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(tensor[i], 2 * i + 1000);
  });
}

// A block sends a row to its neighbour, which sends it to global memory.
TEST(BulkCopy, ThroughTheNeighboursSharedMemory) {
  const TestKernel k(kernel(std::string(R"(
    .reg .b32 %r<14>; .reg .b64 %rd<8>; .reg .pred %p<10>;
    .shared .align 128 .b8 mine[128];
    .shared .align 128 .b8 given[128];
    .shared .align 8 .b64 bar;
    .shared .align 8 .b64 loaded;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    mov.u32 %r1, bar; mov.u32 %r2, loaded; mov.u32 %r3, %tid.x; mov.u32 %r4, mine; mov.u32 %r5, given;
    mov.u32 %r6, %cluster_ctarank; xor.b32 %r7, %r6, 1;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1; mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 128; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
  READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 bra SENT;
    mul.wide.u32 %rd3, %r6, 128; add.s64 %rd4, %rd1, %rd3;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd4], 128, [%r2];
  V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra V;
    mapa.shared::cluster.u32 %r8, %r5, %r7; mapa.shared::cluster.u32 %r9, %r1, %r7;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r8], [%r4], 128, [%r9];
  SENT:
)") + kWait + R"(
    @%p1 bra END;
    add.s64 %rd5, %rd2, %rd3;
    cp.async.bulk.global.shared::cta.bulk_group [%rd5], [%r5], 128;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd2], [%r5], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
  END:
    barrier.cluster.arrive; barrier.cluster.wait;
    ret;)",
                            2));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  alignas(16) uint32_t in[64], out[64];
  for (uint32_t i = 0; i < 64; ++i) in[i] = 10 * i;
  under_schedules(8, [&](RunOptions options) {
    std::fill(std::begin(out), std::end(out), 0u);
    const Status s = k.run({address(in), address(out)}, {2}, {32}, options, nullptr, 0, {2});
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 4; i < 64; ++i) EXPECT_EQ(out[i], in[(i + 32) % 64]) << i;
  });
}

TEST(BulkCopy, StAsyncCompletesBytesInTheOtherBlock) {
  const TestKernel k(kernel(std::string(R"(
    .reg .b32 %r<14>; .reg .b64 %rd<8>; .reg .pred %p<10>;
    .shared .align 16 .b8 given[512];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, bar; mov.u32 %r3, %tid.x; mov.u32 %r5, given;
    mov.u32 %r6, %cluster_ctarank; xor.b32 %r7, %r6, 1;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;
  READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    shl.b32 %r8, %r3, 4; add.u32 %r9, %r5, %r8;
    mapa.shared::cluster.u32 %r10, %r9, %r7; mapa.shared::cluster.u32 %r11, %r1, %r7;
    mad.lo.u32 %r12, %r6, 100, %r3;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r10], {%r12, %r3, %r6, %r7}, [%r11];
)") + kWait + R"(
    ld.shared.u32 %r12, [%r9];
    ld.shared.v4.u32 {%r2, %r4, %r8, %r10}, [%r9];
    mad.lo.u32 %r12, %r8, 10000, %r12;
    mad.lo.u32 %r13, %r6, 32, %r3;
    mul.wide.u32 %rd3, %r13, 4; add.s64 %rd4, %rd1, %rd3; st.global.u32 [%rd4], %r12;
    barrier.cluster.arrive; barrier.cluster.wait;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(64, 0);
    const Status s = k.run({address(out.data())}, {2}, {32}, options, nullptr, 0, {2});
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < 64; ++i) {
      const uint32_t from = 1 - i / 32;
      EXPECT_EQ(out[i], from * 10000 + from * 100 + i % 32) << i;
    }
  });
}

// The older of two groups is awaited first. Bytes beyond the source are zeros.
TEST(CpAsync, GroupsAndArrivals) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<14>; .reg .b64 %rd<8>; .reg .pred %p<10>;
    .shared .align 16 .b8 a[512];
    .shared .align 16 .b8 b[512];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    mov.u32 %r1, bar; mov.u32 %r3, %tid.x; mov.u32 %r4, a; mov.u32 %r5, b;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 32;
  READY:
    bar.sync 0;
    shl.b32 %r6, %r3, 4; add.u32 %r7, %r4, %r6; add.u32 %r8, %r5, %r6;
    mul.wide.u32 %rd3, %r3, 16; add.s64 %rd4, %rd1, %rd3;
    mov.u32 %r9, 8;
    cp.async.cg.shared.global [%r7], [%rd4], 16, %r9;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r8], [%rd4+512], 16;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r7];
    add.u32 %r10, %r10, %r11; add.u32 %r10, %r10, %r12; add.u32 %r10, %r10, %r13;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];
  W: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r1], 0;
    @!%p9 bra W;
    shl.b32 %r6, %r3, 4; xor.b32 %r6, %r6, 16; add.u32 %r8, %r5, %r6;
    ld.shared.u32 %r11, [%r8+12];
    mul.wide.u32 %rd5, %r3, 8; add.s64 %rd6, %rd2, %rd5;
    st.global.v2.u32 [%rd6], {%r10, %r11};
    ret;)",
                            2));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  std::vector<uint32_t> in(256);
  std::iota(in.begin(), in.end(), 1u);
  auto* aligned = static_cast<uint32_t*>(std::aligned_alloc(64, 1024));
  std::copy(in.begin(), in.end(), aligned);
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(64, 0);
    const Status s = k.run({address(aligned), address(out.data())}, {1}, {32}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < 32; ++i) {
      EXPECT_EQ(out[2 * i], in[4 * i] + in[4 * i + 1]) << i;
      EXPECT_EQ(out[2 * i + 1], in[128 + 4 * (i ^ 1) + 3]) << i;
    }
  });
  std::free(aligned);
}

// Reads without a wait: only a late schedule shows the error.
TEST(Schedules, LateCompletionShowsAMissingWait) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<14>; .reg .b64 %rd<8>;
    .shared .align 16 .b8 a[16];
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    mov.u32 %r1, bar; mov.u32 %r4, a;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], 16, [%r1];
    ld.shared.u32 %r5, [%r4];
    st.global.u32 [%rd2], %r5;
    ret;)",
                            2));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  alignas(16) const uint32_t in[4] = {5, 6, 7, 8};
  uint32_t early = 0, late = 0;
  Findings none, live;
  EXPECT_TRUE(k.run({address(in), address(&early)}, {1}, {1}, {{0, Completion::early}, 1, 0}, &none).ok());
  EXPECT_TRUE(k.run({address(in), address(&late)}, {1}, {1}, {{0, Completion::late}, 1, 0}, &live).ok());
  EXPECT_EQ(early, 5u);
  EXPECT_EQ(late, 0xffffffffu);
  EXPECT_TRUE(none.all.empty());
  EXPECT_TRUE(live.has(Rule::live_at_exit));
}

// Hardware keeps the memory of a block that has ended until its stores have read it.
TEST(BulkCopy, AStoreOutlivesItsBlock) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>;
    .shared .align 16 .b8 box[16];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, box; mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd2, %r2, 16; add.s64 %rd3, %rd1, %rd2;
    st.shared.v4.u32 [%r1], {%r2, 1, 2, 3};
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r1], 16;
    cp.async.bulk.commit_group;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    std::vector<uint32_t> out(4 * 6, 99);
    Findings findings;
    for (const bool watched : {false, true}) {
      const Status s = k.run({address(out.data())}, {6}, {1}, options, watched ? &findings : nullptr);
      ASSERT_TRUE(s.ok()) << s.message;
      for (uint32_t n = 0; n < 6; ++n) EXPECT_EQ(out[4 * n], n);
    }
    EXPECT_TRUE(findings.all.empty()) << "that it was not waited for is the checker's to say";
  });
}

TEST(Schedules, AreRepeatable) {
  for (int n = 0; n < 20; ++n)
    EXPECT_EQ(Schedule::nth(std::atoi(Schedule::nth(n).text().c_str())).seed, Schedule::nth(n).seed);
  EXPECT_EQ(Schedule::nth(0).completion, Completion::early);
  EXPECT_EQ(Schedule::nth(1).completion, Completion::late);
}

}  // namespace
}  // namespace tandem::vgpu
