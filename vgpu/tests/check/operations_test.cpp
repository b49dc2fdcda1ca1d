// Tests of asynchronous operations: the waits that cover them, and the order of the async proxy.
#include <gtest/gtest.h>

#include "vgpu/tests/check/play.h"

namespace tandem::vgpu {
namespace {

constexpr uint32_t kTile = 4096;

TEST(BulkLoad, IsCoveredByItsPhase) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  play.wait(play.at(1, kAll, "mbarrier.try_wait"), id, 0);
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
}

TEST(BulkLoad, ReadWithoutAWait) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  play.load(play.at(1, kAll, "ld.shared"), kAt + 0x40);
  ASSERT_EQ(play.rules(), "missing-wait");
  const Finding finding = play.checker->findings()[0];
  EXPECT_EQ(finding.subject, "smem + 0x40 (shared 0x840)");
  EXPECT_EQ(finding.other.what, "bulk load writes");
  EXPECT_EQ(finding.other.lane, 0);
}

// The issuing thread knows no more than other threads.
TEST(BulkLoad, ReadByItsIssuer) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  play.load(play.at(0, kOne, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "missing-wait");
}

TEST(BulkLoad, ReadBehindThePhaseBefore) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 1, kAt + kTile, kTile);
  play.wait(play.at(1, kAll, "mbarrier.try_wait"), id, 0);
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(1, kAll, "ld.shared"), kAt + kTile);
  EXPECT_EQ(play.rules(), "missing-wait");
}

TEST(BulkLoad, AWaitPassesOnThroughABarrier) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  play.wait(play.at(1, kOne, "mbarrier.try_wait"), id, 0);
  play.load(play.at(1, 2, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "missing-wait");
  play.checker->warp_syncs(play.at(1, kAll, "bar.warp.sync"));
  play.barrier({1, 2});
  play.load(play.at(2, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "missing-wait");
}

// Uses full and empty barriers of a ring, as kernels do.
TEST(BulkLoad, RingOfTwoBarriers) {
  for (const bool arrives : {true, false}) {
    Play play;
    const BarrierId full = play.mbarrier(), empty = play.mbarrier(kBar + 8);
    for (uint64_t n = 0; n < 3; ++n) {
      if (n > 0 && arrives) play.wait(play.at(0, kOne, "mbarrier.try_wait"), empty, n - 1);
      play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, n, kAt, kTile);
      play.wait(play.at(1, kAll, "mbarrier.try_wait"), full, n);
      play.load(play.at(1, kAll, "ld.shared"), kAt, 16, 16);
      play.checker->proxy_fence(play.at(1, kAll, "fence.proxy.async"), FencedSpaces::shared);
      play.checker->warp_syncs(play.at(1, kAll, "bar.warp.sync"));
      play.arrive(play.at(1, kOne, "mbarrier.arrive"), empty);
      play.checker->mbarrier_completes(empty, n);
    }
    EXPECT_EQ(play.rules(), arrives ? "" : "data-race data-race missing-wait missing-wait");
  }
}

// The same address begins a new life after mbarrier.inval.
TEST(BulkLoad, ABarrierInitialisedAgain) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  for (int32_t w = 0; w < 4; ++w) play.wait(play.at(w, kAll, "mbarrier.try_wait"), id, 0);
  play.barrier({0, 1, 2, 3});
  play.checker->mbarrier_invalidates(play.at(0, kOne, "mbarrier.inval"), id);
  play.mbarrier();
  const AsyncId op =
      play.issue(play.at(0, kOne, "cp.async.bulk"), AsyncKind::bulk_load, {}, {Play::shared(kAt, kTile)});
  play.load(play.at(1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.rules(), "missing-wait");
  play.checker->async_signals(op, id, kTile);
  play.checker->mbarrier_completes(id, 0);
  play.wait(play.at(2, kAll, "mbarrier.try_wait"), id, 0);
  play.load(play.at(2, kAll, "ld.shared"), kAt + 0x100);
  EXPECT_EQ(play.rules(), "missing-wait");
}

