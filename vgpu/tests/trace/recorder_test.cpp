// Plays events to the recorder, and checks the rows that it draws.
#include "vgpu/src/trace/recorder.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "vgpu/src/ptx/parser.h"

namespace tandem::vgpu {
namespace {

// main's code consists of two functions, load and compute.
constexpr const char* kText = R"(
.version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel()
{
  .reg .pred %p<3>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  .loc 1 10 0
  mov.u32 %r1, %tid.x;
  .loc 1 20 0, function_name $L__info_string0, inlined_at 1 10 0
  add.s32 %r2, %r1, 1;
  .loc 2 5 0, function_name $L__info_string2, inlined_at 1 20 0
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;
  .loc 1 30 0, function_name $L__info_string1, inlined_at 1 10 0
  add.s32 %r3, %r1, 2;
  .loc 2 7 0, function_name $L__info_string3, inlined_at 1 30 0
  mbarrier.arrive.shared::cta.b64 %rd1, [%r1];
  ret;
}
.file 1 "kernel.cu"
.file 2 "barrier.cuh"
.section .debug_str
{
$L__info_string0:
.b8 95,90,55,99,111,109,112,117,116,101,105,0
$L__info_string1:
.b8 95,90,52,108,111,97,100,105,0
$L__info_string2:
.b8 95,90,52,119,97,105,116,118,0
$L__info_string3:
.b8 95,90,54,97,114,114,105,118,101,118,0
}
)";
enum : int32_t { kTid, kComputes, kTries, kLoads, kArrives };

class ParsedProgram : public Program {
 public:
  ParsedProgram() {
    const Status status = ptx::parse(kText, &module_);
    EXPECT_TRUE(status.ok()) << status.message;
  }
  // Instructions that events name.
  int32_t place(std::string opcode, std::vector<std::string> modifiers) {
    ptx::Function& function = module_.functions[0];
    ptx::Instruction& instruction = function.instructions.emplace_back();
    instruction.opcode = std::move(opcode);
    instruction.modifiers = std::move(modifiers);
    return static_cast<int32_t>(function.instructions.size()) - 1;
  }

  const ptx::Module& module() const override { return module_; }
  const ptx::Function& function() const override { return module_.functions[0]; }
  const ptx::Instruction& source(int32_t i) const override {
    return module_.functions[0].instructions[static_cast<size_t>(i)];
  }
  int32_t parameter_bytes() const override { return 0; }
  int32_t parameter_offset(int) const override { return 0; }
  int32_t static_shared_bytes() const override { return 0; }
  int32_t registers_needed() const override { return 32; }

 private:
  ptx::Module module_;
};

class RecorderTest : public testing::Test {
 protected:
  explicit RecorderTest(uint32_t threads = 256) {
    launch.program = &program;
    launch.block.x = threads;
    recorder =
        Recorder::create(launch, 1, {.copy_bytes = 64, .copy_latency = 500, .products = 2048, .local_latency = 30});
  }

  static Actor at(int32_t warp, int32_t instruction, int32_t block = 1) { return {block, warp, ~0u, instruction}; }
  void executes(int32_t warp, int32_t instruction, int times = 1) {
    for (int n = 0; n < times; ++n) recorder->executes(at(warp, instruction));
  }
  void arrives(int32_t warp) {
    executes(warp, kArrives);
    recorder->mbarrier_arrives(at(warp, kArrives), barrier, 1, 0, Order::release, Scope::cta);
  }
  void passes(int32_t warp, uint64_t phase) {
    recorder->mbarrier_passes(at(warp, kTries), barrier, phase, Order::acquire, Scope::cta);
  }
  // "name begin-end" of each slice of a row.
  static std::vector<std::string> row(const Timeline& timeline, const std::string& name) {
    const auto found = std::ranges::find(timeline.rows, name);
    std::vector<std::string> texts;
    for (const Slice& s : timeline.slices) {
      if (s.row != found - timeline.rows.begin()) continue;
      texts.push_back(timeline.names[static_cast<size_t>(s.name)] + " " + std::to_string(s.begin) + "-" +
                      std::to_string(s.end));
    }
    return texts;
  }
  using Texts = std::vector<std::string>;

