// The state of a running grid: Grid > Cluster > Block > Warp > Fragment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "vgpu/src/machine/address.h"
#include "vgpu/src/machine/code.h"
#include "vgpu/src/machine/machine.h"
#include "vgpu/src/machine/run/async.h"
#include "vgpu/src/machine/run/random.h"

namespace tandem::vgpu::units {
struct TensorMemory;
}

namespace tandem::vgpu::machine {

struct Grid;
struct Cluster;
struct Block;
struct Warp;
struct Warpgroup;

// The condition that a fragment waits for. deadlock.cpp prints a and b.
enum class WaitKind : uint8_t {
  none,
  lanes,
  named,
  cluster,
  mbarrier,
  wgmma,
  bulk,
  cp_async,
  tensor_memory,
  registers,
  tmem_columns,
  pair
};
struct Wait {
  WaitKind kind = WaitKind::none;
  uint64_t a = 0, b = 0;
};

// Lanes of a warp that execute together.
struct Fragment {
  uint32_t mask = 0;  // 0: not in use
  int32_t pc = 0;
  int32_t join = -1;        // index of the divergence that created the fragment
  bool tried = false;       // the op at pc must wait; `state` belongs to it
  bool time_is_up = false;  // the wait must end: an mbarrier.try_wait returns false
  uint64_t state = 0;
  Wait wait;
};

// A divergence: the lanes that rejoin at pc, and the lanes that have arrived.
struct Join {
  int32_t pc = -1;
  int32_t parent = -1;
  uint32_t lanes = 0, arrived = 0;  // lanes 0: not in use
};

struct Warp {
  Block* block = nullptr;
  int32_t index = 0;                 // in the block
  uint32_t alive = 0, launched = 0;  // lanes: now, and at the beginning
  std::byte* registers = nullptr;
  std::vector<std::byte> local;  // kLanes times Code::local_bytes
  std::array<Fragment, kLanes> fragments;
  std::array<Join, kLanes + 1> joins;
  int32_t next_fragment = 0;  // the next fragment to execute
  int32_t fragment_count = 0;
  uint64_t executed = 0;  // ops
  int64_t clock_reads = 0;
  int32_t thread_registers = 0;  // registers of each thread: setmaxnreg
  size_t reallocations = 0;      // setmaxnreg instructions that the warp has executed

  // Registers that asynchronous operations hold, by row of 32 * 4 bytes: the group or number after which they are free.
  std::vector<uint32_t> mma_writes, mma_reads, tmem_loads;
  uint32_t groups_committed = 0, groups_waited = 0;  // wgmma groups; the open group has the next number
  uint32_t loads_issued = 0, loads_waited = 0;       // tcgen05.ld operations
  std::vector<uint64_t> commit_marks;                // by group: how many wgmmas had been issued
  uint64_t mma_issued = 0;
  uint32_t fences = 0;            // number of executed wgmma.fence
  uint32_t fences_at_wait = 0;    // value of `fences` at the last wait for products
  std::vector<uint32_t> touched;  // by row: value of `fences` when another op touched it
  bool holds = false;             // some register may be held
  std::vector<uint32_t> written;  // lanes that have written each Code::may_be_unwritten

  // State by lane.
  std::array<uint32_t, kLanes> cluster_generation{};            // generation of the last barrier.cluster.arrive
  uint32_t cluster_arrived = 0;                                 // lanes that have arrived and not waited
  std::vector<LaneGroups> lane_groups;                          // bulk and cp.async groups; empty until the first
  std::vector<std::pair<uint32_t, AsyncRef>> last_commits;      // tcgen05.commit, by the lane that issued it
  std::vector<AsyncRef> tmem_pending_ops, tmem_pending_stores;  // outstanding tcgen05.ld and .st
};

struct NamedBarrier {
  uint32_t expected = 0, arrived = 0;  // threads
  uint32_t generation = 0;
  uint32_t count = 0, all = 1, any = 0;                 // state of the current reduction
  uint32_t last_count = 0, last_all = 0, last_any = 0;  // result of the last generation
  bool all_threads = false;                             // no count was given
};

struct Mbarrier {
  uint32_t address = 0;
  bool live = false;
  uint32_t expected = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
};

// An outstanding tcgen05 operation.
struct TensorOp {
  AsyncKind kind = AsyncKind::tcgen05_mma;
  AsyncRef op;
};

struct Block {
  Cluster* cluster = nullptr;
  int32_t cta = 0;   // linear in the grid
  int32_t rank = 0;  // in the cluster
  uint32_t ctaid[3] = {0, 0, 0};
  std::vector<std::byte> shared;  // from offset 0 of the window on
  std::vector<Warp> warps;
  std::byte* registers = nullptr;
  std::vector<std::byte> register_memory;
  int32_t threads_alive = 0;
  std::array<NamedBarrier, 16> named;
  std::vector<Mbarrier> mbarriers;
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  int32_t register_pool = 0;  // setmaxnreg: free registers

