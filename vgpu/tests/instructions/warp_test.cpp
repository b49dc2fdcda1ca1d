// Tests of PTX ISA: cooperation of a warp's lanes (shfl, vote, match, redux, elect, activemask), special registers,
// branches and calls.
#include <algorithm>
#include <array>
#include <bit>

#include "support/random.h"
#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using Lanes = std::array<u32, 32>;

// A warp kernel: each lane reads `a` from p0 and writes d and e to p1. body computes them from a, lane and the mask
// 0xffffffff.
BenchKernel warp_kernel(const std::string& body, const Lanes& a) {
  BenchKernel kernel;
  kernel.body =
      ".reg .b32 a, d, e, lane;\n.reg .b64 in, out;\n.reg .pred p, q;\n"
      "ld.param.u64 in, [p0];\nld.param.u64 out, [p1];\nmov.u32 lane, %laneid;\n"
      "mad.wide.u32 in, lane, 4, in;\nmad.wide.u32 out, lane, 8, out;\nld.global.b32 a, [in];\nmov.b32 d, 0;\nmov.b32 "
      "e, 0;\n" +
      body + "\nst.global.v2.b32 [out], {d, e};";
  kernel.memory = {Memory::in(std::vector<u32>(a.begin(), a.end())), Memory::out(256)};
  return kernel;
}

// Calls check(lane, d, e).
template <class F>
void on_warp(const std::string& body, const Lanes& a, F&& check) {
  SCOPED_TRACE(body);
  BenchKernel kernel = warp_kernel(body, a);
  // The device chooses the elected lane, and the active lanes after a branch.
  kernel.settled = body.find("elect.sync") == std::string::npos && body.find("activemask") == std::string::npos;
  on_each(kernel, [&](const Bench&, const BenchKernel& done) {
    for (u32 lane = 0; lane < 32; ++lane)
      check(lane, done.memory[1].at<u32>(2 * lane), done.memory[1].at<u32>(2 * lane + 1));
  });
}

Lanes random_lanes(uint64_t seed, u64 modulus = u64{1} << 32) {
  Random random(seed);
  Lanes a;
  for (u32& x : a) x = static_cast<u32>(random.next() % modulus);
  return a;
}

TEST(Warp, Shuffle) {
  const Lanes a = random_lanes(1);
  // c: clamp in bits 0-4, segment mask in bits 8-12.
  for (const u32 c : {0x1fu, 0x0fu, 0x1f1fu & 0x101fu, 0x181fu, 0x1c07u, 0x0000u, 0x1800u, 0x1f00u})
    for (const u32 b : {0u, 1u, 2u, 5u, 16u, 31u, 33u}) {
      const u32 clamp = c & 31, segments = c >> 8 & 31;
      const auto expect = [&](const char* mode, u32 lane, u32* source) {
        const u32 max_lane = (lane & segments) | (clamp & ~segments), min_lane = lane & segments, n = b & 31;
        const std::string m = mode;
        int from = static_cast<int>(lane);
        bool valid = false;
        if (m == "up") from = static_cast<int>(lane) - static_cast<int>(n), valid = from >= static_cast<int>(max_lane);
        if (m == "down") from = static_cast<int>(lane + n), valid = from <= static_cast<int>(max_lane);
        if (m == "bfly") from = static_cast<int>(lane ^ n), valid = from <= static_cast<int>(max_lane);
        if (m == "idx") from = static_cast<int>(min_lane | (n & ~segments)), valid = from <= static_cast<int>(max_lane);
        *source = valid ? static_cast<u32>(from) : lane;
        return valid;
      };
      for (const char* mode : {"up", "down", "bfly", "idx"}) {
        const std::string operands =
            " d|p, a, " + std::to_string(b) + ", " + std::to_string(c) + ", 0xffffffff;\nselp.b32 e, 1, 0, p;";
        on_warp(std::string("shfl.sync.") + mode + ".b32" + operands, a, [&](u32 lane, u32 d, u32 e) {
          u32 source = 0;
          const bool valid = expect(mode, lane, &source);
          if (source > 31) return;
          EXPECT_EQ(d, a[source]) << "lane " << lane;
          EXPECT_EQ(e, u32{valid}) << "lane " << lane;
        });
      }
    }
  on_warp("shfl.sync.bfly.b32 d, a, 16, 31, -1;", a, [&](u32 lane, u32 d, u32) { EXPECT_EQ(d, a[lane ^ 16]); });
  // Different sources in different lanes.
  on_warp("add.s32 e, lane, 7;\nshfl.sync.idx.b32 d, a, e, 31, -1;", a,
          [&](u32 lane, u32 d, u32) { EXPECT_EQ(d, a[(lane + 7) % 32]); });
}

