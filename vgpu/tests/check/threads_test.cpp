// Tests of synchronisation that orders the accesses of threads, and of synchronisation that does not.
#include <gtest/gtest.h>

#include "vgpu/tests/check/play.h"

namespace tandem::vgpu {
namespace {

TEST(Threads, ABarrierOrdersWarps) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.barrier({0, 1});
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
}

TEST(Threads, WithoutABarrierTheyRace) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  ASSERT_EQ(play.rules(), "data-race");
  const Finding finding = play.checker->findings()[0];
  EXPECT_EQ(finding.party.warp, 1);
  EXPECT_EQ(finding.party.lane, 0);
  EXPECT_EQ(finding.party.instruction, 1);
  EXPECT_EQ(finding.other.warp, 0);
  EXPECT_EQ(finding.other.instruction, 0);
  EXPECT_EQ(finding.subject, "smem (shared 0x800)");
}

TEST(Threads, OfAWriteAndARead) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.barrier({0, 1});
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  play.store(play.at(0, kAll, "st.shared"), kAt);
  EXPECT_EQ(play.rules(), "data-race");
}

TEST(Threads, ReadsDoNotRace) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.barrier({0, 1, 2});
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  play.load(play.at(2, kAll, "ld.shared"), kAt);
  play.load(play.at(0, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
}

TEST(Threads, AnyOfManyReadersCounts) {
  for (int32_t left_out = 0; left_out < 32; ++left_out) {
    Play play({.threads = 1024});
    play.store(play.at(0, kOne, "st.shared"), kAt);
    std::vector<int32_t> all, most;
    for (int32_t w = 0; w < 32; ++w) all.push_back(w);
    for (int32_t w = 0; w < 32; ++w)
      if (w != left_out) most.push_back(w);
    play.barrier(all);
    const Actor reads = play.at(0, kOne, "ld.shared");
    for (int32_t w = 0; w < 32; ++w) play.load({0, w, kOne, reads.instruction}, kAt);
    play.barrier(most, 1);
    play.store(play.at(most[5], kOne, "st.shared"), kAt);
    ASSERT_EQ(play.rules(), "data-race") << left_out;
    EXPECT_EQ(play.checker->findings()[0].other.warp, left_out);
  }
}

TEST(Threads, NeighbouringBytesDoNotRace) {
  Play play;
  play.store(play.at(0, kAll, "st.shared.u16"), kAt, 2, 4);
  play.store(play.at(1, kAll, "st.shared.u16"), kAt + 2, 2, 4);
  play.store(play.at(2, kAll, "st.shared.u8"), kAt + 0x101, 1, 2);
  play.store(play.at(3, kAll, "st.shared.u8"), kAt + 0x100, 1, 2);
  EXPECT_EQ(play.text(), "");
}

TEST(Threads, OverlappingSizesDo) {
  Play play;
  play.store(play.at(0, kAll, "st.shared.v4.u32"), kAt, 16, 16);
  play.store(play.at(1, kOne, "st.shared.u8"), kAt + 77, 1, 0);
  ASSERT_EQ(play.rules(), "data-race");
  EXPECT_EQ(play.checker->findings()[0].other.lane, 4);
}

TEST(Threads, LanesNeedSyncwarp) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.load(play.at(0, kAll, "ld.shared"), kAt + 64, 4, 0);
  EXPECT_EQ(play.rules(), "data-race");

  Play no_findings;
  no_findings.store(no_findings.at(0, kAll, "st.shared"), kAt);
  no_findings.checker->warp_syncs(no_findings.at(0, kAll, "bar.warp.sync"));
  no_findings.load(no_findings.at(0, kAll, "ld.shared"), kAt + 64, 4, 0);
  EXPECT_EQ(no_findings.text(), "");
}

TEST(Threads, SyncwarpOrdersItsLanesOnly) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.checker->warp_syncs(play.at(0, 0xffff, "bar.warp.sync"));
  play.load(play.at(0, 0xff, "ld.shared"), kAt + 4 * 15, 4, 0);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(0, 0xff, "ld.shared"), kAt + 4 * 16, 4, 0);
  EXPECT_EQ(play.rules(), "data-race");
}

TEST(Threads, OneLaneDoesNotArriveForItsWarp) {
  for (const bool synced : {false, true}) {
    Play play;
    const BarrierId id = play.mbarrier();
    play.store(play.at(0, kAll, "st.shared"), kAt);
    if (synced) play.checker->warp_syncs(play.at(0, kAll, "bar.warp.sync"));
    play.arrive(play.at(0, kOne, "mbarrier.arrive"), id);
    play.checker->mbarrier_completes(id, 0);
    play.wait(play.at(1, kAll, "mbarrier.try_wait"), id, 0);
    play.load(play.at(1, kOne, "ld.shared"), kAt, 4);
    EXPECT_EQ(play.text(), "");
    play.load(play.at(1, kAll, "ld.shared"), kAt, 4);
    EXPECT_EQ(play.rules(), synced ? "" : "data-race");
  }
}

TEST(Threads, AlignedInstructionsOrderLanes) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.checker->wgmma_fence(play.at(0, kAll, "wgmma.fence.sync.aligned"));
  play.load(play.at(0, kAll, "ld.shared"), kAt + 64, 4, 0);
  EXPECT_EQ(play.text(), "");
}