// Each destination has its own barrier.
TEST(BulkLoad, Multicast) {
  Play play({.blocks = 2, .cluster = 2});
  const BarrierId a = play.mbarrier(kBar, 0), b = play.mbarrier(kBar, 1);
  play.cluster_barrier();
  const AsyncId op = play.issue(play.at(0, 0, kOne, "cp.async.bulk.tensor.multicast::cluster"), AsyncKind::bulk_load,
                                {}, {Play::shared(kAt, kTile, 0), Play::shared(kAt, kTile, 1)});
  for (const BarrierId id : {a, b}) {
    play.checker->async_signals(op, id, kTile);
    play.checker->mbarrier_completes(id, 0);
  }
  play.wait(play.at(0, 1, kAll, "mbarrier.try_wait"), a, 0);
  play.load(play.at(0, 1, kAll, "ld.shared"), kAt);
  play.wait(play.at(1, 1, kAll, "mbarrier.try_wait"), b, 0);
  play.load(play.at(1, 1, kAll, "ld.shared"), kAt);
  EXPECT_EQ(play.text(), "");
  play.touch(play.at(0, 1, kAll, "ld.shared::cluster"), {.memory = Memory::shared, .reads = true, .bytes = 4}, kAt, 4,
             1);
  EXPECT_EQ(play.rules(), "missing-wait");
}

// A pair of blocks may have one barrier for both.
TEST(BulkLoad, PairOfBlocks) {
  Play play({.blocks = 2, .cluster = 2});
  const BarrierId id = play.mbarrier(kBar, 0);
  play.cluster_barrier();
  const AsyncId op = play.issue(play.at(1, 0, kOne, "cp.async.bulk.tensor.cta_group::2"), AsyncKind::bulk_load, {},
                                {Play::shared(kAt, kTile, 1)});
  play.checker->async_signals(op, id, kTile);
  play.checker->mbarrier_completes(id, 0);
  play.wait(play.at(0, 1, kAll, "mbarrier.try_wait"), id, 0);
  play.touch(play.at(0, 1, kAll, "ld.shared::cluster"), {.memory = Memory::shared, .reads = true, .bytes = 4}, kAt, 4,
             1);
  EXPECT_EQ(play.text(), "");
}

TEST(BulkLoad, LeftUnderWayAtExit) {
  for (const bool waits : {false, true}) {
    Play play;
    const BarrierId id = play.mbarrier();
    play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
    if (waits) play.wait(play.at(0, kOne, "mbarrier.try_wait"), id, 0);
    play.end();
    EXPECT_EQ(play.rules(), waits ? "" : "live-at-exit");
  }
}