TEST(Warp, Vote) {
  for (const u64 modulus : {2ull, 1ull, 7ull}) {
    const Lanes a = random_lanes(modulus, modulus);
    u32 ballot = 0;
    for (u32 lane = 0; lane < 32; ++lane) ballot |= u32{a[lane] != 0} << lane;
    const std::string set = "setp.ne.s32 p, a, 0;\n";
    on_warp(set + "vote.sync.all.pred q, p, -1;\nselp.b32 d, 1, 0, q;", a,
            [&](u32, u32 d, u32) { EXPECT_EQ(d, u32{ballot == ~0u}); });
    on_warp(set + "vote.sync.any.pred q, p, -1;\nselp.b32 d, 1, 0, q;", a,
            [&](u32, u32 d, u32) { EXPECT_EQ(d, u32{ballot != 0}); });
    on_warp(set + "vote.sync.any.pred q, !p, -1;\nselp.b32 d, 1, 0, q;", a,
            [&](u32, u32 d, u32) { EXPECT_EQ(d, u32{ballot != ~0u}); });
    on_warp(set + "vote.sync.uni.pred q, p, -1;\nselp.b32 d, 1, 0, q;", a,
            [&](u32, u32 d, u32) { EXPECT_EQ(d, u32{ballot == 0 || ballot == ~0u}); });
    on_warp(set + "vote.sync.ballot.b32 d, p, -1;", a, [&](u32, u32 d, u32) { EXPECT_EQ(d, ballot); });
  }
}

TEST(Warp, Match) {
  for (const u64 modulus : {1ull, 3ull, 1ull << 32}) {
    const Lanes a = random_lanes(17, modulus);
    const auto equal = [&](u32 lane) {
      u32 mask = 0;
      for (u32 other = 0; other < 32; ++other) mask |= u32{a[other] == a[lane]} << other;
      return mask;
    };
    on_warp("match.any.sync.b32 d, a, -1;", a, [&](u32 lane, u32 d, u32) { EXPECT_EQ(d, equal(lane)); });
    on_warp("{\n.reg .b64 w;\nmov.b64 w, {d, a};\nmatch.any.sync.b64 d, w, -1;\n}", a,
            [&](u32 lane, u32 d, u32) { EXPECT_EQ(d, equal(lane)); });
    on_warp("match.all.sync.b32 d|p, a, -1;\nselp.b32 e, 1, 0, p;", a, [&](u32 lane, u32 d, u32 e) {
      const bool all = equal(lane) == ~0u;
      EXPECT_EQ(d, all ? ~0u : 0u);
      EXPECT_EQ(e, u32{all});
    });
  }
}

