// Tests of named barriers, cluster barriers, mbarriers, register reallocation, and the machine's findings about their
// misuse.
#include "vgpu/tests/machine/support.h"

namespace tandem::vgpu {
namespace {

// Warps pass a value in a ring: each waits for the preceding warp through a named barrier.
TEST(NamedBarrier, ArriveAndSyncCountTogether) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    .shared .align 4 .b32 x;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, 64;
    @%p1 bra CONSUMER;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra SKIP;
    st.shared.u32 [x], 77;
  SKIP:
    bar.arrive 3, 128;
    ret;
  CONSUMER:
    bar.sync 3, 128;
    ld.shared.u32 %r2, [x];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r2;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(128, 0);
    const Status s = k.run({address(out.data())}, {1}, {128}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 64; i < 128; ++i) EXPECT_EQ(out[i], 77u);
  });
}

TEST(NamedBarrier, Reduces) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<6>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 40;
    bar.red.popc.u32 %r2, 0, %p1;
    bar.red.and.pred %p2, 1, 96, %p1;
    bar.red.or.pred %p3, 2, 96, %p1;
    selp.u32 %r3, 256, 0, %p2;
    selp.u32 %r4, 512, 0, %p3;
    or.b32 %r2, %r2, %r3;
    or.b32 %r2, %r2, %r4;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r2;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    std::vector<uint32_t> out(96, 0);
    const Status s = k.run({address(out.data())}, {1}, {96}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (const uint32_t x : out) EXPECT_EQ(x, 40u + 512u);
  });
}

TEST(NamedBarrier, DeadlockHasATable) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<3>; .reg .pred %p<2>;
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra END;
    bar.sync 5, 64;
  END:
    ret;)",
                            0));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    Findings findings;
    const Status s = k.run({}, {1}, {64}, options, &findings);
    ASSERT_FALSE(s.ok());
    EXPECT_TRUE(findings.has(Rule::deadlock));
    EXPECT_NE(s.message.find("warp 1"), std::string::npos) << s.message;
    EXPECT_NE(s.message.find("named barrier 5: 32 of 64 threads"), std::string::npos) << s.message;
  });
}

TEST(NamedBarrier, MisuseIsFound) {
  const auto rule_of = [](const std::string& body, uint32_t threads) {
    const TestKernel k(kernel(
        ".reg .b32 %r<3>; .reg .pred %p<3>; mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32;" + body + " ret;", 0));
    EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
    Findings findings;
    (void)k.run({}, {1}, {threads}, {{}, 1, 0}, &findings);
    return findings.all.empty() ? Rule::count : findings.all[0].rule;
  };
  EXPECT_EQ(rule_of("bar.sync 0, 48;", 64), Rule::barrier_count);
  EXPECT_EQ(rule_of("@%p1 bar.sync 0, 64; @!%p1 bar.sync 0, 96;", 64), Rule::barrier_count);
  EXPECT_EQ(rule_of("setp.lt.u32 %p2, %r1, 16; @%p2 bar.sync 0;", 32), Rule::divergent_aligned);
  EXPECT_EQ(rule_of("bar.sync 16;", 32), Rule::invalid_barrier);
  EXPECT_EQ(rule_of("bar.sync 0, 64;", 64), Rule::count);
}