TEST(Threads, ABarrierDoesNotOrderWhatComesBehindIt) {
  Play play;
  play.barrier({0, 1});
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "data-race");
}

TEST(Threads, BarriersOfOthersDoNotCount) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.barrier({1, 2});
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "data-race");
}

TEST(Threads, KnowledgeIsPassedOn) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt);
  play.barrier({0, 1}, 1);
  play.barrier({1, 2}, 2);
  play.load(play.at(2, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
}

// A late warp passes a barrier that has begun its next generation.
TEST(Threads, GenerationsOfABarrier) {
  Play play;
  const Actor sync = play.at(0, kAll, "bar.sync"), arrive = play.at(2, kAll, "bar.arrive");
  play.store(play.at(2, kAll, "st.shared"), kAt);
  play.checker->named_arrives({0, 0, kAll, sync.instruction}, 3);
  play.checker->named_arrives({0, 2, kAll, arrive.instruction}, 3);
  play.checker->named_completes(0, 3);
  play.store(play.at(2, kAll, "st.shared"), kAt + 0x100);
  play.checker->named_arrives({0, 2, kAll, arrive.instruction}, 3);
  play.checker->named_passes({0, 0, kAll, sync.instruction}, 3);
  play.load(play.at(0, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(0, kAll, "ld.shared"), kAt + 0x100);
  EXPECT_EQ(play.rules(), "data-race");
  play.checker->named_arrives({0, 1, kAll, sync.instruction}, 3);
  play.checker->named_completes(0, 3);
  play.checker->named_passes({0, 1, kAll, sync.instruction}, 3);
  play.load(play.at(1, kAll, "ld.shared"), kAt + 0x100);
  EXPECT_EQ(play.rules(), "data-race");
}

TEST(Threads, StoresOfOneInstructionMayMeet) {
  Play play;
  play.store(play.at(0, kAll, "st.shared"), kAt, 4, 0);
  EXPECT_EQ(play.text(), "");
  play.store(play.at(0, kAll, "st.shared"), kAt, 4, 0);
  EXPECT_EQ(play.rules(), "data-race");
}

TEST(Threads, DistributedSharedMemory) {
  for (const bool synced : {false, true}) {
    Play play({.blocks = 2, .cluster = 2});
    play.cluster_barrier();
    play.store(play.at(0, 0, kAll, "st.shared"), kAt);
    if (synced) play.cluster_barrier();
    play.touch(play.at(1, 0, kAll, "ld.shared::cluster"), {.memory = Memory::shared, .reads = true, .bytes = 4}, kAt, 4,
               0);
    EXPECT_EQ(play.rules(), synced ? "" : "data-race");
  }
}

// tcgen05.alloc of a pair may hang when the peer has not begun.
TEST(Threads, APairAllocatesBehindABarrierOfTheCluster) {
  for (const bool synced : {false, true}) {
    Play play({.blocks = 2, .cluster = 2});
    if (synced) play.cluster_barrier();
    const Actor actor = play.at(0, kAll, "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32");
    play.checker->tmem_allocates(actor, 0, 32, 1);
    EXPECT_EQ(play.rules(), synced ? "" : "unstarted-peer");
  }
}

// A thread that has passed a barrier of the cluster informs its block that the peers have begun.
TEST(Threads, PeersHaveBegun) {
  for (const bool told : {false, true}) {
    Play play({.blocks = 2, .cluster = 2});
    for (const int32_t cta : {0, 1})
      for (int32_t w = 0; w < 4; ++w)
        play.checker->cluster_arrives(play.at(cta, w, kAll, "barrier.cluster.arrive.relaxed"), Order::relaxed);
    play.checker->cluster_passes(play.at(0, kAll, "barrier.cluster.wait"));
    if (told) play.barrier({0, 1});
    play.touch(play.at(1, kAll, "st.shared::cluster"), {.memory = Memory::shared, .writes = true, .bytes = 4}, kAt, 4,
               1);
    EXPECT_EQ(play.rules(), told ? "" : "unstarted-peer");
  }
}

TEST(Threads, ABlockWaitsForItsPeers) {
  for (const bool synced : {false, true}) {
    Play play({.blocks = 2, .cluster = 2});
    play.store(play.at(0, 0, kAll, "st.shared"), kAt);
    play.cluster_barrier();
    play.touch(play.at(1, 0, kAll, "ld.shared::cluster"), {.memory = Memory::shared, .reads = true, .bytes = 4}, kAt, 4,
               0);
    if (synced) play.cluster_barrier();
    play.end();
    EXPECT_EQ(play.rules(), synced ? "" : "live-at-exit");
  }
}

TEST(Threads, OneFindingOfAKindAtAPlace) {
  Play play;
  const Actor writes = play.at(0, kAll, "st.shared"), reads = play.at(1, kAll, "ld.shared");
  for (uint32_t i = 0; i < 10; ++i) play.store(writes, kAt + 128 * i);
  for (uint32_t i = 0; i < 10; ++i) play.load(reads, kAt + 128 * i);
  EXPECT_EQ(play.rules(), "data-race");
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "data-race data-race");
}

TEST(Threads, FindingsHaveABound) {
  Play play({}, {}, 3);
  play.store(play.at(0, kAll, "st.shared"), kAt);
  for (uint32_t i = 0; i < 10; ++i) play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.checker->findings().size(), 3u);
}

}  // namespace
}  // namespace tandem::vgpu
