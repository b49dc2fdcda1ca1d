// The state of the checker for a running cluster.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "vgpu/src/check/shadow.h"
#include "vgpu/src/check/site.h"
#include "vgpu/src/check/warp.h"

namespace tandem::vgpu::check {

inline constexpr uint32_t kReservedShared = 0x400;  // user data of the shared window begins here

inline constexpr uint32_t kTensorLanes = 128;  // tensor memory is shadowed column by column

// Shadow pages of a memory that belongs to one block, allocated on first access.
class Pages {
 public:
  template <class F>
  void touch(uint64_t address, uint64_t bytes, Touch& touch, F&& enters_page) {
    for (const uint64_t end = address + bytes; address < end;) {
      const uint64_t number = address / kPageBytes, begin = number * kPageBytes;
      const uint64_t last = end - begin < kPageBytes ? end - begin : kPageBytes;
      enters_page(begin);
      page(number).touch(static_cast<uint32_t>(address - begin), static_cast<uint32_t>(last), touch);
      address = begin + last;
    }
  }
  Page& page(uint64_t number) {
    if (pages_.size() <= number) pages_.resize(number + 1);
    if (!pages_[number]) pages_[number] = std::make_unique<Page>(false);
    return *pages_[number];
  }
  void forget(uint64_t address, uint64_t bytes) {
    for (uint64_t at = address; at < address + bytes; at += kPageBytes - at % kPageBytes) {
      const uint64_t begin = at - at % kPageBytes, last = std::min<uint64_t>(address + bytes - begin, kPageBytes);
      if (at / kPageBytes < pages_.size() && pages_[at / kPageBytes])
        pages_[at / kPageBytes]->forget(static_cast<uint32_t>(at - begin), static_cast<uint32_t>(last));
    }
  }
  template <class F>  // f(epoch, address)
  void for_each(F&& f) const {
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (!pages_[i]) continue;
      pages_[i]->for_each(0, kPageBytes, [&](Epoch epoch, uint32_t at) { f(epoch, i * kPageBytes + at); });
    }
  }

 private:
  std::vector<std::unique_ptr<Page>> pages_;
};

struct CheckedNamedBarrier {
  VectorClock arrived;  // published in the current generation
  int32_t generation = 0;
  std::array<VectorClock, 4> complete;          // the last generations, by number
  std::array<int32_t, kLanes> generation_of{};  // generation in which each warp arrived last
};

struct ClusterBarrier {
  VectorClock published;
  int32_t generation = -1;
};

struct CheckedMbarrier {
  uint16_t row = 0;
  uint8_t lane = 0;           // entry in clocks: phases completed, over all lives
  int32_t phases_before = 0;  // completed in earlier lives of the barrier
  int64_t phase = 0;          // number of the phase that has begun
  bool alive = false;
  Epoch init;
  bool fenced = false;                  // a fence.mbarrier_init followed the init
  VectorClock published;                // published by all arrivals so far
  std::array<VectorClock, 2> complete;  // published when the last phases of each parity completed
  uint32_t count = 1;                   // arrivals of a phase
  int32_t committed = 0;                // phase, over all lives, of a peer's last tcgen05.commit
  Actor committed_by;
  int32_t any_committed = 0;  // phase of the last tcgen05.commit of any block
  ClockEntry commit;          // the entry of that commit in clocks
  Actor commit_by;
  ClockEntry completion_entry() const {
    return {row, lane, static_cast<int32_t>(phases_before + phase + 1)};  // identifies the current phase
  }
};

// An asynchronous operation that may still signal a barrier.
struct CheckedOperation {
  uint64_t id = 0;
  AsyncKind kind = AsyncKind::bulk_load;
  Actor actor;
  VectorClock published;  // published by the issuing threads, for threads that wait
  uint32_t copy = 0;      // the number of a bulk store
  // The site of spans in one block's memory, or in global memory.
  struct SpanSite {
    int32_t cta = 0;  // owner of the memory, unless it is global
    uint32_t by = 0;  // lanes
    uint32_t site = 0;
    bool global = false, writes = false;
  };
  std::vector<SpanSite> parts;
};

// A warp's part of a wgmma that not all warps of its warpgroup have issued yet.
struct Quarter {
  int32_t warp = 0, committed = 0;  // committed: earlier groups of the warp
  LaneGroup share;
};

struct TmemAllocation {
  uint32_t column = 0, columns = 0;
  Actor by;
};

struct CheckedBlock {
  int32_t cta = 0, threads = 0;
  uint32_t shared_end = 0;  // offsets in the shared window end here
  uint16_t first_row = 0;   // row of its first warp in clocks
  size_t first_warp = 0;    // index into CheckedCluster::warps
  Pages shared, tensor;
  std::array<CheckedNamedBarrier, 16> named;
  VectorClock at_exit;                       // knowledge of all threads that have exited
  std::vector<std::vector<uint32_t>> local;  // lanes that have written, by warp and byte
  std::vector<TmemAllocation> columns;       // allocations of tensor memory
};

struct CheckedCluster {
  CheckedCluster() : sites(kMaxSites) {}
  static constexpr uint32_t kMaxSites = 1u << 20;

  int32_t id = 0;
  int running = 0;  // blocks
  std::deque<CheckedBlock> blocks;
  std::deque<CheckedWarp> warps;
  Sites sites;
  uint16_t rows = 0;
  // The stream rows that hold the entries of barriers and of warpgroups.
  uint16_t barrier_row = 0, wgmma_row = 0;
  int barriers_in_row = kLanes, warpgroups_in_row = kLanes;
  uint16_t begun_row = 0;  // by place in blocks: 1 if the block is known to have begun

  PageCache global_pages;
  bool async_in_shared = false;  // an asynchronous operation has touched shared memory
  std::array<ClusterBarrier, 4> barrier;
  std::unordered_map<uint64_t, CheckedMbarrier> mbarriers;  // by block and offset
  std::unordered_map<uint64_t, CheckedOperation> operations;
  std::deque<uint64_t> operation_order, copy_order;             // the oldest first; copy: by cp.async
  std::unordered_map<uint64_t, std::vector<Quarter>> quarters;  // by operation
  struct Published {
    VectorClock clock;
    uint64_t version = 0;  // number of writes
  };
  std::unordered_map<uint64_t, Published> shared_syncs, global_syncs;  // published through atomics
  std::set<uint32_t> reported;                                         // sites that were left outstanding

  enum class Lanes : uint8_t { unknown, apart, aligned };
  std::vector<Lanes> lanes_of;  // by instruction: whether it is .aligned

  uint32_t sites_kept = 0;  // when unused sites were last removed

  CheckedBlock* find(int32_t cta) {
    if (blocks[0].cta == cta) return &blocks[0];
    for (CheckedBlock& block : blocks)
      if (block.cta == cta) return &block;
    return nullptr;
  }
  // Returns true if two blocks, whose ranks differ in the last bit, cooperate on tensor memory.
  bool are_pair(int32_t a, int32_t b) const {
    for (size_t i = 0; i + 1 < blocks.size(); i += 2) {
      const int32_t x = blocks[i].cta, y = blocks[i + 1].cta;
      if ((x == a && y == b) || (x == b && y == a)) return true;
    }
    return false;
  }
};

}  // namespace tandem::vgpu::check