TEST(BulkLoad, BarrierInitialisedBehindNoFence) {
  Play play;
  const BarrierId id{0, kBar};
  play.checker->mbarrier_inits(play.at(0, kOne, "mbarrier.init"), id, 1);
  play.barrier({0, 1, 2, 3});
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  EXPECT_EQ(play.rules(), "missing-init-fence");

  Play fenced;
  fenced.checker->mbarrier_inits(fenced.at(0, kOne, "mbarrier.init"), id, 1);
  fenced.checker->proxy_fence(fenced.at(0, kOne, "fence.proxy.async"), FencedSpaces::all);
  fenced.barrier({0, 1, 2, 3});
  fenced.load_box(fenced.at(1, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  EXPECT_EQ(fenced.text(), "");
}

TEST(BulkLoad, BarrierInitialisedBehindNoBarrier) {
  Play play;
  const BarrierId id{0, kBar};
  play.checker->mbarrier_inits(play.at(0, kOne, "mbarrier.init"), id, 1);
  play.checker->fence(play.at(0, kOne, "fence.mbarrier_init.release.cluster"), Order::release, Scope::cluster);
  play.load_box(play.at(1, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
  play.wait(play.at(2, kAll, "mbarrier.try_wait"), id, 0);
  EXPECT_EQ(play.rules(), "data-race data-race");
}

TEST(Proxy, OrdinaryWritesNeedAFence) {
  struct Case {
    bool fence;
    bool by_writer;
  };
  for (const Case c : {Case{false, false}, Case{true, true}, Case{true, false}}) {
    Play play;
    play.store(play.at(1, kAll, "st.shared"), kAt, 16, 16);
    if (c.fence && c.by_writer) play.checker->proxy_fence(play.at(1, kAll, "fence.proxy.async"), FencedSpaces::all);
    play.barrier({0, 1});
    if (c.fence && !c.by_writer) play.checker->proxy_fence(play.at(0, kAll, "fence.proxy.async"), FencedSpaces::all);
    play.issue(play.at(0, kOne, "cp.async.bulk.tensor"), AsyncKind::bulk_store, {Play::shared(kAt, 512)}, {});
    EXPECT_EQ(play.rules(), c.fence ? "" : "missing-proxy-fence");
  }
}

TEST(Proxy, TheFenceMustComeBehindTheWrites) {
  Play play;
  play.checker->proxy_fence(play.at(1, kAll, "fence.proxy.async"), FencedSpaces::all);
  play.store(play.at(1, kAll, "st.shared"), kAt, 16, 16);
  play.barrier({0, 1});
  play.issue(play.at(0, kOne, "cp.async.bulk.tensor"), AsyncKind::bulk_store, {Play::shared(kAt, 512)}, {});
  EXPECT_EQ(play.rules(), "missing-proxy-fence");
}

TEST(Proxy, EachWriterNeedsOne) {
  Play play;
  play.store(play.at(1, kAll, "st.shared"), kAt, 16, 16);
  play.store(play.at(2, kAll, "st.shared"), kAt + 512, 16, 16);
  play.checker->proxy_fence(play.at(1, kAll, "fence.proxy.async"), FencedSpaces::all);
  play.barrier({0, 1, 2});
  play.issue(play.at(0, kOne, "cp.async.bulk.tensor"), AsyncKind::bulk_store, {Play::shared(kAt, 1024)}, {});
  ASSERT_EQ(play.rules(), "missing-proxy-fence");
  EXPECT_EQ(play.checker->findings()[0].other.warp, 2);
}

TEST(Proxy, AFenceIsNoBarrier) {
  Play play;
  play.store(play.at(1, kAll, "st.shared"), kAt, 16, 16);
  play.checker->proxy_fence(play.at(1, kAll, "fence.proxy.async"), FencedSpaces::all);
  play.issue(play.at(0, kOne, "cp.async.bulk.tensor"), AsyncKind::bulk_store, {Play::shared(kAt, 512)}, {});
  EXPECT_EQ(play.rules(), "data-race");
}

// Reads may be outstanding when a copy writes the memory.
TEST(Proxy, OrdinaryReadsBeforeACopyNeedAFence) {
  enum class By { nobody, reader, issuer, issuer_too_early, other_space };
  for (const By fenced : {By::nobody, By::reader, By::issuer, By::issuer_too_early, By::other_space}) {
    Play play;
    const BarrierId full = play.mbarrier(), empty = play.mbarrier(kBar + 8);
    const auto fence = [&](int32_t warp, uint32_t lanes, FencedSpaces spaces) {
      play.checker->proxy_fence(play.at(warp, lanes, "fence.proxy.async"), spaces);
    };
    play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, 0, kAt, kTile);
    play.wait(play.at(1, kAll, "mbarrier.try_wait"), full, 0);
    play.load(play.at(1, kAll, "ld.shared"), kAt, 16, 16);
    if (fenced == By::reader) fence(1, kAll, FencedSpaces::shared);
    if (fenced == By::other_space) fence(1, kAll, FencedSpaces::global);
    play.arrive(play.at(1, kAll, "mbarrier.arrive"), empty);
    play.checker->mbarrier_completes(empty, 0);
    if (fenced == By::issuer_too_early) fence(0, kOne, FencedSpaces::all);
    play.wait(play.at(0, kOne, "mbarrier.try_wait"), empty, 0);
    if (fenced == By::issuer) fence(0, kOne, FencedSpaces::all);
    play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, 1, kAt, kTile);
    const bool no_findings = fenced == By::reader || fenced == By::issuer;
    EXPECT_EQ(play.rules(), no_findings ? "" : "missing-proxy-fence") << static_cast<int>(fenced);
    if (no_findings) continue;
    EXPECT_EQ(play.checker->findings()[0].message,
              "the access overwrites bytes that warp 1 lane 0 read by ordinary loads, and no fence.proxy.async of "
              "shared memory lies between the two");
  }
}

// A fence orders all reads that its thread knows of.
TEST(Proxy, AFenceBehindABarrierIsForAllReaders) {
  for (const bool behind : {true, false}) {
    Play play;
    const BarrierId full = play.mbarrier();
    play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, 0, kAt, kTile);
    for (const int32_t warp : {1, 2}) {
      play.wait(play.at(warp, kAll, "mbarrier.try_wait"), full, 0);
      play.load(play.at(warp, kAll, "ld.shared"), kAt, 16, 16);
    }
    if (!behind) play.checker->proxy_fence(play.at(2, kAll, "fence.proxy.async"), FencedSpaces::shared);
    play.barrier({1, 2});
    if (behind) play.checker->proxy_fence(play.at(2, kAll, "fence.proxy.async"), FencedSpaces::shared);
    play.barrier({0, 2});
    play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, 1, kAt, kTile);
    ASSERT_EQ(play.rules(), behind ? "" : "missing-proxy-fence");
    if (behind) continue;
    EXPECT_EQ(play.checker->findings()[0].other.warp, 1);
  }
}

