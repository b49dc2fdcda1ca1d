// Tests of threads, divergence, reconvergence, spinning lanes, calls.
#include "vgpu/tests/machine/support.h"

namespace tandem::vgpu {
namespace {

TEST(Control, EveryThreadWritesItsNumber) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<6>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    mul.wide.u32 %rd2, %r4, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r4;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(6, [&](RunOptions options) {
    std::vector<uint32_t> out(5 * 100, 0);
    const Status s = k.run({address(out.data())}, {5}, {100}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i);
  });
}

// Computes Collatz steps: each lane's loop has a different length, with a branch in the loop.
TEST(Control, LanesLeaveALoopOneByOne) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    add.u32 %r2, %r1, 1;
    mov.u32 %r3, 0;
  LOOP:
    setp.eq.u32 %p1, %r2, 1;
    @%p1 bra DONE;
    and.b32 %r4, %r2, 1;
    setp.eq.u32 %p2, %r4, 0;
    @%p2 bra EVEN;
    mad.lo.u32 %r2, %r2, 3, 1;
    bra NEXT;
  EVEN:
    shr.u32 %r2, %r2, 1;
  NEXT:
    add.u32 %r3, %r3, 1;
    bra LOOP;
  DONE:
    activemask.b32 %r5;
    popc.b32 %r6, %r5;
    shl.b32 %r6, %r6, 16;
    or.b32 %r3, %r3, %r6;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r3;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    std::vector<uint32_t> out(96, 0);
    const Status s = k.run({address(out.data())}, {1}, {96}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < out.size(); ++i) {
      uint32_t n = i + 1, steps = 0;
      for (; n != 1; ++steps) n = n % 2 == 0 ? n / 2 : 3 * n + 1;
      EXPECT_EQ(out[i] & 0xffff, steps) << i;
      EXPECT_EQ(out[i] >> 16, 32u) << "lanes that have met again";
    }
  });
}

// Lane 0 exits from a loop while the remaining lanes wait for it after the loop. The remaining lanes must not continue
// in the loop.
TEST(Control, ALaneExitsFromItsLoop) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r3, 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra OTHERS;
  LOOP:
    nanosleep.u32 20;
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd3], %r3;
    setp.ge.u32 %p2, %r3, 3;
    @%p2 bra END;
    bra.uni LOOP;
  OTHERS:
    setp.eq.u32 %p3, %r1, 5;
    @%p3 bra END;
    add.u32 %r3, %r3, 7;
    st.global.u32 [%rd3], %r3;
  END:
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    std::vector<uint32_t> out(32, 0);
    const Status s = k.run({address(out.data())}, {1}, {32}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i == 0 ? 3u : i == 5 ? 0u : 7u) << i;
  });
}

// Lane 1 waits for an event of lane 0, and no lane may starve the other.
TEST(Control, ALaneSpinsForAnother) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    .shared .align 4 .b32 flag;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 5;
    @%p1 bra A;
    st.shared.u32 [flag], 0;
  A:
    bar.sync 0;
    setp.eq.u32 %p1, %r1, 7;
    @%p1 bra SPIN;
    setp.eq.u32 %p1, %r1, 9;
    @!%p1 bra END;
    st.volatile.shared.u32 [flag], 42;
    bra END;
  SPIN:
    ld.volatile.shared.u32 %r2, [flag];
    setp.ne.u32 %p2, %r2, 42;
    @%p2 bra SPIN;
    st.global.u32 [%rd1], %r2;
  END:
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(8, [&](RunOptions options) {
    uint32_t out = 0;
    const Status s = k.run({address(&out)}, {1}, {32}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_EQ(out, 42u);
  });
}

// Lane 7 spins for a store that lane 9 executes after the place where all lanes would rejoin.
TEST(Control, ALaneDoesNotWaitForSpinnersForEver) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 7;
    @%p1 bra MEET;
  SPIN:
    ld.volatile.global.u32 %r2, [%rd1];
    setp.ne.u32 %p2, %r2, 42;
    @%p2 bra SPIN;
  MEET:
    setp.ne.u32 %p1, %r1, 9;
    @%p1 bra END;
    st.volatile.global.u32 [%rd1], 42;
  END:
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    uint32_t flag = 0;
    const Status s = k.run({address(&flag)}, {1}, {32}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    EXPECT_EQ(flag, 42u);
  });
}