// Each block of a cluster writes into its neighbour's shared memory.
TEST(ClusterBarrier, BlocksReachEachOther) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<12>; .reg .b64 %rd<6>; .reg .pred %p<4>;
    .shared .align 8 .b32 x[64];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, %cluster_nctarank;
    add.u32 %r4, %r2, 1;
    rem.u32 %r4, %r4, %r3;
    mov.u32 %r5, x;
    shl.b32 %r6, %r1, 2;
    add.u32 %r5, %r5, %r6;
    mapa.shared::cluster.u32 %r7, %r5, %r4;
    getctarank.shared::cluster.u32 %r8, %r7;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mad.lo.u32 %r9, %r2, 1000, %r1;
    mad.lo.u32 %r9, %r8, 100000, %r9;
    st.shared::cluster.u32 [%r7], %r9;
    barrier.cluster.arrive.release;
    barrier.cluster.wait.acquire;
    ld.shared.u32 %r10, [%r5];
    mov.u32 %r11, %ctaid.x;
    mad.lo.u32 %r11, %r11, 64, %r1;
    mul.wide.u32 %rd2, %r11, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r10;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(8 * 64, 0);
    const Status s = k.run({address(out.data())}, {8}, {64}, options, nullptr, 0, {4});
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < out.size(); ++i) {
      const uint32_t rank = i / 64 % 4, from = (rank + 3) % 4;
      EXPECT_EQ(out[i], from * 1000 + i % 64 + rank * 100000) << i;
    }
  });
}

// A ring of two slots between a producing and a consuming warp, with 50 values. Threads that arrive and exit count
// once; the remaining threads wait for each other as before.
TEST(ClusterBarrier, ThreadsArriveAndExit) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<12>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    .shared .align 4 .b32 box;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra STAYS;
    barrier.cluster.arrive.release.aligned;
    ret;
  STAYS:
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r5, box;
    xor.b32 %r4, %r2, 1;
    mapa.shared::cluster.u32 %r7, %r5, %r4;
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra SEND;
    mov.u32 %r8, 200;
  LATER:
    nanosleep.u32 20;
    sub.u32 %r8, %r8, 1;
    setp.ne.u32 %p3, %r8, 0;
    @%p3 bra LATER;
  SEND:
    add.u32 %r9, %r2, 50;
    st.shared::cluster.u32 [%r7], %r9;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    ld.shared.u32 %r10, [%r5];
    mul.wide.u32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r10;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(2, 0);
    const Status s = k.run({address(out.data())}, {2}, {64}, options, nullptr, 0, {2});
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_EQ(out[0], 51u);
    EXPECT_EQ(out[1], 50u);
  });
}

TEST(Mbarrier, PhasesOfARing) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<20>; .reg .b64 %rd<4>; .reg .pred %p<6>;
    .shared .align 8 .b64 full[2];
    .shared .align 8 .b64 empty[2];
    .shared .align 8 .b32 slot[2];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r10, full; mov.u32 %r11, empty; mov.u32 %r12, slot;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra INITIALISED;
    mbarrier.init.shared::cta.b64 [%r10], 1;
    mbarrier.init.shared::cta.b64 [%r10+8], 1;
    mbarrier.init.shared::cta.b64 [%r11], 32;
    mbarrier.init.shared::cta.b64 [%r11+8], 32;
    fence.mbarrier_init.release.cluster;
  INITIALISED:
    bar.sync 0;
    mov.u32 %r2, 0;
    mov.u32 %r9, 0;
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra CONSUME;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
  PRODUCE:
    and.b32 %r3, %r2, 1;
    shr.u32 %r4, %r2, 1;
    and.b32 %r4, %r4, 1;
    xor.b32 %r5, %r4, 1;
    shl.b32 %r6, %r3, 3;
    add.u32 %r7, %r11, %r6;
    add.u32 %r8, %r10, %r6;
  W1: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], %r5;
    @!%p2 bra W1;
    shl.b32 %r6, %r3, 2;
    add.u32 %r6, %r6, %r12;
    mul.lo.u32 %r13, %r2, 7;
    st.shared.u32 [%r6], %r13;
    mbarrier.arrive.shared::cta.b64 _, [%r8];
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p3, %r2, 50;
    @%p3 bra PRODUCE;
    bra END;
  CONSUME:
    and.b32 %r3, %r2, 1;
    shr.u32 %r4, %r2, 1;
    and.b32 %r4, %r4, 1;
    shl.b32 %r6, %r3, 3;
    add.u32 %r7, %r10, %r6;
    add.u32 %r8, %r11, %r6;
  W2: mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r7], %r4;
    @!%p2 bra W2;
    shl.b32 %r6, %r3, 2;
    add.u32 %r6, %r6, %r12;
    ld.shared.u32 %r13, [%r6];
    mad.lo.u32 %r9, %r9, 3, %r13;
    mbarrier.arrive.shared::cta.b64 _, [%r8];
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p3, %r2, 50;
    @%p3 bra CONSUME;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r9;
  END:
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  uint32_t expected = 0;
  for (uint32_t n = 0; n < 50; ++n) expected = expected * 3 + 7 * n;
  under_schedules(10, [&](RunOptions options) {
    std::vector<uint32_t> out(64, 0);
    const Status s = k.run({address(out.data())}, {1}, {64}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 32; i < 64; ++i) EXPECT_EQ(out[i], expected);
  });
}