TEST(Warp, Reduce) {
  const Lanes a = random_lanes(23);
  const auto fold = [&](auto f) {
    u32 x = a[0];
    for (u32 lane = 1; lane < 32; ++lane) x = f(x, a[lane]);
    return x;
  };
  struct Case {
    const char* form;
    u32 want;
  };
  const auto s = [](u32 x) { return static_cast<int32_t>(x); };
  for (const Case& c : {Case{"add.u32", fold([](u32 x, u32 y) { return x + y; })},
                        Case{"add.s32", fold([](u32 x, u32 y) { return x + y; })},
                        Case{"min.u32", fold([](u32 x, u32 y) { return std::min(x, y); })},
                        Case{"max.u32", fold([](u32 x, u32 y) { return std::max(x, y); })},
                        Case{"min.s32", fold([&](u32 x, u32 y) { return s(x) < s(y) ? x : y; })},
                        Case{"max.s32", fold([&](u32 x, u32 y) { return s(x) > s(y) ? x : y; })},
                        Case{"and.b32", fold([](u32 x, u32 y) { return x & y; })},
                        Case{"or.b32", fold([](u32 x, u32 y) { return x | y; })},
                        Case{"xor.b32", fold([](u32 x, u32 y) { return x ^ y; })}})
    on_warp(std::string("redux.sync.") + c.form + " d, a, 0xffffffff;", a,
            [&](u32, u32 d, u32) { EXPECT_EQ(d, c.want); });
}

// Only the lanes of a mask participate: here the odd lanes.
TEST(Warp, PartOfTheLanes) {
  const Lanes a = random_lanes(29, 100);
  u32 sum = 0, ballot = 0;
  for (u32 lane = 1; lane < 32; lane += 2) sum += a[lane], ballot |= u32{a[lane] > 50} << lane;
  const std::string odd = "and.b32 e, lane, 1;\nsetp.eq.s32 p, e, 0;\n@p bra done;\n";
  on_warp(odd + "redux.sync.add.u32 d, a, 0xaaaaaaaa;\ndone:\nbar.warp.sync -1;", a,
          [&](u32 lane, u32 d, u32) { EXPECT_EQ(d, lane % 2 == 1 ? sum : 0); });
  on_warp(
      odd +
          "setp.gt.u32 q, a, 50;\nvote.sync.ballot.b32 d, q, 0xaaaaaaaa;\nactivemask.b32 e;\ndone:\nbar.warp.sync -1;",
      a, [&](u32 lane, u32 d, u32 e) {
        EXPECT_EQ(d, lane % 2 == 1 ? ballot : 0);
        EXPECT_TRUE(lane % 2 == 0 || (e & 1u << lane) != 0);
      });
  on_warp(odd + "shfl.sync.idx.b32 d, a, 5, 31, 0xaaaaaaaa;\ndone:", a,
          [&](u32 lane, u32 d, u32) { EXPECT_EQ(d, lane % 2 == 1 ? a[5] : 0); });
}

TEST(Warp, Elect) {
  on_warp("elect.sync d|p, 0xffffffff;\nselp.b32 e, 1, 0, p;", {}, [](u32 lane, u32 d, u32 e) {
    EXPECT_LT(d, 32u);
    EXPECT_EQ(e, u32{lane == d});
  });
  on_warp("elect.sync _|p, -1;\nselp.b32 e, 1, 0, p;\nvote.sync.ballot.b32 d, p, -1;", {},
          [](u32, u32 d, u32) { EXPECT_EQ(std::popcount(d), 1); });
}