// A block waits for a block that starts later.
TEST(Control, BlocksWaitForEachOtherThroughMemory) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<6>; .reg .pred %p<4>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x;
    add.u32 %r2, %r1, 1;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd1, %rd4;
  SPIN:
    ld.acquire.gpu.global.u32 %r3, [%rd3];
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra SPIN;
    add.u32 %r3, %r3, 1;
    st.release.gpu.global.u32 [%rd5], %r3;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    std::vector<uint32_t> flags(21, 0);
    flags[20] = 1;
    const Status s = k.run({address(flags.data())}, {20}, {1}, options);
    ASSERT_TRUE(s.ok()) << s.message;
    for (uint32_t i = 0; i <= 20; ++i) EXPECT_EQ(flags[i], 21 - i);
  });
}

TEST(Control, FunctionsAreCalled) {
  const std::string function = R"(
.func (.param .b32 result) scaled(.param .b32 x, .param .align 4 .b8 y[8])
{
  .reg .b32 %r<5>; .reg .pred %p<2>;
  ld.param.b32 %r1, [x];
  ld.param.b32 %r2, [y+4];
  setp.gt.u32 %p1, %r1, 10;
  @%p1 bra BIG;
  mul.lo.u32 %r3, %r1, %r2;
  st.param.b32 [result], %r3;
  ret;
BIG:
  st.param.b32 [result], %r1;
  ret;
})";
  const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r3, 3;
    { .param .b32 a; .param .align 4 .b8 b[8]; .param .b32 r;
      st.param.b32 [a], %r1; st.param.b32 [b+4], %r3;
      call.uni (r), scaled, (a, b);
      ld.param.b32 %r2, [r]; }
    { .param .b32 a; .param .align 4 .b8 b[8]; .param .b32 r;
      st.param.b32 [a], %r2; st.param.b32 [b+4], %r3;
      call.uni (r), scaled, (a, b);
      ld.param.b32 %r4, [r]; }
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r4;
    ret;)",
                            1, "", function));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  std::vector<uint32_t> out(32, 0);
  const Status s = k.run({address(out.data())}, {1}, {32});
  ASSERT_TRUE(s.ok()) << s.message;
  const auto scaled = [](uint32_t x) { return x > 10 ? x : 3 * x; };
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], scaled(scaled(i)));
}

TEST(Control, ATrapEndsTheRunWithItsPlace) {
  const TestKernel k(kernel("trap; ret;", 0));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  const Status s = k.run({}, {1}, {32});
  EXPECT_FALSE(s.ok());
  EXPECT_NE(s.message.find("trap"), std::string::npos) << s.message;
  EXPECT_NE(s.message.find("PTX line"), std::string::npos) << s.message;
}

