// Tests of bounds, first reads, and the knowledge that atomics publish to other blocks.
#include <gtest/gtest.h>

#include <thread>

#include "vgpu/tests/check/play.h"

namespace tandem::vgpu {
namespace {

uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

class Global : public testing::Test {
 protected:
  alignas(64) std::array<uint32_t, 4096> data{};
  uint64_t at = address(data.data());
  std::vector<Buffer> buffers{{"x", data.data(), 8192, true, true},
                              {"y", data.data() + 2048 + 64, 4096, false, true},
                              {"z", data.data() + 2048 + 64 + 1024, 1024, true, false}};
  static constexpr Play::Shape kTwo{.blocks = 2, .cluster = 1};
};

TEST_F(Global, OutOfBounds) {
  Play play({}, buffers);
  EXPECT_EQ(play.load(play.at(0, kAll, "ld.global"), at + 8192 - 64, 4, 4, Memory::global), 0xffff0000u);
  ASSERT_EQ(play.rules(), "out-of-bounds");
  const Finding finding = play.checker->findings()[0];
  EXPECT_EQ(finding.party.lane, 16);
  EXPECT_NE(finding.subject.find(", the end of x"), std::string::npos) << finding.subject;
  EXPECT_EQ(play.load(play.at(0, kOne, "ld.global"), at - 4, 4, 4, Memory::global), kOne);
  EXPECT_NE(play.text().find(", 4 bytes before x"), std::string::npos) << play.text();
}

TEST_F(Global, ReadOnlyBuffers) {
  Play play({}, buffers);
  EXPECT_EQ(play.load(play.at(0, kAll, "ld.global"), address(buffers[1].address), 4, 4, Memory::global), 0u);
  EXPECT_EQ(play.text(), "");
  EXPECT_EQ(play.store(play.at(0, kAll, "st.global"), address(buffers[1].address) + 8, 4, 4, Memory::global), kAll);
  EXPECT_EQ(play.rules(), "out-of-bounds");
  EXPECT_EQ(play.checker->findings()[0].subject, "y + 0x8");
}

TEST_F(Global, WithoutBuffersNothingIsOutOfBounds) {
  Play play;
  EXPECT_EQ(play.load(play.at(0, kAll, "ld.global"), 64, 4, 4, Memory::global), 0u);
  EXPECT_EQ(play.text(), "");
}

TEST_F(Global, BulkCopies) {
  Play play({}, buffers);
  play.issue(play.at(0, kOne, "cp.async.bulk"), AsyncKind::bulk_load, {Play::global(data.data() + 2048 - 4, 32)},
             {Play::shared(kAt, 32)});
  EXPECT_FALSE(play.issued);
  EXPECT_EQ(play.rules(), "out-of-bounds");
}

TEST_F(Global, Uninitialised) {
  const uint64_t z = address(buffers[2].address);
  Play play({}, buffers);
  play.store(play.at(0, kOne, "st.global"), z + 8, 4, 4, Memory::global);
  play.load(play.at(0, kOne, "ld.global"), z + 8, 4, 4, Memory::global);
  play.load(play.at(0, kOne, "ld.global.v4"), z, 16, 4, Memory::global);  // some of these bytes have been written
  EXPECT_EQ(play.text(), "");
  play.load(play.at(0, kOne, "ld.global"), z + 4, 4, 4, Memory::global);
  EXPECT_EQ(play.rules(), "uninitialised");
  play.load(play.at(0, kAll, "ld.global"), at, 4, 4, Memory::global);
  EXPECT_EQ(play.rules(), "uninitialised");
}

TEST_F(Global, BlocksRace) {
  Play play(kTwo, buffers);
  play.store(play.at(0, 0, kAll, "st.global"), at, 4, 4, Memory::global);
  play.load(play.at(1, 0, kAll, "ld.global"), at, 4, 4, Memory::global);
  ASSERT_EQ(play.rules(), "data-race");
  const Finding finding = play.checker->findings()[0];
  EXPECT_EQ(finding.party.cta, 1);
  EXPECT_EQ(finding.other.cta, 0);
  EXPECT_EQ(finding.message, "no synchronisation orders the access after the write of block 0 warp 0 lane 0");
}

TEST_F(Global, BlocksThatHaveEndedStillRace) {
  Play play(kTwo, buffers);
  play.store(play.at(0, 0, kAll, "st.global"), at, 4, 4, Memory::global);
  for (int32_t w = 0; w < 4; ++w) play.checker->exits(play.at(0, w, kAll, "ret"));
  play.checker->block_ends(0);
  play.load(play.at(1, 0, kAll, "ld.global"), at, 4, 4, Memory::global);
  EXPECT_EQ(play.rules(), "data-race");
}

TEST_F(Global, AtomicsDoNotRace) {
  Play play(kTwo, buffers);
  play.atomic(play.at(0, 0, kAll, "red.global.add"), at, Order::relaxed, Scope::gpu, true, true);
  play.atomic(play.at(1, 0, kAll, "red.global.add"), at, Order::relaxed, Scope::gpu, true, true);
  play.atomic(play.at(0, 1, kAll, "ld.relaxed.gpu"), at, Order::relaxed, Scope::gpu, true, false);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(1, 1, kAll, "ld.global"), at, 4, 0, Memory::global);
  ASSERT_EQ(play.rules(), "data-race");
  EXPECT_EQ(play.checker->findings()[0].others.size(), 1u) << "with either of the two";
}

TEST_F(Global, AtomicsOfTooSmallAScopeDo) {
  Play play(kTwo, buffers);
  play.atomic(play.at(0, 0, kOne, "atom.cta.add"), at, Order::relaxed, Scope::cta, true, true);
  play.atomic(play.at(0, 1, kOne, "atom.cta.add"), at, Order::relaxed, Scope::cta, true, true);
  EXPECT_EQ(play.text(), "");
  play.atomic(play.at(1, 0, kOne, "atom.gpu.add"), at, Order::relaxed, Scope::gpu, true, true);
  EXPECT_NE(play.rules(), "");
}

struct Chain {
  Order store = Order::release, load = Order::acquire;
  bool fence_before = false, fence_behind = false;
  Scope scope = Scope::gpu;
  bool ordered = true;
};

// A block writes and sets a flag. Another block sees the flag and reads.
TEST_F(Global, Flags) {
  const Order kRelaxed = Order::relaxed;
  const Chain chains[] = {
      {},
      {.store = kRelaxed, .fence_before = true},
      {.load = kRelaxed, .fence_behind = true},
      {.store = kRelaxed, .load = kRelaxed, .fence_before = true, .fence_behind = true},
      {.store = kRelaxed, .ordered = false},
      {.load = kRelaxed, .ordered = false},
      {.store = kRelaxed, .fence_before = true, .scope = Scope::cta, .ordered = false},
  };
  for (const Chain& c : chains) {
    for (const bool by_all : {false, true}) {  // all threads write, a barrier, one thread publishes
      Play play(kTwo, buffers);
      const uint64_t flag = at + 4096;
      play.store(play.at(0, by_all ? 1 : 0, by_all ? kAll : kOne, "st.global"), at, 4, 4, Memory::global);
      if (by_all) play.barrier({0, 1, 2, 3});
      if (c.fence_before) play.checker->fence(play.at(0, 0, kOne, "fence.acq_rel"), Order::acquire_release, c.scope);
      play.atomic(play.at(0, 0, kOne, "st"), flag, c.store, Scope::gpu, false, true);
      play.atomic(play.at(1, 0, kOne, "ld"), flag, c.load, Scope::gpu, true, false);
      if (c.fence_behind)
        play.checker->fence(play.at(1, 0, kOne, "fence.acq_rel.gpu"), Order::acquire_release, Scope::gpu);
      if (by_all) play.barrier({0, 1, 2, 3}, 0, 1);
      play.load(play.at(1, by_all ? 2 : 0, kOne, "ld.global"), at, 4, 4, Memory::global);
      EXPECT_EQ(play.rules(), c.ordered ? "" : "data-race") << (&c - chains);
    }
  }
}

// Blocks add to a counter. Each block passes on the knowledge that it has learnt.
TEST_F(Global, ChainsOfBlocks) {
  Play play({.blocks = 3, .cluster = 1}, buffers);
  const uint64_t counter = at + 4096;
  for (int32_t b = 0; b < 3; ++b) {
    play.atomic(play.at(b, 0, kOne, "atom.acq_rel.gpu.add"), counter, Order::acquire_release, Scope::gpu, true, true);
    play.load(play.at(b, 0, kOne, "ld.global"), at, 4, 4, Memory::global);
    play.store(play.at(b, 0, kOne, "st.global"), at, 4, 4, Memory::global);
    play.atomic(play.at(b, 0, kOne, "atom.acq_rel.gpu.add"), counter, Order::acquire_release, Scope::gpu, true, true);
  }
  EXPECT_EQ(play.text(), "");
}

// Blocks that write the same place race, except by atomic reductions.
TEST_F(Global, BulkReductions) {
  for (const bool reduces : {false, true}) {
    Play play(kTwo, buffers);
    for (int32_t b = 0; b < 2; ++b) {
      play.store(play.at(b, 0, kOne, "st.shared"), kAt, 16, 16);
      play.checker->proxy_fence(play.at(b, 0, kOne, "fence.proxy.async"), FencedSpaces::all);
      const Span from = Play::shared(kAt, 16, b);
      play.issue(play.at(b, 0, kOne, reduces ? "cp.reduce.async.bulk.add.f32" : "cp.async.bulk"), AsyncKind::bulk_store,
                 {from}, {Play::global(data.data(), 16)});
    }
    EXPECT_EQ(play.rules(), reduces ? "" : "missing-wait");
  }
}

TEST_F(Global, AtomicsInOneBlock) {
  Play play({}, buffers);
  play.store(play.at(0, kOne, "st.shared"), kAt);
  play.atomic(play.at(0, kOne, "atom.release.cta.shared"), kAt + 64, Order::release, Scope::cta, false, true,
              Memory::shared);
  play.atomic(play.at(1, kOne, "ld.acquire.cta.shared"), kAt + 64, Order::acquire, Scope::cta, true, false,
              Memory::shared);
  play.load(play.at(1, kOne, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(1, 2, "ld.shared"), kAt, 4, 0);
  EXPECT_EQ(play.rules(), "data-race");
}

// Blocks of different clusters run in different host threads.
TEST_F(Global, ManyHostThreads) {
  constexpr int32_t kBlocks = 8;
  Play play({.blocks = kBlocks, .cluster = 1, .threads = 32}, buffers);
  const Actor store = play.at(0, 0, kAll, "st.global"), load = play.at(0, 0, kAll, "ld.global"),
              add = play.at(0, 0, kOne, "atom.acq_rel.gpu"), exit = play.at(0, 0, kAll, "ret");
  const auto block = [&](int32_t b) {
    for (uint64_t i = 0; i < 1000; ++i) {
      play.store({b, 0, kAll, store.instruction}, at + 128 * static_cast<uint64_t>(b), 4, 4, Memory::global);
      play.load({b, 0, kAll, load.instruction}, at + 6144 + i % 16 * 128, 4, 4, Memory::global);
      play.atomic({b, 0, kOne, add.instruction}, at + 4096, Order::acquire_release, Scope::gpu, true, true);
    }
    play.checker->exits({b, 0, kAll, exit.instruction});
    play.checker->block_ends(b);
  };
  std::vector<std::thread> threads;
  for (int32_t b = 0; b < kBlocks; ++b) threads.emplace_back(block, b);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(play.text(), "");
}

TEST(Shared, OutOfBounds) {
  Play play;
  EXPECT_EQ(play.store(play.at(0, kAll, "st.shared"), kWindow - 64), 0xffff0000u);
  EXPECT_EQ(play.store(play.at(0, kOne, "st.shared"), 0x3fc), kOne);
  EXPECT_EQ(play.rules(), "out-of-bounds out-of-bounds");
}

TEST(Shared, Uninitialised) {
  Play play;
  play.load(play.at(0, kOne, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "uninitialised");
}

// A bulk addition reads the memory that it adds to.
TEST(Shared, UninitialisedSum) {
  for (const bool reduces : {false, true}) {
    Play play;
    play.store(play.at(0, kOne, "st.shared"), kAt, 16, 16);
    play.checker->proxy_fence(play.at(0, kOne, "fence.proxy.async"), FencedSpaces::all);
    play.issue(play.at(0, kOne, reduces ? "cp.reduce.async.bulk.add.f32" : "cp.async.bulk"), AsyncKind::bulk_store,
               {Play::shared(kAt, 16)}, {Play::shared(kAt + 64, 16)});
    EXPECT_EQ(play.rules(), reduces ? "uninitialised" : "");
  }
}

TEST(Local, Uninitialised) {
  Play play;
  play.store(play.at(0, kAll, "st.local"), 16, 4, 0, Memory::local);
  play.load(play.at(0, kAll, "ld.local"), 16, 4, 0, Memory::local);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(0, kOne, "ld.local"), 20, 4, 0, Memory::local);
  EXPECT_EQ(play.rules(), "uninitialised");
  play.load(play.at(1, kOne, "ld.local"), 16, 4, 0, Memory::local);
  EXPECT_EQ(play.rules(), "uninitialised uninitialised");
}

}  // namespace
}  // namespace tandem::vgpu
