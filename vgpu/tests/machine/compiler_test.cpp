// Tests of PTX that other compilers emit: addresses in 32 bits, member masks by lane, the workspace of a cooperative
// grid.
#include <bit>

#include "vgpu/src/check/checker.h"
#include "vgpu/tests/machine/support.h"

namespace tandem::vgpu {
namespace {

using u32 = uint32_t;

// Runs a warp that stores d to p0 by lane; before: declarations of the module.
std::vector<u32> run_warp(const std::string& body, const std::string& before = "") {
  SCOPED_TRACE(body);
  const TestKernel k(kernel(".reg .b32 d, lane, r<9>; .reg .b64 at, x<9>; .reg .pred p, q;\nmov.u32 lane, %laneid;\n" +
                                body +
                                "\nld.param.u64 at, [p0]; mad.wide.u32 at, lane, 4, at; st.global.b32 [at], d; ret;",
                            3, "", before));
  std::vector<u32> out(32, 0);
  EXPECT_TRUE(k.decoded().ok()) << k.decoded().message;
  if (!k.decoded().ok()) return out;
  under_schedules(6, [&](RunOptions options) {
    std::fill(out.begin(), out.end(), 0);
    Findings findings;
    const Status s = k.run({address(out.data()), 0x1234'5678'9abc'def0, 42}, {1}, {32}, options, &findings);
    EXPECT_TRUE(s.ok()) << s.message;
    for (const Finding& finding : findings.all) ADD_FAILURE() << name_of(finding.rule) << ": " << finding.message;
  });
  return out;
}

void expect_all(const std::vector<u32>& out, u32 value) {
  for (const u32 x : out) EXPECT_EQ(x, value);
}

// An address of .param is an offset in 32 or 64 bits; cvta.param makes it generic.
TEST(Addresses, OfParametersInThirtyTwoBits) {
  expect_all(run_warp("mov.b32 r1, p1; ld.param.b32 d, [r1];"), 0x9abcdef0);
  expect_all(run_warp("mov.b32 r1, p1; ld.param.b32 d, [r1+4];"), 0x12345678);
  expect_all(run_warp("mov.b32 r1, p1; add.u32 r1, r1, 8; ld.param.b32 d, [r1];"), 42);
  expect_all(run_warp("mov.b32 r1, p2; cvt.u64.u32 x1, r1; ld.param.b32 d, [x1];"), 42);
  expect_all(run_warp("mov.b32 r1, p2; cvt.u64.u32 x1, r1; cvta.param.u64 x1, x1; ld.b32 d, [x1];"), 42);
  expect_all(run_warp("mov.b64 x1, p2; cvta.param.u64 x1, x1; ld.b32 d, [x1];"), 42);
  expect_all(run_warp("mov.b64 x1, p2; ld.param.b32 d, [x1];"), 42);
  expect_all(run_warp("mov.b64 x1, p2; cvta.param.u64 x1, x1; cvta.to.param.u64 x1, x1; ld.param.b32 d, [x1];"), 42);
  expect_all(run_warp("mov.b64 x1, p2; cvta.param.u64 x1, x1; isspacep.param p, x1; selp.b32 d, 1, 0, p;"), 1);
}

TEST(Addresses, BeyondTheParametersAreRefused) {
  const TestKernel k(kernel(".reg .b32 r<4>; mov.b32 r1, p0; add.u32 r1, r1, 8; ld.param.b32 r2, [r1]; ret;"));
  ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
  Findings findings;
  EXPECT_FALSE(k.run({0}, {1}, {32}, {{}, 1, 0}, &findings).ok());
  EXPECT_TRUE(findings.has(Rule::out_of_bounds));
}

TEST(Addresses, OfConstantsSharedAndLocalMemoryInThirtyTwoBits) {
  const std::string table = ".const .align 4 .b32 table[4] = {7, 8, 9, 10};";
  expect_all(run_warp("mov.b32 r1, table; ld.const.b32 d, [r1+8];", table), 9);
  expect_all(run_warp("mov.b32 r1, table; cvt.u64.u32 x1, r1; cvta.const.u64 x1, x1; ld.b32 d, [x1+4];", table), 8);
  expect_all(run_warp("mov.b64 x1, table; cvta.const.u64 x1, x1; ld.b32 d, [x1+12];", table), 10);
  expect_all(run_warp(".shared .b32 word; mov.b32 r1, word; st.shared.b32 [r1], 5; bar.warp.sync -1;"
                      "cvt.u64.u32 x1, r1; cvta.shared.u64 x1, x1; ld.b32 d, [x1];"),
             5);
  expect_all(run_warp(".local .b32 word; mov.b32 r1, word; st.local.b32 [r1], 6; cvt.u64.u32 x1, r1;"
                      "cvta.local.u64 x1, x1; ld.b32 d, [x1];"),
             6);
}

// Lanes of equal value modulo four name each other, as in cooperative_groups::labeled_partition.
const std::string kGroups = "and.b32 r1, lane, 3; mov.b32 r2, 0x11111111; shl.b32 r2, r2, r1;\n";

TEST(Masks, DifferByLane) {
  const auto expect = [](const std::vector<u32>& out, auto&& of_lane) {
    for (u32 lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], of_lane(lane)) << "lane " << lane;
  };
  const auto members = [](u32 lane) { return 0x11111111u << lane % 4; };
  expect(run_warp(kGroups + "shfl.sync.idx.b32 d, lane, r1, 31, r2;"), [](u32 lane) { return lane % 4; });
  expect(run_warp(kGroups + "shfl.sync.bfly.b32 d, lane, 4, 31, r2;"), [](u32 lane) { return lane ^ 4; });
  expect(run_warp(kGroups + "shfl.sync.up.b32 d|p, lane, 4, 0, r2; @!p mov.b32 d, 99;"),
         [](u32 lane) { return lane < 4 ? 99 : lane - 4; });
  expect(run_warp(kGroups + "setp.lt.u32 p, lane, 9; vote.sync.ballot.b32 d, p, r2;"),
         [&](u32 lane) { return members(lane) & 0x1ff; });
  expect(run_warp(kGroups + "setp.ne.u32 p, lane, 9; vote.sync.all.pred q, p, r2; selp.b32 d, 1, 0, q;"),
         [](u32 lane) { return u32{lane % 4 != 1}; });
  expect(run_warp(kGroups + "shr.u32 r3, lane, 4; match.any.sync.b32 d, r3, r2;"),
         [&](u32 lane) { return members(lane) & (lane < 16 ? 0xffffu : 0xffff0000u); });
  expect(run_warp(kGroups + "redux.sync.add.u32 d, lane, r2;"), [](u32 lane) { return 8 * (lane % 4) + 4 * 28; });
  expect(run_warp(kGroups + "elect.sync r3|p, r2; selp.b32 d, 1, 0, p;"), [](u32 lane) { return u32{lane < 4}; });
  expect(run_warp(kGroups + "bar.warp.sync r2; mov.b32 d, r2;"), members);
  // The mask is the result of match.any; the destination is the mask's register.
  expect(run_warp("and.b32 r1, lane, 3; match.any.sync.b32 r2, r1, -1; shfl.sync.idx.b32 r2, lane, r1, 31, r2;"
                  "mov.b32 d, r2;"),
         [](u32 lane) { return lane % 4; });
}

// Half of each group arrives by another branch, so that a fragment waits for lanes of only some of its groups.
TEST(Masks, GroupsMeetFromBothSidesOfABranch) {
  const std::vector<u32> out = run_warp(kGroups + R"(
    setp.lt.u32 p, lane, 10;
    mov.b32 r4, lane;
    @p bra BELOW;
    add.u32 r4, r4, 100;
  BELOW:
    shfl.sync.idx.b32 d, r4, r1, 31, r2;)");
  for (u32 lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], lane % 4);
}

TEST(Masks, ThatDoNotAgreeAreAFinding) {
  for (const char* masks : {"mov.b32 r2, -1; setp.eq.u32 p, lane, 3; @p mov.b32 r2, 8;",   // lane 3 names itself only
                            "mov.b32 r2, 1; shl.b32 r2, r2, lane; shl.b32 r2, r2, 1;"}) {  // no lane names itself
    const TestKernel k(kernel(".reg .b32 d, lane, r<9>; .reg .pred p; mov.u32 lane, %laneid;\n" + std::string(masks) +
                              "shfl.sync.idx.b32 d, lane, 0, 31, r2; ret;"));
    ASSERT_TRUE(k.decoded().ok()) << k.decoded().message;
    Findings findings;
    (void)k.run({0}, {1}, {32}, {{}, 1, 0}, &findings);
    EXPECT_TRUE(findings.has(Rule::divergent_aligned)) << masks;
  }
}

// cooperative_groups::this_grid().sync(): a thread of each block adds to the barrier at the workspace's second word.
// %envreg1 (upper half) and %envreg2 hold the address. The code waits until the barrier's highest bit has changed.
const std::string kGridBarrier = R"(
    .reg .b32 lo, hi, n, old, now, tid, id, others, one; .reg .b64 bar, out, x; .reg .pred p, q, first;
    mov.u32 hi, %envreg1; mov.u32 lo, %envreg2; mov.b64 bar, {lo, hi};
    ld.param.u64 out, [p0];
    mov.u32 tid, %tid.x; mov.u32 id, %ctaid.x; mov.u32 n, %nctaid.x;
    setp.ne.u32 p, tid, 0;
    @p bra DONE;
    mad.wide.u32 x, id, 4, out; st.global.b32 [x], 1;
    mov.b32 one, 1; sub.u32 others, n, 1; sub.u32 others, 0x80000000, others;
    setp.eq.u32 first, id, 0; selp.b32 one, others, one, first;
    atom.add.release.gpu.u32 old, [bar+4], one;
  WAIT:
    ld.acquire.gpu.u32 now, [bar+4];
    xor.b32 now, now, old; setp.ge.s32 q, now, 0;
    @q bra WAIT;
    xor.b32 lo, id, 1; mad.wide.u32 x, lo, 4, out; ld.global.b32 old, [x];
    mad.wide.u32 x, id, 4, out; st.global.b32 [x+64], old;
  DONE:
    ret;)";

TEST(Workspace, OfACooperativeGrid) {
  auto module = std::make_shared<ptx::Module>();
  ASSERT_TRUE(ptx::parse(kernel(kGridBarrier), module.get()).ok());
  std::unique_ptr<const Program> program;
  const Status decoded = Program::decode(module, "k", hopper(), &program);
  ASSERT_TRUE(decoded.ok()) << decoded.message;
  under_schedules(6, [&](RunOptions options) {
    std::vector<u32> out(32, 0);
    const std::vector<Buffer> buffers{{"out", out.data(), 128, true, true}};
    const uint64_t parameters[] = {address(out.data())};
    LaunchDescription launch;
    launch.program = program.get();
    launch.grid = {8};
    launch.block = {32};
    launch.parameters = std::as_bytes(std::span(parameters));
    launch.cooperative = true;
    const auto checker = Checker::create(launch, hopper(), buffers, {});
    const Status s = run(launch, hopper(), options, checker.get());
    ASSERT_TRUE(s.ok()) << s.message;
    for (const Finding& finding : checker->findings()) ADD_FAILURE() << report(*program, finding);
    for (int block = 0; block < 8; ++block) EXPECT_EQ(out[static_cast<size_t>(16 + block)], 1u);
  });
}

TEST(Workspace, IsNotThereInOtherLaunches) {
  expect_all(run_warp("mov.u32 r1, %envreg1; mov.u32 r2, %envreg2; or.b32 d, r1, r2;"), 0);
  expect_all(run_warp("mov.u32 d, %envreg0; mov.u32 r1, %envreg31; or.b32 d, d, r1;"), 0);
}

}  // namespace
}  // namespace tandem::vgpu
