// Tests of tensor memory.
#include <gtest/gtest.h>

#include "vgpu/tests/check/play.h"

namespace tandem::vgpu {
namespace {

constexpr uint32_t kMmaWarp = 4;

// Four warps load and store, and one warp issues products. 128 columns are allocated.
class Tensor : public testing::Test {
 protected:
  Tensor() {
    done = play.mbarrier();
    ready = play.mbarrier(kBar + 8);
    play.checker->tmem_allocates(play.at(0, kAll, "tcgen05.alloc.cta_group::1.sync.aligned"), 0, 128, -1);
    play.barrier({0, 1, 2, 3, 4});
  }
  void multiply(uint32_t column = 0, uint32_t columns = 128) {
    play.issue(play.at(kMmaWarp, kOne, "tcgen05.mma.cta_group::1"), AsyncKind::tcgen05_mma, {},
               {Play::tensor(0, column, columns, 128)});
  }
  void commit(uint64_t phase) {
    play.checker->tcgen05_commits(play.at(kMmaWarp, kOne, "tcgen05.commit.cta_group::1"), std::array{done});
    play.checker->mbarrier_completes(done, phase);
  }
  void load(int32_t warp, uint32_t column = 0, uint32_t columns = 32, bool waits = true) {
    play.issue(play.at(warp, kAll, "tcgen05.ld.sync.aligned"), AsyncKind::tcgen05_ld,
               {Play::tensor(32 * static_cast<uint32_t>(warp % 4), column, columns, 32)}, {});
    if (waits) play.checker->tcgen05_waits(play.at(warp, kAll, "tcgen05.wait::ld.sync.aligned"), true, false);
  }
  void store(int32_t warp, bool waits = true) {
    play.issue(play.at(warp, kAll, "tcgen05.st.sync.aligned"), AsyncKind::tcgen05_st, {},
               {Play::tensor(32 * static_cast<uint32_t>(warp), 0, 32, 32)});
    if (waits) play.checker->tcgen05_waits(play.at(warp, kAll, "tcgen05.wait::st.sync.aligned"), false, true);
  }
  void fence(int32_t warp, bool before, uint32_t lanes = kAll) {
    play.checker->tcgen05_fence(
        play.at(warp, lanes, before ? "tcgen05.fence::before_thread_sync" : "tcgen05.fence::after_thread_sync"),
        before);
  }
  void wait(int32_t warp, BarrierId id, uint64_t phase, uint32_t lanes = kAll) {
    play.wait(play.at(warp, lanes, "mbarrier.try_wait"), id, phase);
  }
  void free_and_end() {
    play.barrier({0, 1, 2, 3, 4});
    play.checker->tmem_frees(play.at(0, kAll, "tcgen05.dealloc.cta_group::1.sync.aligned"), 0, 128);
    play.end();
  }

