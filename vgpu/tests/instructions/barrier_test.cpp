// Tests of PTX ISA, "Parallel Synchronization and Communication Instructions": barriers of blocks and clusters,
// mbarriers, fences.
#include "base/text.h"
#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

// Defines registers of most bodies. Thread t of block b writes its words to out, 16 bytes each.
constexpr const char* kProlog = R"(
  .reg .b32 t, b, n, x, y, z, w, at, bar;
  .reg .b64 in, out, state, wide;
  .reg .pred p, q;
  ld.param.u64 out, [p0];
  mov.u32 t, %tid.x;
  mov.u32 b, %ctaid.x;
  mov.u32 n, %ntid.x;
  mad.lo.s32 x, b, n, t;
  mad.wide.u32 out, x, 16, out;
)";

BenchKernel kernel_of(const std::string& body, u32 threads, u32 blocks = 1, u32 cluster = 1) {
  BenchKernel kernel;
  kernel.body = kProlog + body;
  kernel.block = {threads, 1, 1}, kernel.grid = {blocks, 1, 1}, kernel.cluster = {cluster, 1, 1};
  if (cluster > 1) kernel.directives = ".explicitcluster";
  kernel.memory = {Memory::out(threads * blocks * 16)};
  return kernel;
}
// Calls check(thread of the grid, its words).
template <class F>
void try_kernel(const BenchKernel& kernel, F&& check) {
  on_each(kernel, [&](const Bench&, const BenchKernel& done) {
    const u32 threads = kernel.block.x * kernel.grid.x;
    for (u32 i = 0; i < threads; ++i) {
      u32 words[4];
      for (u32 j = 0; j < 4; ++j) words[j] = done.memory[0].at<u32>(4 * i + j);
      check(i, words);
    }
  });
}

TEST(Barrier, OrdersTheBlock) {
  for (const char* sync : {"bar.sync 0;", "barrier.sync 0;", "barrier.sync.aligned 0;", "bar.sync 3, 128;",
                           "bar.cta.sync 5;", "barrier.cta.sync.aligned 15, 128;"}) {
    SCOPED_TRACE(sync);
    // Each thread reads a word of another warp, twice.
    try_kernel(kernel_of(std::string(R"(
      .shared .b32 words[128];
      mov.u32 at, words;
      mad.lo.s32 at, t, 4, at;
      mul.lo.s32 x, t, 7;
      st.shared.b32 [at], x;
    )") + sync + R"(
      xor.b32 y, t, 96;
      mov.u32 z, words;
      mad.lo.s32 z, y, 4, z;
      ld.shared.b32 w, [z];
      st.global.b32 [out], w;
    )" + sync + R"(
      st.shared.b32 [at], t;
    )" + sync + R"(
      ld.shared.b32 w, [z];
      st.global.b32 [out+4], w;
    )",
                         128),
               [](u32 i, const u32* words) {
                 EXPECT_EQ(words[0], 7 * (i ^ 96));
                 EXPECT_EQ(words[1], i ^ 96);
               });
  }
}

// Warps 0 and 1 write, arrive and continue; warps 2 and 3 wait for them.
TEST(Barrier, ArrivesWithoutWaiting) {
  for (const char* arrive : {"bar.arrive 2, 128;", "barrier.arrive 2, 128;", "barrier.cta.arrive.aligned 2, 128;"})
    try_kernel(kernel_of(std::string(R"(
      .shared .b32 words[64];
      mov.u32 at, words;
      and.b32 x, t, 63;
      mad.lo.s32 at, x, 4, at;
      setp.ge.u32 p, t, 64;
      @p bra wait;
      add.s32 y, t, 1000;
      st.shared.b32 [at], y;
    )") + arrive + R"(
      st.global.b32 [out], t;
      bra done;
      wait:
      bar.sync 2, 128;
      ld.shared.b32 y, [at];
      st.global.b32 [out], y;
      done:)",
                         128),
               [](u32 i, const u32* words) { EXPECT_EQ(words[0], i < 64 ? i : i - 64 + 1000); });
}