// Lanes rejoin where the continuing paths join, for any number of lanes that end on the way.
TEST(Control, EarlyEndsAreNoMeetingPoints) {
  const auto run = [](const std::string& middle) {
    const TestKernel k(kernel(R"(
    .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<6>;
    .shared .align 4 .b32 number;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    setp.lt.u32 %p1, %r1, 7; setp.gt.u32 %p2, %r1, 60; setp.eq.u32 %p3, %r1, 3;
)" + middle + R"(
  REST:
    bar.sync 0;
    st.global.u32 [%rd3], %r1;
    bar.sync 0;
  END:
    ret;)"));
    EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
    under_schedules(8, [&](RunOptions options) {
      std::vector<uint32_t> out(64, 99);
      Findings findings;
      const Status s = k.run({address(out.data())}, {1}, {64}, options, &findings);
      EXPECT_TRUE(s.ok()) << s.message << middle;
      for (const Finding& f : findings.all) ADD_FAILURE() << f.message << middle;
      EXPECT_EQ(out[32], 32u);
      EXPECT_EQ(out[5], 5u);
    });
  };
  run("@!%p1 bra REST; @%p2 bra FAIL; st.shared.u32 [number], 1; bra REST; FAIL: trap;");
  run("@!%p1 bra REST; @!%p2 bra ON; st.shared.u32 [number], 2; trap; ON: st.shared.u32 [number], 1;");
  run("@!%p1 bra REST; @%p3 bra END; st.shared.u32 [number], 1;");
  run("@%p3 bra END;");
  run("@!%p1 bra REST; @!%p3 bra ON; st.shared.u32 [number], 2; exit; ON: st.shared.u32 [number], 1;");
  run("@!%p3 bra REST; st.shared.u32 [number], 2; ret;");
  run("@!%p1 bra REST; @%p3 exit; st.shared.u32 [number], 1;");
  run("mov.u32 %r2, %r1; LOOP: setp.gt.u32 %p4, %r2, 70; @%p4 bra REST; setp.eq.u32 %p5, %r2, 1000; @%p5 bra FAIL; "
      "add.u32 %r2, %r2, 9; bra LOOP; FAIL: st.shared.u32 [number], 2; trap;");
}

// Kernels that never end: the loop computes, reads, stores, or waits at a barrier.
TEST(Control, EndlessLoopsAreReported) {
  for (const std::string middle : {"", "ld.volatile.global.u32 %r3, [%rd1];", "st.global.u32 [%rd1], %r2;",
                                   "bar.sync 0;", "nanosleep.u32 20;", "atom.global.add.u32 %r3, [%rd1], 1;"}) {
    const TestKernel k(
        kernel(".reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p1;\nld.param.u64 %rd1, [p0];\n"
               "mov.u32 %r2, 0;\nLOOP: " +
               middle + "\nadd.u32 %r2, %r2, 2;\nsetp.ne.u32 %p1, %r2, 7;\n@%p1 bra LOOP;\nret;"));
    ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
    under_schedules(4, [&](RunOptions options) {
      uint32_t number = 0;
      Findings findings;
      options.max_instructions = 3'000'000;
      const Status s = k.run({address(&number)}, {2}, {64}, options, &findings);
      ASSERT_FALSE(s.ok()) << middle;
      EXPECT_TRUE(s.message.starts_with("k: endless-loop at PTX line ")) << s.message;
      EXPECT_NE(s.message.find(", block "), std::string::npos) << s.message;
      EXPECT_NE(s.message.find(", warp "), std::string::npos) << s.message;
      EXPECT_NE(s.message.find("the warp repeats the loop from PTX line "), std::string::npos) << s.message;
      ASSERT_GE(findings.all.size(), 1u);
      EXPECT_EQ(findings.all[0].rule, Rule::endless_loop);
    });
  }
}

// Block 0 waits for block 1, which takes long: block 0 executes more instructions than the limit allows.
TEST(Control, WaitingForAnotherBlockIsNoEndlessLoop) {
  const TestKernel k(kernel(R"(
    .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra WORK;
  WAIT:
    ld.acquire.gpu.global.u32 %r3, [%rd1];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra WAIT;
    ret;
  WORK:
    st.global.u32 [%rd1 + 4], %r2;
    add.u32 %r2, %r2, 1;
    setp.ne.u32 %p2, %r2, 1500000;
    @%p2 bra WORK;
    mov.u32 %r3, 1;
    st.release.gpu.global.u32 [%rd1], %r3;
    ret;)"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  under_schedules(4, [&](RunOptions options) {
    uint32_t numbers[2] = {0, 0};
    options.max_instructions = 8'000'000;
    const Status s = k.run({address(numbers)}, {2}, {1}, options);
    EXPECT_TRUE(s.ok()) << s.message;
  });
}

TEST(Control, LongRunsAreShown) {
  const TestKernel k(
      kernel(".reg .b32 %r1; .reg .pred %p1;\nmov.u32 %r1, 0;\nLOOP: add.u32 %r1, %r1, 1;\n"
             "setp.ne.u32 %p1, %r1, 2000000;\n@%p1 bra LOOP;\nret;"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  std::vector<LongRun> shown;
  RunOptions options{{}, 1};
  options.long_run_seconds = 1e-4;
  options.on_long_run = [&](const LongRun& run) { shown.push_back(run); };
  ASSERT_TRUE(k.run({0}, {1}, {32}, options).ok());
  ASSERT_GE(shown.size(), 2u);
  EXPECT_EQ(shown[0].kernel, "k");
  EXPECT_GE(shown[1].seconds, 2e-4);
  EXPECT_GT(shown[1].instructions, shown[0].instructions);
  EXPECT_NE(shown[0].text().find("warp instructions; block 0, warp 0 is at PTX line "), std::string::npos);
}

TEST(Control, UnknownFormsAreRefusedByNameAndLine) {
  const TestKernel k(kernel(".reg .b32 %r<3>;\nadd.wrong.u32 %r1, %r2, %r2;\nret;", 0));
  EXPECT_FALSE(k.decoded().ok());
}

}  // namespace
}  // namespace tandem::vgpu