// A thread copies over data that it has read. Products read through the proxy through which copies write.
TEST(Proxy, OwnReadsNeedAFenceAndProductsNone) {
  Play play;
  const BarrierId full = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, 0, kAt, kTile);
  play.wait(play.at(0, kAll, "mbarrier.try_wait"), full, 0);
  play.issue(play.at(0, kOne, "cp.async.bulk"), AsyncKind::bulk_store, {Play::shared(kAt, kTile)}, {});
  play.checker->group_commits(play.at(0, kOne, "cp.async.bulk.commit_group"), AsyncKind::bulk_store);
  play.checker->group_waits(play.at(0, kOne, "cp.async.bulk.wait_group"), AsyncKind::bulk_store, 0, true);
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, 1, kAt, kTile);
  EXPECT_EQ(play.text(), "");
  play.wait(play.at(0, kAll, "mbarrier.try_wait"), full, 1);
  play.load(play.at(0, kOne, "ld.shared"), kAt, 16, 16);
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), full, 2, kAt, kTile);
  EXPECT_EQ(play.rules(), "missing-proxy-fence");
}

TEST(Proxy, WhatCpAsyncWroteNeedsNone) {
  Play play;
  const Actor copy = play.at(0, kOne, "cp.async.cg.shared.global");
  play.issue(copy, AsyncKind::cp_async, {}, {Play::shared(kAt, 16)});
  play.checker->group_commits(play.at(0, kOne, "cp.async.commit_group"), AsyncKind::cp_async);
  play.checker->group_waits(play.at(0, kOne, "cp.async.wait_group"), AsyncKind::cp_async, 0, false);
  play.checker->warp_syncs(play.at(0, kAll, "bar.warp.sync"));
  play.barrier({0, 1, 2, 3});
  play.multiply(0, {Play::shared(kAt, 16)});
  EXPECT_EQ(play.text(), "");
}