TEST(Barrier, Reduces) {
  try_kernel(kernel_of(R"(
      rem.u32 x, t, 3;
      setp.eq.u32 p, x, 0;
      bar.red.popc.u32 y, 0, p;
      st.global.b32 [out], y;
      bar.red.and.pred q, 0, p;
      selp.b32 y, 1, 0, q;
      st.global.b32 [out+4], y;
      bar.red.or.pred q, 0, 96, p;
      selp.b32 y, 1, 0, q;
      st.global.b32 [out+8], y;
      setp.lt.u32 p, t, 1000;
      barrier.cta.red.and.pred q, 0, p;
      selp.b32 y, 1, 0, q;
      st.global.b32 [out+12], y;)",
                       96),
             [](u32, const u32* words) {
               EXPECT_EQ(words[0], 32u);
               EXPECT_EQ(words[1], 0u);
               EXPECT_EQ(words[2], 1u);
               EXPECT_EQ(words[3], 1u);
             });
}

TEST(Barrier, OfAWarp) {
  try_kernel(kernel_of(R"(
      .shared .b32 words[32];
      mov.u32 at, words;
      mad.lo.s32 z, t, 4, at;
      st.shared.b32 [z], t;
      bar.warp.sync 0xffffffff;
      xor.b32 x, t, 21;
      mad.lo.s32 z, x, 4, at;
      ld.shared.b32 y, [z];
      st.global.b32 [out], y;)",
                       32),
             [](u32 i, const u32* words) { EXPECT_EQ(words[0], i ^ 21); });
}

// Fences alone change nothing: all forms are executed between a store and a load.
TEST(Fence, EveryForm) {
  for (const char* fence : {"membar.cta;",
                            "membar.gl;",
                            "membar.sys;",
                            "fence.acq_rel.cta;",
                            "fence.acq_rel.cluster;",
                            "fence.acq_rel.gpu;",
                            "fence.acq_rel.sys;",
                            "fence.sc.cta;",
                            "fence.sc.cluster;",
                            "fence.sc.gpu;",
                            "fence.sc.sys;",
                            "fence.proxy.async;",
                            "fence.proxy.async.global;",
                            "fence.proxy.async.shared::cta;",
                            "fence.proxy.async.shared::cluster;",
                            "fence.proxy.alias;",
                            "fence.mbarrier_init.release.cluster;",
                            "fence.proxy.tensormap::generic.release.gpu;",
                            "fence.acquire.sync_restrict::shared::cluster.cluster;",
                            "fence.release.sync_restrict::shared::cta.cluster;",
                            "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
                            "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;",
                            "griddepcontrol.wait;",
                            "griddepcontrol.launch_dependents;"}) {
    SCOPED_TRACE(fence);
    try_kernel(kernel_of("add.s32 x, t, 9;\nst.global.b32 [out], x;\n" + std::string(fence) +
                             "\nld.global.b32 y, [out];\nadd.s32 y, y, 1;\nst.global.b32 [out+4], y;",
                         64),
               [](u32 i, const u32* words) { EXPECT_EQ(words[1], i + 10); });
  }
}

// ---- mbarrier ----
constexpr const char* kBarrier = R"(
  .shared .align 8 .b64 barrier;
  mov.u32 bar, barrier;
  setp.eq.u32 p, t, 0;
)";

TEST(Mbarrier, CountsArrivals) {
  // The threads of four warps arrive. Each waits for the phase of its token.
  for (const char* arrive :
       {"mbarrier.arrive.shared::cta.b64 state, [bar];", "mbarrier.arrive.release.cta.shared::cta.b64 state, [bar];",
        "mbarrier.arrive.shared.b64 state, [bar], 1;",
        "mbarrier.arrive.release.cluster.shared::cta.b64 state, [bar];"}) {
    SCOPED_TRACE(arrive);
    try_kernel(kernel_of(std::string(kBarrier) + R"(
      .shared .b32 words[128];
      @p mbarrier.init.shared::cta.b64 [bar], 128;
      bar.sync 0;
      mov.u32 at, words;
      mad.lo.s32 at, t, 4, at;
      st.shared.b32 [at], t;
    )" + arrive + R"(
      again:
      mbarrier.try_wait.shared::cta.b64 q, [bar], state;
      @!q bra again;
      xor.b32 x, t, 127;
      mov.u32 at, words;
      mad.lo.s32 at, x, 4, at;
      ld.shared.b32 y, [at];
      st.global.b32 [out], y;
      mbarrier.test_wait.parity.shared::cta.b64 q, [bar], 0;
      selp.b32 y, 1, 0, q;
      st.global.b32 [out+4], y;
      mbarrier.test_wait.parity.shared::cta.b64 q, [bar], 1;
      selp.b32 y, 1, 0, q;
      st.global.b32 [out+8], y;
      bar.sync 0;
      @p mbarrier.inval.shared::cta.b64 [bar];)",
                         128),
               [](u32 i, const u32* words) {
                 EXPECT_EQ(words[0], i ^ 127);
                 EXPECT_EQ(words[1], 1u) << "phase 0 is complete";
                 EXPECT_EQ(words[2], 0u) << "phase 1 is not";
               });
  }
}