TEST(Warp, SpecialRegisters) {
  BenchKernel kernel;
  kernel.body = R"(
    .reg .b32 x, y, at;
    .reg .b64 out, clock, later;
    .reg .pred p;
    ld.param.u64 out, [p0];
    // The thread's number in the grid, x fastest.
    mov.u32 at, %ctaid.z; mov.u32 x, %nctaid.y; mul.lo.u32 at, at, x; mov.u32 x, %ctaid.y; add.u32 at, at, x;
    mov.u32 x, %nctaid.x; mul.lo.u32 at, at, x; mov.u32 x, %ctaid.x; add.u32 at, at, x;
    mov.u32 x, %ntid.z; mul.lo.u32 at, at, x; mov.u32 x, %tid.z; add.u32 at, at, x;
    mov.u32 x, %ntid.y; mul.lo.u32 at, at, x; mov.u32 x, %tid.y; add.u32 at, at, x;
    mov.u32 x, %ntid.x; mul.lo.u32 at, at, x; mov.u32 x, %tid.x; add.u32 at, at, x;
    mad.wide.u32 out, at, 64, out;
    mov.u32 x, %laneid; st.global.b32 [out], x;
    mov.u32 x, %lanemask_eq; st.global.b32 [out+4], x;
    mov.u32 x, %lanemask_lt; st.global.b32 [out+8], x;
    mov.u32 x, %lanemask_le; st.global.b32 [out+12], x;
    mov.u32 x, %lanemask_gt; st.global.b32 [out+16], x;
    mov.u32 x, %lanemask_ge; st.global.b32 [out+20], x;
    mov.u32 x, %nctaid.z; st.global.b32 [out+24], x;
    mov.u32 x, %smid; mov.u32 y, %nsmid; setp.lt.u32 p, x, y; selp.b32 x, 1, 0, p; st.global.b32 [out+28], x;
    mov.u32 x, %dynamic_smem_size; st.global.b32 [out+32], x;
    mov.u64 clock, %clock64; mov.u64 later, %clock64; setp.le.u64 p, clock, later; selp.b32 x, 1, 0, p; st.global.b32 [out+36], x;
    mov.u64 clock, %globaltimer; mov.u64 later, %globaltimer; setp.le.u64 p, clock, later; selp.b32 x, 1, 0, p; st.global.b32 [out+40], x;
    mov.u32 x, %clock; and.b32 x, x, 0; st.global.b32 [out+44], x;
    mov.u32 x, %cluster_nctarank; st.global.b32 [out+48], x;
    mov.u32 x, %cluster_ctarank; st.global.b32 [out+52], x;
    mov.u32 x, %nclusterid.x; st.global.b32 [out+56], x;
    mov.u32 x, %ctaid.x; st.global.b32 [out+60], x;)";
  kernel.grid = {3, 2, 2}, kernel.block = {8, 4, 2};
  kernel.dynamic_smem_bytes = 2048;
  kernel.memory = {Memory::out(12 * 64 * 64)};
  on_each(kernel, [](const Bench&, const BenchKernel& done) {
    for (u32 i = 0; i < 12 * 64; ++i) {
      const auto at = [&](u32 j) { return done.memory[0].at<u32>(16 * i + j); };
      const u32 lane = i % 32;
      ASSERT_EQ(at(0), lane);
      ASSERT_EQ(at(1), 1u << lane);
      ASSERT_EQ(at(2), (1u << lane) - 1);
      ASSERT_EQ(at(3), (2u << lane) - 1);
      ASSERT_EQ(at(4), ~((2u << lane) - 1));
      ASSERT_EQ(at(5), ~((1u << lane) - 1));
      ASSERT_EQ(at(6), 2u);
      ASSERT_EQ(at(7), 1u);
      ASSERT_EQ(at(8), 2048u);
      ASSERT_EQ(at(9), 1u);
      ASSERT_EQ(at(10), 1u);
      ASSERT_EQ(at(11), 0u);
      ASSERT_EQ(at(12), 1u);
      ASSERT_EQ(at(13), 0u);
      ASSERT_EQ(at(14), 3u);
      ASSERT_EQ(at(15), i / 64 % 3);
    }
  });
}