// A warp's products read memory. All four warps must know of earlier accesses, whichever of them issues first.
TEST(Wgmma, AllFourWarpsMustHaveWaited) {
  for (const int32_t left_out : {-1, 0, 2, 3}) {
    Play play;
    const BarrierId id = play.mbarrier();
    play.load_box(play.at(0, kOne, "cp.async.bulk.tensor"), id, 0, kAt, kTile);
    for (int32_t w = 0; w < 4; ++w)
      if (w != left_out) play.wait(play.at(w, kAll, "mbarrier.try_wait"), id, 0);
    play.multiply(0, {Play::shared(kAt, kTile)});
    EXPECT_EQ(play.rules(), left_out < 0 ? "" : "missing-wait") << left_out;
  }
}

// Each warp reads separate rows of A, and may have written them before.
TEST(Wgmma, RowsOfAWarp) {
  for (const int32_t reader : {0, 1}) {
    Play play;
    for (int32_t w = 0; w < 4; ++w) {
      const uint32_t at = kAt + 512 * static_cast<uint32_t>(w);
      play.store(play.at(w, kAll, "st.shared"), at, 16, 16);
      play.checker->proxy_fence(play.at(w, kAll, "fence.proxy.async"), FencedSpaces::all);
      play.checker->warp_syncs(play.at(w, kAll, "bar.warp.sync"));
    }
    Span rows = Play::shared(kAt + 512, 512);
    rows.warp = reader;
    play.multiply(0, {rows});
    EXPECT_EQ(play.rules(), reader == 1 ? "" : "data-race");
  }
}

TEST(Wgmma, OverwrittenBeforeItsWait) {
  struct Case {
    bool commits;
    uint32_t pending;
    const char* rules;
  };
  for (const Case c : {Case{true, 0, ""}, Case{true, 1, "missing-wait"}, Case{false, 0, "missing-wait"}}) {
    Play play;
    play.store(play.at(0, kAll, "st.shared"), kAt, 16, 16);
    play.checker->proxy_fence(play.at(0, kAll, "fence.proxy.async"), FencedSpaces::all);
    play.barrier({0, 1, 2, 3});
    play.multiply(0, {Play::shared(kAt, 512)});
    for (int32_t w = 0; w < 4; ++w) {
      if (c.commits) play.checker->group_commits(play.at(w, kAll, "wgmma.commit_group.sync.aligned"), AsyncKind::wgmma);
      play.checker->group_waits(play.at(w, kAll, "wgmma.wait_group.sync.aligned"), AsyncKind::wgmma, c.pending, false);
    }
    play.barrier({0, 1, 2, 3});
    play.store(play.at(3, kAll, "st.shared"), kAt, 16, 16);
    EXPECT_EQ(play.rules(), c.rules);
  }
}

// Lane 0 of each warp frees the slot once the warp has waited for the product.
TEST(Wgmma, ALaneMayFreeWhatItsWarpWaitedFor) {
  Play play({.threads = 160});
  const BarrierId full = play.mbarrier(), empty = play.mbarrier(kBar + 8);
  play.load_box(play.at(4, kOne, "cp.async.bulk.tensor"), full, 0, kAt, kTile);
  for (int32_t w = 0; w < 4; ++w) play.wait(play.at(w, kAll, "mbarrier.try_wait"), full, 0);
  play.multiply(0, {Play::shared(kAt, kTile)});
  for (int32_t w = 0; w < 4; ++w) {
    play.checker->group_commits(play.at(w, kAll, "wgmma.commit_group.sync.aligned"), AsyncKind::wgmma);
    play.checker->group_waits(play.at(w, kAll, "wgmma.wait_group.sync.aligned"), AsyncKind::wgmma, 0, false);
    play.arrive(play.at(w, kOne, "mbarrier.arrive"), empty);
  }
  play.checker->mbarrier_completes(empty, 0);
  play.wait(play.at(4, kOne, "mbarrier.try_wait"), empty, 0);
  play.load_box(play.at(4, kOne, "cp.async.bulk.tensor"), full, 1, kAt, kTile);
  for (int32_t w = 0; w < 4; ++w) play.wait(play.at(w, kAll, "mbarrier.try_wait"), full, 1);
  play.end();
  EXPECT_EQ(play.text(), "");
}