TEST(Mbarrier, FreshBarrierLetsTheOddParityPass) {
  try_kernel(kernel_of(std::string(kBarrier) + R"(
      @p mbarrier.init.shared::cta.b64 [bar], 1;
      bar.sync 0;
      mbarrier.test_wait.parity.shared::cta.b64 q, [bar], 0;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out], x;
      mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 q, [bar], 1;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out+4], x;
      mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 1, 20;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out+8], x;)",
                       32),
             [](u32, const u32* words) {
               EXPECT_EQ(words[0], 0u);
               EXPECT_EQ(words[1], 1u);
               EXPECT_EQ(words[2], 1u);
             });
}

// Runs several phases, whose parity alternates.
TEST(Mbarrier, PhasesFollowEachOther) {
  try_kernel(kernel_of(std::string(kBarrier) + R"(
      @p mbarrier.init.shared::cta.b64 [bar], 64;
      bar.sync 0;
      mov.u32 x, 0;
      mov.u32 y, 0;
      loop:
      mbarrier.arrive.shared::cta.b64 _, [bar];
      wait:
      mbarrier.try_wait.parity.shared::cta.b64 q, [bar], y;
      @!q bra wait;
      xor.b32 y, y, 1;
      add.s32 x, x, 1;
      setp.lt.u32 q, x, 5;
      @q bra loop;
      st.global.b32 [out], x;
      st.global.b32 [out+4], y;)",
                       64),
             [](u32, const u32* words) {
               EXPECT_EQ(words[0], 5u);
               EXPECT_EQ(words[1], 1u);
             });
}

TEST(Mbarrier, CountsBytes) {
  // An arrival expects bytes, which an instruction then completes.
  for (const char* expect :
       {"mbarrier.arrive.expect_tx.shared::cta.b64 state, [bar], 48;",
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [bar], 48;",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 48;\nmbarrier.arrive.shared::cta.b64 _, [bar];",
        "mbarrier.expect_tx.shared::cta.b64 [bar], 48;\nmbarrier.arrive.shared::cta.b64 _, [bar], 1;"}) {
    SCOPED_TRACE(expect);
    try_kernel(kernel_of(std::string(kBarrier) + R"(
      mov.u32 z, 0;
      @!p bra done;
      mbarrier.init.shared::cta.b64 [bar], 1;
    )" + expect + R"(
      mbarrier.test_wait.parity.shared::cta.b64 q, [bar], 0;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out], x;
      mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16;
      mbarrier.test_wait.parity.shared::cta.b64 q, [bar], 0;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out+4], x;
      mbarrier.complete_tx.shared::cta.b64 [bar], 32;
      mbarrier.test_wait.parity.shared::cta.b64 q, [bar], 0;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out+8], x;
      done:)",
                         32),
               [](u32 i, const u32* words) {
                 if (i != 0) return;
                 EXPECT_EQ(words[0], 0u);
                 EXPECT_EQ(words[1], 0u);
                 EXPECT_EQ(words[2], 1u);
               });
  }
}

TEST(Mbarrier, DropsAndPendingCounts) {
  try_kernel(kernel_of(std::string(kBarrier) + R"(
      @!p bra done;
      mbarrier.init.shared::cta.b64 [bar], 5;
      mbarrier.arrive.noComplete.shared::cta.b64 state, [bar], 2;
      mbarrier.pending_count.b64 x, state;
      st.global.b32 [out], x;
      // Two more, of which one will not be expected again.
      mbarrier.arrive_drop.shared::cta.b64 state, [bar];
      mbarrier.arrive.shared::cta.b64 _, [bar], 2;
      mbarrier.test_wait.shared::cta.b64 q, [bar], state;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out+4], x;
      // The next phase expects four.
      mbarrier.arrive.shared::cta.b64 state, [bar], 3;
      mbarrier.test_wait.shared::cta.b64 q, [bar], state;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out+8], x;
      mbarrier.arrive.shared::cta.b64 state, [bar];
      mbarrier.test_wait.shared::cta.b64 q, [bar], state;
      selp.b32 x, 1, 0, q;
      st.global.b32 [out+12], x;
      done:)",
                       32),
             [](u32 i, const u32* words) {
               if (i != 0) return;
               EXPECT_EQ(words[0], 5u);
               EXPECT_EQ(words[1], 1u);
               EXPECT_EQ(words[2], 0u);
               EXPECT_EQ(words[3], 1u);
             });
}