// Tests state tokens, pending counts, remote arrivals, dropped arrivals.
TEST(Mbarrier, TokensAndRemoteArrivals) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<12>; .reg .b64 %rd<8>; .reg .pred %p<4>;
    .shared .align 8 .b64 bar;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, bar;
    mov.u32 %r3, %cluster_ctarank;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra INITIALISED;
    mbarrier.init.shared::cta.b64 [%r2], 3;
  INITIALISED:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    @%p1 bra END;
    xor.b32 %r4, %r3, 1;
    mapa.shared::cluster.u32 %r5, %r2, %r4;
    mbarrier.arrive.shared::cta.b64 %rd2, [%r2], 2;
    mbarrier.pending_count.b64 %r6, %rd2;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
  W: mbarrier.try_wait.shared::cta.b64 %p2, [%r2], %rd2;
    @!%p2 bra W;
    mul.wide.u32 %rd3, %r3, 4;
    add.s64 %rd4, %rd1, %rd3;
    st.global.u32 [%rd4], %r6;
  END:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(2, 0);
    const Status s = k.run({address(out.data())}, {2}, {32}, options, nullptr, 0, {2});
    ASSERT_TRUE(s.ok()) << s.message;
    for (const uint32_t pending : out) EXPECT_TRUE(pending == 3 || pending == 2) << pending;
  });
}

TEST(Mbarrier, MisuseIsFound) {
  const auto finding = [](const std::string& body) {
    const TestKernel k(kernel(R"(.reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 8 .b64 bar[2];
      mov.u32 %r1, bar; mov.u32 %r2, 1; mov.u32 %r3, 0; )" +
                                  body + " ret;",
                              0));
    EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
    Findings findings;
    (void)k.run({}, {1}, {1}, {{}, 1, 0}, &findings);
    return findings.all.empty() ? Finding() : findings.all[0];
  };
  EXPECT_EQ(finding("mbarrier.arrive.shared::cta.b64 _, [%r1];").rule, Rule::invalid_barrier);
  EXPECT_EQ(finding("mbarrier.init.shared::cta.b64 [%r1], %r2; mbarrier.inval.shared::cta.b64 [%r1]; "
                    "mbarrier.arrive.shared::cta.b64 _, [%r1];")
                .rule,
            Rule::invalid_barrier);
  EXPECT_EQ(finding("mbarrier.init.shared::cta.b64 [%r1], %r2; st.shared.u32 [%r1], %r2; "
                    "mbarrier.arrive.shared::cta.b64 _, [%r1];")
                .rule,
            Rule::invalid_barrier);
  EXPECT_EQ(finding("mbarrier.init.shared::cta.b64 [%r1], %r3;").rule, Rule::invalid_barrier);
  EXPECT_EQ(finding("mbarrier.init.shared::cta.b64 [%r1], 2; mbarrier.arrive.shared::cta.b64 _, [%r1], 3;").rule,
            Rule::over_arrival);
  EXPECT_EQ(finding("mbarrier.init.shared::cta.b64 [%r1+4], %r2;").rule, Rule::misaligned);
  const Finding stuck = finding(
      "mbarrier.init.shared::cta.b64 [%r1], 2; W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra "
      "W;");
  EXPECT_EQ(stuck.rule, Rule::deadlock);
  EXPECT_NE(stuck.message.find("2 of 2 arrivals"), std::string::npos) << stuck.message;
}