  std::unique_ptr<units::TensorMemory> tensor_memory;
  std::array<bool, 16> tmem_used{};  // by 32 columns
  bool tmem_relinquished = false;
  int32_t cta_group = 0;             // .cta_group of the block's tcgen05 instructions
  uint64_t pair_steps = 0;           // allocations that the block has reached with its peer
  std::vector<uint32_t> tmem_given;  // columns allocated for this block, not returned yet
  std::vector<TensorOp> tensor_ops;  // operations of the pair, in the block of even rank
};

struct Cluster {
  Grid* grid = nullptr;
  int32_t index = 0;  // linear in the grid
  std::vector<Block> blocks;
  std::vector<Warp*> warps;  // warps of all blocks
  AsyncQueue async;
  Random random;
  size_t next_warp = 0;
  int32_t threads_alive = 0;
  uint32_t barrier_generation = 0;
  int32_t barrier_arrived = 0;
  uint64_t events = 0;               // changes that may end a wait
  uint64_t executed = 0, quiet = 0;  // counted ops: all, and since the last event
  uint64_t seen_progress = 0;        // Grid::progress at the last count
  int64_t idle = 0, starving = 0;    // ops executed without an event
  int32_t hopeless = 0;              // rounds of waits that were ended
};

struct Grid {
  const Code* code = nullptr;
  const Model* model = nullptr;
  RunOptions options;
  Observer* observer = nullptr;
  bool traced = false, cooperative = false;
  gpu::Dim3 grid, block, cluster;
  uint32_t dynamic_shared = 0;
  uint32_t window_bytes = 0;  // bytes of a block's shared window
  std::vector<std::byte> parameters;
  int32_t threads = 0, warps = 0;  // threads and warps of a block
  int32_t launch_registers = 0;    // registers of a thread

  int32_t cluster_count = 0, cluster_blocks = 1;
  std::atomic<int32_t> begun{0};  // clusters that have begun, or been taken over
  std::vector<int32_t> order;     // order in which clusters begin; empty: by index
  std::atomic<bool> stopped{false};
  std::atomic<AsyncId> next_async{1};
  std::atomic<uint32_t> fences{0};    // executed by fences between host threads
  std::atomic<uint64_t> progress{0};  // rounds of clusters that had an event
  std::atomic<uint64_t> executed{0};  // ops
  std::mutex mutex;
  Status status;

  void stop(std::string sentence);
  // Returns the next cluster that has not begun, or -1.
  int32_t take_cluster();
};

// The objects that execute an op.
struct Context {
  Grid& grid;
  Cluster& cluster;
  Block& block;
  Warp& warp;
  Fragment& fragment;
  uint32_t mask;  // lanes of the fragment whose guard holds

  template <class T = uint32_t>
  T* row(int32_t at) const {
    return reinterpret_cast<T*>(warp.registers + at);
  }
  Actor actor(const Op& op) const { return {block.cta, warp.index, mask, op.source}; }

  // Reports a finding. Returns true if execution can continue.
  bool finds(Rule rule, const Op& op, std::string subject, std::string message, bool fatal = false) const;

  // Makes the fragment wait at an op that cannot proceed yet.
  Step wait(WaitKind kind, uint64_t a = 0, uint64_t b = 0) const {
    fragment.tried = true;
    fragment.wait = {kind, a, b};
    return Step::wait;
  }
};

// The same for an asynchronous operation, which no fragment executes.
bool report(Grid& grid, const Actor& actor, Rule rule, std::string subject, std::string message, bool fatal = false);

// Lowest lane of a mask.
inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }
// NOLINTBEGIN(bugprone-macro-parentheses): lane is a name to declare
#define TANDEM_EACH_LANE(lane, mask)                                                       \
  for (uint32_t lanes_left = (mask), lane = 0;                                             \
       lanes_left != 0 && (lane = static_cast<uint32_t>(__builtin_ctz(lanes_left)), true); \
       lanes_left &= lanes_left - 1)
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace tandem::vgpu::machine