// ---- Clusters ----
TEST(Cluster, RegistersAndAddresses) {
  BenchKernel kernel = kernel_of(R"(
      .shared .b32 word;
      mov.u32 at, word;
      mov.u32 x, %cluster_ctarank;
      st.global.b32 [out], x;
      mov.u32 y, %cluster_nctarank;
      st.global.b32 [out+4], y;
      setp.eq.u32 p, t, 0;
      add.s32 z, x, 500;
      @p st.shared.b32 [at], z;
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;
      // The next block's word, and whose it is.
      add.s32 z, x, 1;
      rem.u32 z, z, y;
      mapa.shared::cluster.u32 w, at, z;
      ld.shared::cluster.b32 y, [w];
      st.global.b32 [out+8], y;
      getctarank.shared::cluster.u32 y, w;
      st.global.b32 [out+12], y;
      barrier.cluster.arrive.release.aligned;
      barrier.cluster.wait.acquire.aligned;
      barrier.cluster.arrive.release;
      barrier.cluster.wait.acquire;)",
                                 32, 8, 4);
  try_kernel(kernel, [](u32 i, const u32* words) {
    const u32 rank = i / 32 % 4;
    EXPECT_EQ(words[0], rank);
    EXPECT_EQ(words[1], 4u);
    EXPECT_EQ(words[2], (rank + 1) % 4 + 500);
    EXPECT_EQ(words[3], (rank + 1) % 4);
  });
}

TEST(Cluster, GenericAddresses) {
  try_kernel(kernel_of(R"(
      .shared .b32 word;
      .reg .b64 mine, other;
      mov.u32 x, %cluster_ctarank;
      xor.b32 y, x, 1;
      mov.u32 at, word;
      cvt.u64.u32 mine, at;
      cvta.shared.u64 mine, mine;
      mapa.u64 other, mine, y;
      setp.eq.u32 p, t, 0;
      add.s32 z, x, 40;
      barrier.cluster.arrive.relaxed.aligned;
      barrier.cluster.wait.aligned;
      @p st.u32 [other], z;
      barrier.cluster.arrive;
      barrier.cluster.wait;
      ld.shared.b32 w, [at];
      st.global.b32 [out], w;
      getctarank.u64 w, other;
      st.global.b32 [out+4], w;
      isspacep.shared::cluster q, other;
      selp.b32 w, 1, 0, q;
      st.global.b32 [out+8], w;
      isspacep.shared::cta q, other;
      selp.b32 w, 1, 0, q;
      st.global.b32 [out+12], w;
      barrier.cluster.arrive;
      barrier.cluster.wait;)",
                       32, 4, 2),
             [](u32 i, const u32* words) {
               const u32 rank = i / 32 % 2;
               EXPECT_EQ(words[0], (rank ^ 1) + 40);
               EXPECT_EQ(words[1], rank ^ 1);
               EXPECT_EQ(words[2], 1u);
               EXPECT_EQ(words[3], 0u);
             });
}

// All threads of a cluster add to the counter of block 0, by its distributed address.
TEST(Cluster, RemoteAtomicsAndBarriers) {
  try_kernel(kernel_of(R"(
      .shared .b32 counter;
      .shared .align 8 .b64 barrier;
      mov.u32 at, counter;
      mov.u32 bar, barrier;
      mov.u32 x, %cluster_ctarank;
      setp.eq.u32 p, t, 0;
      @p st.shared.b32 [at], 0;
      @p mbarrier.init.shared::cta.b64 [bar], 96;
      fence.mbarrier_init.release.cluster;
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;
      mapa.shared::cluster.u32 y, at, 0;
      mapa.shared::cluster.u32 z, bar, 0;
      atom.relaxed.cluster.shared::cluster.add.u32 w, [y], 1;
      red.shared::cluster.add.u32 [y], 2;
      and.b32 w, t, 1;
      setp.eq.u32 q, w, 0;
      @q mbarrier.arrive.release.cluster.shared::cluster.b64 _, [z];
      @!q mbarrier.arrive.shared::cluster.b64 _, [z];
      setp.ne.u32 q, x, 0;
      @q bra leave;
      wait:
      mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [bar], 0;
      @!q bra wait;
      ld.shared.b32 w, [at];
      st.global.b32 [out], w;
      leave:
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;)",
                       32, 3, 3),
             [](u32 i, const u32* words) {
               if (i >= 32) return;
               EXPECT_EQ(words[0], 288u);
             });
}