  ParsedProgram program;
  LaunchDescription launch;
  std::unique_ptr<Recorder> recorder;
  const BarrierId barrier{1, 0x800};
};

// Warps of two blocks: a warp of one block arrives at a barrier of the other.
TEST_F(RecorderTest, BlocksOfAClusterRunTogether) {
  recorder = Recorder::create(launch, 0, {}, 2);
  for (int n = 0; n < 30; ++n) recorder->executes(at(3, kComputes, 0));
  recorder->executes(at(3, kArrives, 0));
  recorder->mbarrier_arrives(at(3, kArrives, 0), barrier, 1, 0, Order::release, Scope::cta);
  recorder->mbarrier_completes(barrier, 0);
  executes(0, kTries);
  passes(0, 0);
  executes(0, kComputes, 2);
  const Timeline timeline = recorder->timeline();
  EXPECT_EQ(timeline.title, "kernel, blocks 0 to 1");
  ASSERT_EQ(timeline.rows.size(), 16u);
  EXPECT_EQ(timeline.rows[3].substr(0, 8), "block 0:");
  EXPECT_EQ(timeline.rows[8].substr(0, 8), "block 1:");
  ASSERT_EQ(timeline.arrows.size(), 1u);
  EXPECT_EQ(timeline.arrows[0].from_row, 3);
  EXPECT_EQ(timeline.arrows[0].to_row, 8);
  EXPECT_EQ(timeline.arrows[0].to, 31);
  EXPECT_EQ(timeline.steps, 33);
}

TEST_F(RecorderTest, RolesAreTheFunctionsWhereWarpsPart) {
  executes(0, kTid), executes(0, kComputes, 3);
  executes(1, kTid), executes(1, kLoads, 2);
  const Timeline timeline = recorder->timeline();
  EXPECT_EQ(timeline.rows[0], "compute, warp 0");
  EXPECT_EQ(timeline.rows[1], "load, warp 1");
  EXPECT_EQ(timeline.rows[2], "warp 2") << "it has done nothing";
  EXPECT_EQ(timeline.steps, 4);
  EXPECT_EQ(timeline.title, "kernel, block 1");
  EXPECT_EQ(timeline.places[kTries],
            "mbarrier.try_wait.parity.shared::cta.b64, barrier.cuh:5 in wait, from kernel.cu:20 in compute, from "
            "kernel.cu:10");
}

TEST_F(RecorderTest, WhatAllWarpsDoIsNoRole) {
  for (const int32_t warp : {0, 1, 2}) executes(warp, kComputes, 4);  // the compiler moved some of it up
  executes(0, kComputes, 30), executes(1, kLoads, 30), executes(2, kTid, 5);
  const Timeline timeline = recorder->timeline();
  EXPECT_EQ(timeline.rows[0], "compute, warp 0");
  EXPECT_EQ(timeline.rows[1], "load, warp 1");
  EXPECT_EQ(timeline.rows[2], "warp 2");
}

TEST_F(RecorderTest, TheSameCopyOfAllLanesIsDrawnOnce) {
  const int32_t copy = program.place("cp", {"async", "bulk"});
  Span from{.memory = Memory::shared, .cta = 1, .address = 0x1000, .bytes = 640};
  Span to{.memory = Memory::global, .address = 0x100000, .bytes = 640};
  AsyncId id = 0;
  for (const uint64_t apart : {0, 640}) {
    executes(0, copy);
    for (int lane = 0; lane < 3; ++lane) {
      recorder->async_issues(at(0, copy), AsyncKind::bulk_store, ++id, {&from, 1}, {&to, 1});
      from.address += apart, to.address += apart;
    }
  }
  EXPECT_EQ(row(recorder->timeline(), "copies out"),
            (Texts{"cp.async 1-11", "cp.async 11-21", "cp.async 21-31", "cp.async 31-41"}));
}

// The machine executes one warp for a long time, then another. The timeline must not show this order.
TEST_F(RecorderTest, WhatIsIssuedEarlierFindsItsGap) {
  const int32_t copy = program.place("cp", {"async", "bulk"});
  const Span to{.memory = Memory::shared, .cta = 1, .address = 0x1000, .bytes = 640};
  const auto copies = [&](int32_t warp, int32_t after, AsyncId id) {
    executes(warp, kTid, after);
    executes(warp, copy);
    recorder->async_issues(at(warp, copy), AsyncKind::bulk_load, id, {}, {&to, 1});
  };
  copies(0, 99, 1), copies(0, 4, 2);
  copies(1, 4, 3), copies(1, 90, 4);
  EXPECT_EQ(row(recorder->timeline(), "copies in"),
            (Texts{"cp.async 100-110", "cp.async 110-120", "cp.async 5-15", "cp.async 120-130"}));
}

// Each warp has separate lanes of tensor memory. The operations of a warp keep their order.
TEST_F(RecorderTest, WarpsLoadTensorMemoryTogether) {
  const int32_t load = program.place("tcgen05", {"ld", "sync"});
  const Span from{.memory = Memory::tensor, .cta = 1, .address = 0, .bytes = 128, .rows = 32};
  AsyncId id = 0;
  for (const int32_t warp : {0, 1, 0, 4}) {
    executes(warp, load);
    recorder->async_issues(at(warp, load), AsyncKind::tcgen05_ld, ++id, {&from, 1}, {});
  }
  EXPECT_EQ(row(recorder->timeline(), "tensor memory"),
            (Texts{"tcgen05.ld 1-9", "tcgen05.ld 1-9", "tcgen05.ld 9-17", "tcgen05.ld 17-25"}))
      << "warps 0 and 4 share theirs";
}

TEST_F(RecorderTest, WaitsEndWhenTheLastHasArrived) {
  executes(0, kComputes, 2);
  executes(1, kLoads, 9);
  executes(0, kTries);
  arrives(1);  // the tenth instruction
  recorder->mbarrier_completes(barrier, 0);
  executes(0, kTries);  // further tries count once
  executes(0, kTries);
  passes(0, 0);
  executes(0, kComputes);
  const Timeline timeline = recorder->timeline();
  EXPECT_EQ(row(timeline, "compute, warp 0"), (Texts{"compute 0-2", "wait 2-3", "wait 3-10", "compute 10-11"}))
      << "the function, then what it waited";
  EXPECT_EQ(row(timeline, "load, warp 1"), (Texts{"load 0-9", "arrive 9-10"}));
  ASSERT_EQ(timeline.arrows.size(), 1u);
  const Arrow& arrow = timeline.arrows[0];
  EXPECT_EQ(arrow.from_row, 1);
  EXPECT_EQ(arrow.to_row, 0);
  EXPECT_EQ(arrow.from, 9);
  EXPECT_EQ(arrow.to, 10);
  EXPECT_EQ(arrow.waited, 7);
}

TEST_F(RecorderTest, PhasesAreSeparate) {
  for (const uint64_t phase : {0, 1}) {
    executes(1, kLoads, 50);
    arrives(1);
    recorder->mbarrier_completes(barrier, phase);
  }
  executes(0, kTries);
  passes(0, 0);
  EXPECT_EQ(recorder->timeline().slices.at(1).end, 51) << "not 102, when the second phase was complete";
}

TEST_F(RecorderTest, CopiesQueueForTheirUnit) {
  const int32_t copy = program.place("cp", {"async", "bulk"});
  const Span to{.memory = Memory::shared, .cta = 1, .address = 0x1000, .bytes = 6400};
  for (const AsyncId id : {1, 2}) {
    executes(1, copy);
    recorder->async_issues(at(1, copy), AsyncKind::bulk_load, id, {}, {&to, 1});
    recorder->async_signals(id, barrier, 6400);
  }
  recorder->mbarrier_completes(barrier, 0);
  executes(0, kTries);
  passes(0, 0);
  const Timeline timeline = recorder->timeline();
  EXPECT_EQ(row(timeline, "copies in"), (Texts{"cp.async 1-101", "cp.async 101-201"}));
  EXPECT_EQ(timeline.slices.at(1).end, 701) << "the second copy's end and the latency";
  ASSERT_EQ(timeline.arrows.size(), 1u);
  EXPECT_EQ(timeline.rows[static_cast<size_t>(timeline.arrows[0].from_row)], "copies in");
  EXPECT_EQ(timeline.arrows[0].from, 200);
}

// Each warp issues a quarter; a product begins with the last of the four.
TEST_F(RecorderTest, ProductsAreOfTheWholeWarpgroup) {
  const int32_t product = program.place("wgmma", {"mma_async", "sync", "aligned", "m64n128k16", "f32"});
  const int32_t wait = program.place("wgmma", {"wait_group", "sync", "aligned"});
  for (int32_t warp = 4; warp < 8; ++warp) {
    executes(warp, kTid, warp);
    for (const AsyncId id : {1, 2}) {
      executes(warp, product);
      recorder->async_issues(at(warp, product), AsyncKind::wgmma, id, {}, {});
      recorder->group_commits(at(warp, product), AsyncKind::wgmma);
    }
  }
  for (int32_t warp = 4; warp < 8; ++warp) {
    executes(warp, wait);
    recorder->group_waits(at(warp, wait), AsyncKind::wgmma, 1, false);
  }
  const Timeline timeline = recorder->timeline();
  EXPECT_EQ(row(timeline, "tensor core"), (Texts{"wgmma.mma_async 8-72", "wgmma.mma_async 72-136"}))
      << "64 x 128 x 16 / 2048 steps each";
  EXPECT_EQ(row(timeline, "warp 4"), (Texts{"code 0-4", "wgmma.mma_async 4-6", "wgmma.wait_group 6-7", "wait 7-102"}))
      << "the first group and the latency, not both";
  EXPECT_EQ(row(timeline, "warp 7"),
            (Texts{"code 0-7", "wgmma.mma_async 7-9", "wgmma.wait_group 9-10", "wait 10-102"}));
}

TEST_F(RecorderTest, NamedBarriersHaveGenerations) {
  const int32_t sync = program.place("bar", {"sync"});
  const auto all = [&](int first, int second) {
    executes(0, kComputes, first), executes(1, kLoads, second);
    for (const int32_t warp : {0, 1}) {
      executes(warp, sync);
      recorder->named_arrives(at(warp, sync), 3);
    }
    recorder->named_completes(1, 3);
  };
  all(5, 20);
  recorder->named_passes(at(0, sync), 3);
  recorder->named_passes(at(1, sync), 3);
  all(30, 1);
  recorder->named_passes(at(1, sync), 3);
  recorder->named_passes(at(0, sync), 3);
  const Timeline timeline = recorder->timeline();
  EXPECT_EQ(row(timeline, "compute, warp 0"),
            (Texts{"compute 0-5", "bar.sync 5-6", "wait 6-21", "compute 21-51", "bar.sync 51-52"}));
  EXPECT_EQ(row(timeline, "load, warp 1"),
            (Texts{"load 0-20", "bar.sync 20-21", "load 21-22", "bar.sync 22-23", "wait 23-52"}));
}

TEST_F(RecorderTest, OtherBlocksAreNotDrawn) {
  EXPECT_TRUE(recorder->wants_instructions());
  recorder->executes(at(0, kComputes, 0));
  recorder->async_issues(at(0, kComputes, 0), AsyncKind::bulk_load, 1, {}, {});
  recorder->mbarrier_passes(at(0, kTries, 0), barrier, 0, Order::acquire, Scope::cta);
  const Timeline timeline = recorder->timeline();
  EXPECT_TRUE(timeline.slices.empty());
  EXPECT_EQ(timeline.steps, 0);
}

}  // namespace
}  // namespace tandem::vgpu