// A warpgroup releases registers, and the other warpgroup waits for them.
TEST(SetMaxNReg, TheBlockHasSoManyRegisters) {
  const auto run = [](int less, int more, Findings* findings) {
    const std::string body = R"(
    .reg .b32 %r<4>; .reg .pred %p<4>;
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, 128;
    @%p1 bra MORE;
    setmaxnreg.dec.sync.aligned.u32 )" +
                             std::to_string(less) + R"(;
    ret;
  MORE:
    setmaxnreg.inc.sync.aligned.u32 )" +
                             std::to_string(more) + "; ret;";
    const TestKernel k(kernel(body, 0, ".maxntid 256, 1, 1 .minnctapersm 2"));
    EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
    for (int n = 0; n < 4; ++n) (void)k.run({}, {1}, {256}, {Schedule::nth(n), 1, 0}, findings);
  };
  Findings fine, stuck, wrong;
  run(56, 200, &fine);  // 65536 / 512 = 128 of each thread at launch: 128 + 72 = 200
  EXPECT_TRUE(fine.all.empty()) << fine.all[0].message;
  run(56, 208, &stuck);
  EXPECT_TRUE(stuck.has(Rule::deadlock));
  run(136, 200, &wrong);
  EXPECT_TRUE(wrong.has(Rule::register_budget));
}

// Warp 3 keeps 24 registers, its neighbours `less`, in any order. The other warpgroup requests `more`.
TEST(SetMaxNReg, EachWarpHasItsOwn) {
  const auto run = [](const std::string& less, const std::string& more, Observer* observer) {
    const TestKernel k(kernel(R"(
    .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<4>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    setp.ge.u32 %p1, %r2, 4;
    setp.eq.u32 %p2, %r2, 3;
    @%p1 bra MORE;
    @%p2 bra LEAST;
    )" + less + R"(
    ret;
  LEAST:
    setmaxnreg.dec.sync.aligned.u32 24;
    ret;
  MORE:
    setmaxnreg.inc.sync.aligned.u32 )" +
                                  more + R"(;
    red.global.add.u32 [%rd1], 1;
    ret;)",
                              1, ".maxntid 256, 1, 1 .minnctapersm 2"));
    EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
    uint32_t ran = 0;
    under_schedules(6, [&](const RunOptions& options) { (void)k.run({address(&ran)}, {1}, {256}, options, observer); });
    return ran;
  };
  const std::string dec = "setmaxnreg.dec.sync.aligned.u32 104;";
  // Each thread has 128 registers at launch: 3 * 24 + 104 become free, a fourth for each warp of the other group.
  EXPECT_EQ(run(dec, "168", nullptr), 6 * 128);
  Findings uneven, even, stuck, alone;
  EXPECT_EQ(run(dec, "168", &uneven), 6 * 128);
  EXPECT_GE(uneven.all.size(), 6);
  for (const Finding& f : uneven.all) EXPECT_EQ(f.rule, Rule::uneven_registers) << f.message;
  run(dec, "176", &stuck);
  EXPECT_TRUE(stuck.has(Rule::deadlock));
  EXPECT_EQ(run("setmaxnreg.dec.sync.aligned.u32 24;", "232", &even), 6 * 128);
  EXPECT_TRUE(even.all.empty());
  EXPECT_EQ(run("", "152", &alone), 6 * 128);
  ASSERT_EQ(alone.all.size(), 6);
  EXPECT_EQ(alone.all[0].rule, Rule::uneven_registers);
  EXPECT_NE(alone.all[0].message.find("1 of the 4 warps"), std::string::npos) << alone.all[0].message;
}

}  // namespace
}  // namespace tandem::vgpu