// Data and its byte count go to the neighbour together.
TEST(Cluster, StAsync) {
  for (const char* stores : {"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [z], x, [w];\n"
                             "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [z+4], t, [w];\n"
                             "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [z+8], {x, t}, [w];",
                             "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [z], {x, t, x, t}, [w];"})
    try_kernel(kernel_of(str_cat(R"(
      .shared .align 16 .b32 words[128];
      .shared .align 8 .b64 barrier;
      mov.u32 at, words;
      mov.u32 bar, barrier;
      mov.u32 x, %cluster_ctarank;
      xor.b32 y, x, 1;
      setp.eq.u32 p, t, 0;
      @p mbarrier.init.shared::cta.b64 [bar], 1;
      fence.mbarrier_init.release.cluster;
      @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;
      mad.lo.s32 z, t, 16, at;
      mapa.shared::cluster.u32 z, z, y;
      mapa.shared::cluster.u32 w, bar, y;
      mad.lo.s32 x, x, 1000, t;
      )",
                                 stores, R"(
      wait:
      mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;
      @!q bra wait;
      mad.lo.s32 z, t, 16, at;
      .reg .b32 r<4>;
      ld.shared.v4.b32 {r0, r1, r2, r3}, [z];
      st.global.v4.b32 [out], {r0, r1, r2, r3};
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;)"),
                         32, 2, 2),
               [](u32 i, const u32* words) {
                 const u32 t = i % 32, from = i / 32 ^ 1;
                 EXPECT_EQ(words[0], 1000 * from + t);
                 EXPECT_EQ(words[1], t);
                 EXPECT_EQ(words[2], 1000 * from + t);
                 EXPECT_EQ(words[3], t);
               });
}

TEST(Cluster, RedAsync) {
  struct Case {
    const char* form;
    u32 before, want;  // 32 threads add, or choose among, t + 3
  };
  for (const Case& c :
       {Case{"inc.u32", 0, 32}, Case{"add.u32", 7, 7 + 496 + 96}, Case{"add.s32", 7, 7 + 496 + 96},
        Case{"min.u32", 1000, 3}, Case{"max.s32", 5, 34}, Case{"and.b32", 0xff, 0}, Case{"or.b32", 64, 64 + 63}})
    try_kernel(kernel_of(R"(
      .shared .align 8 .b32 words[2];
      .shared .align 8 .b64 barrier;
      mov.u32 at, words;
      mov.u32 bar, barrier;
      mov.u32 x, %cluster_ctarank;
      xor.b32 y, x, 1;
      setp.eq.u32 p, t, 0;
      @p st.shared.b32 [at], )" +
                             std::to_string(c.before) + R"(;
      @p mbarrier.init.shared::cta.b64 [bar], 1;
      fence.mbarrier_init.release.cluster;
      @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;
      mapa.shared::cluster.u32 z, at, y;
      mapa.shared::cluster.u32 w, bar, y;
      add.u32 x, t, )" + (std::string(c.form) == "inc.u32" ? "1000" : "3") +
                             R"(;
      red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.)" +
                             c.form + R"( [z], x, [w];
      wait:
      mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;
      @!q bra wait;
      ld.shared.b32 x, [at];
      st.global.b32 [out], x;
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;)",
                         32, 2, 2),
               [&](u32, const u32* words) { EXPECT_EQ(words[0], c.want) << c.form; });
}

// ---- Registers ----
TEST(Registers, SetMaxNReg) {
  BenchKernel kernel = kernel_of(R"(
      setp.ge.u32 p, t, 128;
      @p bra more;
      setmaxnreg.dec.sync.aligned.u32 40;
      bra.uni done;
      more:
      setmaxnreg.inc.sync.aligned.u32 160;
      done:
      st.global.b32 [out], t;)",
                                 256);
  kernel.directives = ".maxntid 256\n.minnctapersm 1\n.maxnreg 104";
  for (const Needs needs : {Needs::hopper, Needs::blackwell}) {
    kernel.needs = needs;
    try_kernel(kernel, [](u32 i, const u32* words) { EXPECT_EQ(words[0], i); });
  }
}

}  // namespace
}  // namespace tandem::test