TEST(Wgmma, NotCommittedOrNotWaitedFor) {
  for (const bool commits : {false, true}) {
    Play play;
    play.store(play.at(0, kAll, "st.shared"), kAt, 16, 16);
    play.checker->proxy_fence(play.at(0, kAll, "fence.proxy.async"), FencedSpaces::all);
    play.barrier({0, 1, 2, 3});
    play.multiply(0, {Play::shared(kAt, 512)});
    for (int32_t w = 0; w < 4 && commits; ++w)
      play.checker->group_commits(play.at(w, kAll, "wgmma.commit_group.sync.aligned"), AsyncKind::wgmma);
    play.end();
    EXPECT_EQ(play.rules(), "uncommitted");
  }
}

struct Store {
  bool commits = true, waits = true, read_only = true, syncs = true;
  const char* rules = "";
};

// The source of a bulk store is overwritten.
TEST(BulkStore, SourceWrittenAgain) {
  for (const Store s :
       {Store{}, Store{.read_only = false}, Store{.commits = false, .rules = "missing-wait"},
        Store{.waits = false, .rules = "missing-wait"}, Store{.syncs = false, .rules = "missing-wait"}}) {
    Play play;
    const auto fill = [&] {
      play.store(play.at(1, kAll, "st.shared"), kAt, 16, 16);
      play.checker->proxy_fence(play.at(1, kAll, "fence.proxy.async"), FencedSpaces::all);
      play.barrier({0, 1});
    };
    fill();
    play.issue(play.at(0, kOne, "cp.async.bulk.tensor"), AsyncKind::bulk_store, {Play::shared(kAt, 512)}, {});
    if (s.commits) play.checker->group_commits(play.at(0, kOne, "cp.async.bulk.commit_group"), AsyncKind::bulk_store);
    if (s.waits) {
      play.checker->group_waits(play.at(0, kOne, "cp.async.bulk.wait_group"), AsyncKind::bulk_store, 0, s.read_only);
    }
    if (s.syncs) play.barrier({0, 1});
    fill();
    EXPECT_EQ(play.rules(), s.rules);
  }
}

// All lanes of a warp may issue the same copy. The copy is an error if a lane, another warp or a later iteration
// repeats the copy. Bytes or places that differ in part are also an error.
TEST(BulkStore, LanesOfOneInstructionMayMakeTheSameCopy) {
  enum class Between { nothing, commit, reads_are_done, store };
  struct Second {
    int32_t warp;
    uint32_t lane;
    Between between;
    uint32_t from, to;  // offset from the bytes of the first access
    std::string rules;
  };
  for (const Second& c :
       {Second{0, 2, Between::nothing, 0, 0, ""}, Second{0, 1, Between::nothing, 0, 0, "missing-wait"},
        Second{1, 2, Between::nothing, 0, 0, "missing-wait"}, Second{0, 2, Between::commit, 0, 0, "missing-wait"},
        Second{0, 2, Between::reads_are_done, 0, 0, "missing-wait"}, Second{0, 2, Between::store, 0, 0, "missing-wait"},
        Second{0, 2, Between::nothing, 32, 0, "missing-wait"}, Second{0, 2, Between::nothing, 0, 16, "missing-wait"}}) {
    std::vector<uint32_t> out(1024);
    Play play({}, {{"out", out.data(), 4096, true, true}});
    play.store(play.at(0, kAll, "st.shared"), kAt, 16, 16);
    play.checker->proxy_fence(play.at(0, kAll, "fence.proxy.async"), FencedSpaces::all);
    play.barrier({0, 1});
    Actor issuer = play.at(0, 1, "cp.async.bulk");
    const auto copy = [&](uint32_t from, uint32_t to) {
      play.issue(issuer, AsyncKind::bulk_store, {Play::shared(kAt + from, 32)}, {Play::global(&out[to / 4], 32)});
    };
    copy(0, 0);
    // Only the first lane has waited, because the second lane counts other groups.
    if (c.between == Between::commit || c.between == Between::reads_are_done)
      play.checker->group_commits(play.at(0, 1, "cp.async.bulk.commit_group"), AsyncKind::bulk_store);
    if (c.between == Between::reads_are_done)
      play.checker->group_waits(play.at(0, 1, "cp.async.bulk.wait_group.read"), AsyncKind::bulk_store, 0, true);
    if (c.between == Between::store) play.store(play.at(0, 1, "st.shared"), kAt + 0x1000);
    issuer.warp = c.warp;
    issuer.lanes = c.lane;
    copy(c.from, c.to);
    EXPECT_EQ(play.rules(), c.rules) << play.text();
  }
}

