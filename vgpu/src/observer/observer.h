// Events of a running kernel for observers: the checker, the trace. Events come in the order of execution. Host threads
// may execute blocks of different clusters at once, so calls about one cluster are never concurrent, but calls about
// different clusters may be.
#pragma once

#include <cstdint>
#include <span>

#include "vgpu/src/observer/finding.h"

namespace tandem::vgpu {

// Lanes of a warp at an instruction.
struct Actor {
  int32_t cta = 0;     // linear in the grid
  int32_t warp = 0;    // in the block
  uint32_t lanes = 0;  // mask
  int32_t instruction = 0;
};

enum class Memory : uint8_t { global, shared, local, tensor };  // parameters and constants are only read: no events
enum class Order : uint8_t { weak, relaxed, acquire, release, acquire_release };
enum class Scope : uint8_t { cta, cluster, gpu, system };

// The memory whose accesses a proxy fence orders. A block's shared memory and its cluster's are not distinguished.
enum class FencedSpaces : uint8_t { all, shared, global };

// A range of bytes. global: a host address. shared: an offset in the shared window of block `cta`. tensor: lane << 16 |
// column in block `cta`'s tensor memory, bytes = 4 * columns, over `rows` lanes.
struct Span {
  Memory memory = Memory::global;
  int32_t cta = 0;
  uint64_t address = 0;
  uint32_t bytes = 0;
  uint32_t rows = 1;
  int32_t warp = -1;  // the one warp of a wgmma that reads these rows; -1: all
  friend bool operator==(const Span&, const Span&) = default;
};

// The values that a warp is about to store.
class StoredValues {
 public:
  virtual ~StoredValues() = default;
  // Returns true if memory already holds these bytes, so that the store changes nothing. Only for lanes whose address
  // is valid.
  virtual bool change_nothing(int lane) const = 0;
  // Returns true if the program stores the same constant whenever it executes the instruction.
  virtual bool are_constant() const = 0;
};

// An ordinary access of a warp. Lane i of the actor's mask accesses `bytes` bytes at address[i] of memory. Shared
// memory belongs to block cta[i], or to the actor's block if cta is null.
struct LaneAccess {
  Memory memory = Memory::global;
  bool reads = false, writes = false;
  bool atomic = false;  // atom, red, and ld/st with an order other than weak
  Order order = Order::weak;
  Scope scope = Scope::gpu;
  uint32_t bytes = 0;
  const uint64_t* address = nullptr;
  const int32_t* cta = nullptr;
  const StoredValues* stored = nullptr;  // null: not a weak store
};

enum class AsyncKind : uint8_t {
  bulk_load,
  bulk_store,
  cp_async,
  st_async,
  wgmma,
  tcgen05_mma,
  tcgen05_cp,
  tcgen05_shift,
  tcgen05_ld,
  tcgen05_st,
  cluster_launch
};
using AsyncId = uint64_t;

// An mbarrier object: offset in the shared window of a block.
struct BarrierId {
  int32_t cta = 0;
  uint32_t address = 0;
};

class Observer {
 public:
  virtual ~Observer() = default;

  // Blocks. shared_bytes: the size of its shared window, including the part that the system reserves.
  virtual void block_begins(int32_t /*cta*/, int32_t /*cluster*/, int32_t /*threads*/, uint32_t /*shared_bytes*/) {}
  virtual void block_ends(int32_t /*cta*/) {}
  virtual void exits(const Actor&) {}

  // This function is called before each instruction is executed. The checker turns these calls off; traces use them
  // (wants_instructions).
  virtual bool wants_instructions() const { return false; }
  virtual void executes(const Actor&) {}

  // This function is called before an access to ordinary memory. Returns the lanes that must not access, because the
  // memory does not exist; they read 0.
  virtual uint32_t access(const Actor&, const LaneAccess&) { return 0; }

  // Asynchronous operations access memory between issue and completion. `lanes` of the actor are the issuing threads. A
  // wgmma has an event with the same id for each of its four warps, and the last one names all reads. Returns false if
  // the memory does not exist. No data moves then, but the operation still completes.
  virtual bool async_issues(const Actor&, AsyncKind, AsyncId, std::span<const Span> /*reads*/,
                            std::span<const Span> /*writes*/) {
    return true;
  }
  virtual void async_completes(AsyncId) {}                               // the operation's data has moved
  virtual void async_signals(AsyncId, BarrierId, uint32_t /*bytes*/) {}  // completion is seen by waiters of this phase
  // Groups: cp.async, bulk stores, wgmma (per thread, or per warp for wgmma). All operations of these threads and kind
  // since their last commit form the group. wait: at most `pending` groups are still outstanding. read_only: only their
  // reads are known to be complete (cp.async.bulk.wait_group.read).
  virtual void group_commits(const Actor&, AsyncKind) {}
  virtual void group_waits(const Actor&, AsyncKind, uint32_t /*pending*/, bool /*read_only*/) {}
  // tcgen05.commit: all earlier mma, cp and shift operations of this thread complete before that barrier's phase does.
  virtual void tcgen05_commits(const Actor&, std::span<const BarrierId>) {}
  virtual void tcgen05_waits(const Actor&, bool /*loads*/, bool /*stores*/) {}
  virtual void tcgen05_fence(const Actor&, bool /*before*/) {}
  // peer: the other block of a pair that allocates together; -1: the block allocates alone.
  virtual void tmem_allocates(const Actor&, uint32_t /*column*/, uint32_t /*columns*/, int32_t /*peer*/) {}
  virtual void tmem_frees(const Actor&, uint32_t /*column*/, uint32_t /*columns*/) {}

  // Barriers. pass: the wait has returned. Named barriers: bar.sync and bar.arrive arrive. After all have arrived, the
  // next arrival belongs to the next generation. When bar.sync passes, all arrivals of its generation have happened.
  virtual void named_arrives(const Actor&, uint32_t /*barrier*/) {}
  virtual void named_completes(int32_t /*cta*/, uint32_t /*barrier*/) {}
  virtual void named_passes(const Actor&, uint32_t /*barrier*/) {}
  virtual void cluster_arrives(const Actor&, Order) {}
  virtual void cluster_passes(const Actor&) {}
  virtual void warp_syncs(const Actor&) {}  // bar.warp.sync of these lanes
  virtual void mbarrier_inits(const Actor&, BarrierId, uint32_t /*count*/) {}
  virtual void mbarrier_invalidates(const Actor&, BarrierId) {}
  virtual void mbarrier_arrives(const Actor&, BarrierId, uint32_t /*count*/, uint32_t /*expect_bytes*/, Order, Scope) {}
  virtual void mbarrier_completes(BarrierId, uint64_t /*phase*/) {}  // phase: 0, 1, 2, ... since init
  virtual void mbarrier_passes(const Actor&, BarrierId, uint64_t /*phase*/, Order, Scope) {
  }  // the last completed phase

  // Fences.
  virtual void fence(const Actor&, Order, Scope) {}
  virtual void proxy_fence(const Actor&, FencedSpaces) {}  // generic <-> async
  virtual void wgmma_fence(const Actor&) {}

  // Findings of the machine: deadlock, misuse of barriers, divergence, pending registers.
  virtual void finds(Finding) {}
};

}  // namespace tandem::vgpu