  Play play{{.threads = 160}};
  BarrierId done, ready;
};

TEST_F(Tensor, ProductCommitWaitLoad) {
  multiply();
  commit(0);
  for (int32_t w = 0; w < 4; ++w) {
    wait(w, done, 0);
    fence(w, false);
    load(w);
  }
  free_and_end();
  EXPECT_EQ(play.text(), "");
}

TEST_F(Tensor, LoadWithoutAWait) {
  multiply();
  commit(0);
  fence(0, false);
  load(0);
  EXPECT_EQ(play.rules(), "missing-wait");
}

TEST_F(Tensor, LoadWithoutACommit) {
  multiply();
  commit(0);
  multiply();
  play.checker->mbarrier_completes(done, 1);  // by another thread's arrival
  wait(0, done, 1);
  fence(0, false);
  load(0);
  EXPECT_EQ(play.rules(), "missing-wait");
}

TEST_F(Tensor, ProductsOfOneThreadAreInOrder) {
  multiply();
  multiply();
  multiply(64, 64);
  commit(0);
  wait(2, done, 0);
  fence(2, false);
  load(2);
  EXPECT_EQ(play.text(), "");
}

// The next product overwrites cells that a warp may still be loading.
TEST_F(Tensor, OverwrittenBehindALoad) {
  for (const bool waits : {true, false}) {
    multiply();
    commit(waits ? 0 : 1);
    wait(1, done, waits ? 0 : 1);
    fence(1, false);
    load(1, 0, 32, waits);
    fence(1, true);
    play.checker->mbarrier_arrives(play.at(1, kAll, "mbarrier.arrive"), ready, 32, 0, Order::release, Scope::cta);
    play.checker->mbarrier_completes(ready, waits ? 0 : 1);
    wait(kMmaWarp, ready, waits ? 0 : 1, kOne);
    fence(kMmaWarp, false, kOne);
    multiply();
    EXPECT_EQ(play.rules(), waits ? "" : "missing-wait");
  }
}

TEST_F(Tensor, StoresNeedTheirWait) {
  store(1, false);
  fence(1, true);
  play.arrive(play.at(1, kAll, "mbarrier.arrive"), ready);
  play.checker->mbarrier_completes(ready, 0);
  wait(kMmaWarp, ready, 0, kOne);
  fence(kMmaWarp, false, kOne);
  play.issue(play.at(kMmaWarp, kOne, "tcgen05.mma.cta_group::1"), AsyncKind::tcgen05_mma, {Play::tensor(0, 0, 32, 128)},
             {Play::tensor(0, 64, 32, 128)});
  EXPECT_EQ(play.rules(), "missing-wait");
}

TEST_F(Tensor, FencesAreWanted) {
  store(1);
  play.arrive(play.at(1, kAll, "mbarrier.arrive"), ready);
  play.checker->mbarrier_completes(ready, 0);
  wait(kMmaWarp, ready, 0, kOne);
  fence(kMmaWarp, false, kOne);
  multiply();
  EXPECT_EQ(play.rules(), "missing-tcgen05-fence");
  EXPECT_NE(play.text().find("by the letter"), std::string::npos);
  commit(0);
  wait(0, done, 0);
  load(0);
  EXPECT_EQ(play.rules(), "missing-tcgen05-fence missing-tcgen05-fence");
}

// Scales are copied over the scales of the preceding product, and over unused scales. A fence after the wait for
// products suffices; the loading warps may pass further barriers.
TEST_F(Tensor, BarriersBehindAFenceTakeNothingFromIt) {
  multiply();
  commit(0);
  for (int32_t w = 0; w < 4; ++w) {
    play.wait(play.at(w, kAll, "mbarrier.try_wait"), done, 0);
    fence(w, false);
  }
  play.barrier({0, 1, 2, 3}, 1);
  for (int32_t w = 0; w < 4; ++w) load(w);
  EXPECT_EQ(play.text(), "");
}

TEST_F(Tensor, CopiesOfOneThreadAreInOrder) {
  const auto copy = [&] {
    play.issue(play.at(kMmaWarp, kOne, "tcgen05.cp.cta_group::1"), AsyncKind::tcgen05_cp, {},
               {Play::tensor(0, 0, 4, 128)});
  };
  copy();
  copy();
  multiply();
  copy();
  commit(0);
  wait(0, done, 0);
  free_and_end();
  EXPECT_EQ(play.text(), "");
}

// dealloc requires only that all operations have completed, so that a relaxed cluster barrier suffices.
TEST_F(Tensor, FreedBehindARelaxedBarrier) {
  multiply();
  commit(0);
  wait(1, done, 0);
  const int32_t arrival = play.at(0, kAll, "barrier.cluster.arrive.relaxed.aligned").instruction,
                passes = play.at(0, kAll, "barrier.cluster.wait.aligned").instruction;
  for (int32_t w = 0; w < 5; ++w) play.checker->cluster_arrives({0, w, kAll, arrival}, Order::relaxed);
  for (int32_t w = 0; w < 5; ++w) play.checker->cluster_passes({0, w, kAll, passes});
  play.checker->tmem_frees(play.at(0, kAll, "tcgen05.dealloc.cta_group::1.sync.aligned"), 0, 128);
  play.end();
  EXPECT_EQ(play.text(), "");
}

// A block issues a product and the other block waits for it. Both barriers are signalled, and both blocks learn that
// the product used them.
TEST(TensorOfAPair, CommitToAPeerThatWaits) {
  Play play({.blocks = 2, .cluster = 2, .threads = 32});
  const BarrierId own = play.mbarrier(kBar, 0), peer = play.mbarrier(kBar, 1);
  play.cluster_barrier();
  const BarrierId both[] = {own, peer};
  play.checker->tcgen05_commits(play.at(0, 0, kOne, "tcgen05.commit.multicast::cluster"), both);
  for (const BarrierId id : both) play.checker->mbarrier_completes(id, 0);
  play.wait(play.at(0, 0, kAll, "mbarrier.try_wait"), own, 0);
  play.wait(play.at(1, 0, kAll, "mbarrier.try_wait"), peer, 0);
  play.end();
  EXPECT_EQ(play.text(), "");
}

TEST_F(Tensor, FreedTooEarly) {
  multiply();
  commit(0);
  play.checker->tmem_frees(play.at(0, kAll, "tcgen05.dealloc.cta_group::1.sync.aligned"), 0, 128);
  EXPECT_EQ(play.rules(), "missing-wait");
}

TEST_F(Tensor, NeverFreed) {
  play.end();
  EXPECT_EQ(play.rules(), "tmem-leak");
}

// The machine reports this access.
TEST_F(Tensor, BeyondItsEnd) {
  multiply(448, 128);
  EXPECT_FALSE(play.issued);
  EXPECT_EQ(play.text(), "");
}

TEST_F(Tensor, NothingWritten) {
  load(0, 0, 32);
  EXPECT_EQ(play.rules(), "uninitialised");
}

// Products read shared memory through the async proxy.
TEST_F(Tensor, OperandsInSharedMemory) {
  for (const bool fenced : {true, false}) {
    const uint32_t at = fenced ? kAt : kAt + 0x1000;
    play.store(play.at(0, kAll, "st.shared"), at, 16, 16);
    if (fenced) play.checker->proxy_fence(play.at(0, kAll, "fence.proxy.async"), FencedSpaces::all);
    play.barrier({0, 4});
    fence(kMmaWarp, false, kOne);
    play.issue(play.at(kMmaWarp, kOne, "tcgen05.mma.cta_group::1"), AsyncKind::tcgen05_mma, {Play::shared(at, 512)},
               {Play::tensor(0, 0, 32, 128)});
    EXPECT_EQ(play.rules(), fenced ? "" : "missing-proxy-fence");
  }
}

// A slot of shared memory is free once the commit's phase is complete.
TEST_F(Tensor, CommitFreesSharedMemory) {
  play.load_box(play.at(3, kOne, "cp.async.bulk.tensor"), ready, 0, kAt, 4096);
  wait(kMmaWarp, ready, 0, kOne);
  play.issue(play.at(kMmaWarp, kOne, "tcgen05.mma.cta_group::1"), AsyncKind::tcgen05_mma, {Play::shared(kAt, 4096)},
             {Play::tensor(0, 0, 32, 128)});
  commit(0);
  wait(3, done, 0, kOne);
  play.load_box(play.at(3, kOne, "cp.async.bulk.tensor"), ready, 1, kAt, 4096);
  EXPECT_EQ(play.text(), "");
  play.load_box(play.at(2, kOne, "cp.async.bulk.tensor"), ready, 2, kAt, 4096);
  EXPECT_NE(play.rules(), "");
}

}  // namespace
}  // namespace tandem::vgpu