TEST(BulkStore, AWaitForReadsDoesNotCoverWrites) {
  for (const bool read_only : {true, false}) {
    std::vector<uint32_t> out(1024);
    Play play({}, {{"out", out.data(), 4096, true, true}});
    play.store(play.at(0, kOne, "st.shared"), kAt, 16, 16);
    play.checker->proxy_fence(play.at(0, kOne, "fence.proxy.async"), FencedSpaces::all);
    play.issue(play.at(0, kOne, "cp.async.bulk"), AsyncKind::bulk_store, {Play::shared(kAt, 16)},
               {Play::global(out.data(), 16)});
    play.checker->group_commits(play.at(0, kOne, "cp.async.bulk.commit_group"), AsyncKind::bulk_store);
    play.checker->group_waits(play.at(0, kOne, "cp.async.bulk.wait_group"), AsyncKind::bulk_store, 0, read_only);
    play.load(play.at(0, kOne, "ld.global"), reinterpret_cast<uint64_t>(out.data()), 4, 0, Memory::global);
    EXPECT_EQ(play.rules(), read_only ? "missing-wait" : "");
    if (read_only) {
      EXPECT_EQ(play.checker->findings()[0].subject, "out");
    }
  }
}

TEST(BulkStore, AtExit) {
  for (const bool commits : {false, true}) {
    for (const bool waits : {false, true}) {
      Play play;
      play.store(play.at(0, kOne, "st.shared"), kAt, 16, 16);
      play.checker->proxy_fence(play.at(0, kOne, "fence.proxy.async"), FencedSpaces::all);
      play.issue(play.at(0, kOne, "cp.async.bulk"), AsyncKind::bulk_store, {Play::shared(kAt, 16)}, {});
      if (commits) play.checker->group_commits(play.at(0, kOne, "cp.async.bulk.commit_group"), AsyncKind::bulk_store);
      if (waits)
        play.checker->group_waits(play.at(0, kOne, "cp.async.bulk.wait_group"), AsyncKind::bulk_store, 0, true);
      play.end();
      EXPECT_EQ(play.rules(), commits && waits ? "" : "unwaited-store");
    }
  }
}