TEST(Control, LoopsAndBranches) {
  // Computes the length of the Collatz sequence of lane + 1, so that every lane takes another path.
  on_warp(R"(
    .reg .b32 n, odd;
    add.u32 n, lane, 1;
    loop:
    setp.eq.u32 p, n, 1;
    @p bra done;
    add.u32 d, d, 1;
    and.b32 odd, n, 1;
    setp.ne.u32 q, odd, 0;
    @q bra up;
    shr.u32 n, n, 1;
    bra.uni loop;
    up:
    mad.lo.u32 n, n, 3, 1;
    bra loop;
    done:)",
          {}, [](u32 lane, u32 d, u32) {
            u32 steps = 0;
            for (u32 n = lane + 1; n != 1; ++steps) n = n % 2 == 1 ? 3 * n + 1 : n / 2;
            EXPECT_EQ(d, steps) << lane;
          });
  // Uses a table of targets.
  on_warp(R"(
    .reg .b32 i;
    rem.u32 i, lane, 3;
    targets: .branchtargets zero, one, two;
    brx.idx i, targets;
    zero: mov.b32 d, 100; bra out_of_here;
    one: mov.b32 d, 101; bra out_of_here;
    two: mov.b32 d, 102;
    out_of_here:)",
          {}, [](u32 lane, u32 d, u32) { EXPECT_EQ(d, 100 + lane % 3); });
  // A branch to the next instruction diverges no lanes.
  on_warp(
      "setp.lt.u32 p, lane, 5;\n@p bra "
      "next;\nnext:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nmov.b32 d, 7;",
      {}, [](u32, u32 d, u32) { EXPECT_EQ(d, 7u); });
  // Lanes that have ended do not delay the rest.
  on_warp("setp.lt.u32 p, lane, 5;\n@p exit;\nbar.warp.sync 0xffffffe0;\nmov.b32 d, 1;", {},
          [](u32 lane, u32 d, u32) { EXPECT_EQ(d, lane < 5 ? 0xa5a5a5a5 : 1); });
  on_warp("nanosleep.u32 20;\npmevent 1;\nmov.b32 d, 4;", {}, [](u32, u32 d, u32) { EXPECT_EQ(d, 4u); });
}

TEST(Control, Calls) {
  BenchKernel kernel = warp_kernel(R"(
    {
    .param .b32 x; .param .b32 y;
    .param .align 8 .b8 box[8];
    st.param.b32 [x], a;
    call.uni (y), square, (x);
    ld.param.b32 d, [y];
    st.param.b32 [box], lane;
    st.param.b32 [box+4], a;
    call (y), difference, (box);
    ld.param.b32 e, [y];
    .param .align 16 .b8 large[16];
    .reg .b64 two;
    mov.b64 two, {d, e};
    st.param.b64 [large], two;
    mov.b64 two, {a, lane};
    st.param.b64 [large+8], two;
    call (y), all_of, (large);
    .reg .b32 third;
    ld.param.b32 third, [y];
    sub.u32 e, e, third;
    })",
                                   random_lanes(31));
  kernel.declarations = R"(
.func (.param .b32 result) square(.param .b32 value)
{
  .reg .b32 r;
  ld.param.b32 r, [value];
  mul.lo.u32 r, r, r;
  st.param.b32 [result], r;
  ret;
}
.func (.param .b32 result) difference(.param .align 8 .b8 pair[8])
{
  .reg .b32 r, s;
  .reg .pred p;
  ld.param.b32 r, [pair];
  ld.param.b32 s, [pair+4];
  setp.lt.u32 p, r, 16;
  @p bra negative;
  sub.u32 r, r, s;
  bra.uni end;
  negative:
  sub.u32 r, s, r;
  end:
  st.param.b32 [result], r;
  ret;
}
.func (.param .b32 result) all_of(.param .align 16 .b8 box[16])
{
  .reg .b32 r<5>;
  .reg .b64 w<2>;
  ld.param.v4.u32 {r0, r1, r2, r3}, [box];
  ld.param.v2.u64 {w0, w1}, [box];
  ld.param.f32 r4, [box+8];
  sub.u32 r2, r2, r4;
  cvt.u32.u64 r4, w1;
  add.u32 r2, r2, r4;
  sub.u32 r2, r2, r4;
  add.u32 r3, r3, r2;
  st.param.b32 [result], r3;
  ret;
}
)";
  const Lanes a = random_lanes(31);
  on_each(kernel, [&](const Bench&, const BenchKernel& done) {
    for (u32 lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(done.memory[1].at<u32>(2 * lane), a[lane] * a[lane]);
      EXPECT_EQ(done.memory[1].at<u32>(2 * lane + 1), (lane < 16 ? a[lane] - lane : lane - a[lane]) - lane);
    }
  });
}

}  // namespace
}  // namespace tandem::test