TEST(CpAsync, EachThreadWaitsForItsOwn) {
  Play play;
  std::vector<Span> writes;
  for (uint32_t i = 0; i < 32; ++i) writes.push_back(Play::shared(kAt + 16 * i, 16));
  play.issue(play.at(0, kAll, "cp.async.cg.shared.global"), AsyncKind::cp_async, {}, writes);
  play.checker->group_commits(play.at(0, kAll, "cp.async.commit_group"), AsyncKind::cp_async);
  play.checker->group_waits(play.at(0, kAll, "cp.async.wait_group"), AsyncKind::cp_async, 0, false);
  play.load(play.at(0, kAll, "ld.shared"), kAt, 16, 16);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(0, 0xffff, "ld.shared"), kAt + 16, 16, 16);
  EXPECT_EQ(play.rules(), "missing-wait");

  Play no_findings;
  no_findings.issue(no_findings.at(0, kAll, "cp.async.cg.shared.global"), AsyncKind::cp_async, {}, writes);
  no_findings.checker->group_commits(no_findings.at(0, kAll, "cp.async.commit_group"), AsyncKind::cp_async);
  no_findings.issue(no_findings.at(0, kAll, "cp.async.cg.shared.global"), AsyncKind::cp_async, {},
                    {Play::shared(kAt + 4096, 16)});
  no_findings.checker->group_commits(no_findings.at(0, kAll, "cp.async.commit_group"), AsyncKind::cp_async);
  no_findings.checker->group_waits(no_findings.at(0, kAll, "cp.async.wait_group"), AsyncKind::cp_async, 1, false);
  no_findings.barrier({0, 1, 2, 3});
  no_findings.load(no_findings.at(2, kAll, "ld.shared"), kAt + 16, 16, 0);
  EXPECT_EQ(no_findings.text(), "");
  no_findings.load(no_findings.at(2, kAll, "ld.shared"), kAt + 4096, 16, 0);
  EXPECT_EQ(no_findings.rules(), "missing-wait");
}

TEST(CpAsync, ArrivesAtABarrier) {
  Play play;
  const BarrierId id = play.mbarrier();
  const AsyncId op =
      play.issue(play.at(0, kAll, "cp.async.ca.shared.global"), AsyncKind::cp_async, {}, {Play::shared(kAt, 512)});
  play.checker->async_signals(op, id, 0);
  play.checker->mbarrier_completes(id, 0);
  play.wait(play.at(1, kAll, "mbarrier.try_wait"), id, 0);
  play.load(play.at(1, kAll, "ld.shared"), kAt, 16, 16);
  EXPECT_EQ(play.text(), "");
}

TEST(Operations, WhatWasDoneBeforeTheIssueIsPassedOn) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.store(play.at(0, kOne, "st.shared"), kAt + kTile);
  const AsyncId op =
      play.issue(play.at(0, kOne, "cp.async.bulk"), AsyncKind::bulk_load, {}, {Play::shared(kAt, kTile)});
  play.store(play.at(0, kOne, "st.shared"), kAt + kTile + 4);
  play.checker->async_signals(op, id, kTile);
  play.checker->mbarrier_completes(id, 0);
  play.wait(play.at(1, kAll, "mbarrier.try_wait"), id, 0);
  play.load(play.at(1, kOne, "ld.shared"), kAt + kTile);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(1, kOne, "ld.shared"), kAt + kTile + 4);
  EXPECT_EQ(play.rules(), "data-race");
}

// The checker removes completed operations, so that any number of them is possible.
TEST(Operations, AreForgotten) {
  Play play;
  const BarrierId id = play.mbarrier();
  const Actor load = play.at(0, kOne, "cp.async.bulk"), wait = play.at(0, kOne, "mbarrier.try_wait");
  const AsyncId first = play.issue(load, AsyncKind::bulk_load, {}, {Play::shared(kAt + 4096, 16)});
  play.checker->async_signals(first, id, 16);
  for (uint64_t n = 0; n < 200000; ++n) {
    play.load_box(load, id, n, kAt, 16);
    play.wait(wait, id, n);
  }
  play.load(play.at(1, kOne, "ld.shared"), kAt + 4096, 16);
  ASSERT_EQ(play.rules(), "missing-wait");
  EXPECT_EQ(play.checker->findings()[0].other.instruction, load.instruction);
}

}  // namespace
}  // namespace tandem::vgpu
