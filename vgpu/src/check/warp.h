// Knowledge of the threads of a warp. Threads with the same history share one object, so that a warp usually has one.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "vgpu/src/check/clock.h"
#include "vgpu/src/check/site.h"

namespace tandem::vgpu::check {

// Groups of asynchronous operations: cp.async, or bulk stores. Each thread counts its own.
struct CheckedGroups {
  uint16_t reads = 0, writes = 0;           // clock rows of completed reads and completed writes
  Times committed{}, reads_done{}, done{};  // according to the thread itself
  uint32_t open = 0;                        // lanes with operations since their last commit
  std::array<int32_t, kLanes> last{};       // instruction of each lane's last operation
};

// Bulk stores are numbered. Equal stores that lanes issue together share a number: consecutive executions of one
// instruction for the same bytes and the same place.
struct LastCopy {
  uint32_t number = 0;
  uint64_t event = 0;  // count of the warp's events
  int32_t instruction = -1;
  uint32_t lanes = 0;
  std::vector<Span> reads, writes;
};

// Threads with the same knowledge.
struct LaneGroup {
  uint32_t lanes = 0;
  VectorClock known;
  ClockRef fenced_here;  // known.seen at the last fence of any scope
  VectorClock observed;  // from relaxed reads: known after the next fence
  ClockRef tensor_seen;  // known.seen at the last tcgen05.fence::after_thread_sync
};

// Sites of a warp by instruction and lanes. Recent sites are found without a search.
class KnownSites {
 public:
  // Returns 0 for a new site.
  uint32_t& find(int32_t instruction, uint32_t lanes) {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(instruction)) << 32 | lanes;
    Slot& slot = lately_[static_cast<uint32_t>(instruction) % lately_.size()];
    if (!slot.site || slot.key != key) slot = {key, &all_[key]};
    return *slot.site;
  }
  template <class F>
  void for_each(F&& f) const {
    for (const auto& [key, site] : all_) f(site);
  }

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t* site = nullptr;
  };
  std::array<Slot, 16> lately_;
  std::unordered_map<uint64_t, uint32_t> all_;
};

// The versions of published knowledge that lanes have learnt. A loop that polls an address learns each version once,
// because repeated joins of the same knowledge change nothing.
class KnownVersions {
 public:
  // Returns the version that all of these lanes know, else 0.
  uint64_t find(uint64_t address, uint32_t lanes, bool acquires) const {
    const auto found = known_[acquires].find(address);
    return found != known_[acquires].end() && (lanes & ~found->second.lanes) == 0 ? found->second.version : 0;
  }
  void learn(uint64_t address, uint32_t lanes, bool acquires, uint64_t version) {
    Known& known = known_[acquires][address];
    known = {version, version == known.version ? known.lanes | lanes : lanes};
  }

 private:
  struct Known {
    uint64_t version = 0;
    uint32_t lanes = 0;
  };
  std::unordered_map<uint64_t, Known> known_[2];  // by relaxed reads; by acquiring reads
};

class CheckedWarp {
 public:
  int32_t cta = 0, index = 0;  // block, and index in the block
  uint16_t row = 0;
  uint32_t lanes = kAllLanes;  // lanes that exist

  uint64_t events = 0;  // number of events
  std::unique_ptr<CheckedGroups> cp_async, bulk;
  LastCopy last_copy;
  int32_t wgmma_committed = 0, wgmma_done = 0;  // groups
  int32_t wgmma_open = -1, wgmma_last = -1;     // last product since the last commit; before the commit
  uint16_t wgmma_row = 0;                       // clock row of the warpgroup's groups; 0: none yet
  uint8_t wgmma_lane = 0;
  Times cluster_arrivals{};

  // Tensor memory. Rows of clocks; 0: none yet. Products, copies and shifts of a thread between two commits form a
  // group, and so do loads and stores of the warp between two waits.
  uint16_t tensor_row = 0, tensor_io_row = 0;
  Times tensor_committed{};
  int32_t tensor_loads = 0, tensor_stores = 0;                // groups
  int32_t tensor_fenced_loads = 0, tensor_fenced_stores = 0;  // groups that precede a fence::before_thread_sync
  uint32_t tensor_stale = 0;                                  // lanes that need a fence::after_thread_sync

  // Strong reads of global memory. The warp's next event updates the knowledge of such reads, because the read
  // follows its event. Another host thread may write between the two.
  struct Read {
    uint64_t address = 0;
    uint32_t lanes = 0;
    bool acquires = false;
  };
  std::vector<Read> reads;
  KnownVersions versions_here[2], versions_beyond;  // published in this cluster: shared, global; by all clusters

  KnownSites shared_sites, global_sites;

  void begin(uint32_t existing);
  // The time of the lanes' next accesses. Each release begins a new time.
  int32_t time() const { return time_; }

  // Calls f(share, its lanes). A share that is covered in part is split.
  template <class F>
  void for_each_share(uint32_t of, F&& f);
  const LaneGroup& share_of(int lane) const;

  // Publishes the knowledge of these lanes together.
  VectorClock release(uint32_t of);
  // The knowledge that a relaxed write publishes: the state at the last fence. beyond_cluster: the state at the last
  // fence of GPU scope.
  VectorClock release_relaxed(uint32_t of, bool beyond_cluster) const;
  // The same within the cluster, and the knowledge that a release would publish.
  VectorClock hand_over(uint32_t of);
  // The knowledge that a release of block scope publishes to another block. The knowledge includes ordinary writes only
  // up to the last fence.
  VectorClock release_narrow(uint32_t of);
  void acquire(uint32_t of, const VectorClock& published);
  void acquire_relaxed(uint32_t of, const VectorClock& published);
  void fence(uint32_t of, bool acquires, bool releases, bool beyond_block);
  void proxy_fence(uint32_t of, FencedSpaces spaces);
  // tcgen05.fence::after_thread_sync: the accesses to tensor memory that the lanes know of are ordered before the
  // lanes' later accesses to tensor memory.
  void tensor_fence(uint32_t of);
  // Afterwards each of these lanes knows the events of all these lanes.
  void sync(uint32_t of);
  // Records that all of these lanes have seen an operation complete.
  void learn(uint32_t of, uint16_t stream, int lane, int32_t time);

  // Returns true if a thread of these lanes knows the events of other lanes (of a row of its cluster) up to a time. A
  // thread knows its own events by program order.
  bool seen(const LaneGroup& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const;
  // Returns true if the thread would know the events if relaxed operations published everything.
  bool handed(const LaneGroup& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const;
  bool proxied(const LaneGroup& share, uint32_t by, Memory memory, uint16_t of_row, uint32_t of_lanes,
               int32_t time) const;
  // Returns true if the thread knows the events by releases whose scope includes this block.
  static bool widely(const LaneGroup& share, uint16_t of_row, uint32_t of_lanes, int32_t time) {
    return !share.known.wide || knows(share.known.wide, of_row, of_lanes, time);
  }

  void touched(uint32_t by) { dirty_ |= by; }

 private:
  void end_time() { time_ += time_ < Epoch::kLatest; }
  void raise_own(VectorClock* published, uint32_t of) const;

  std::vector<LaneGroup> shares_;
  int32_t time_ = 1;
  BySpace<Times> proxied_;  // time of each lane's last proxy fence
  Times fenced_{};          // time of each lane's last fence
  uint32_t dirty_ = 0;      // lanes that did something since they were last in a sync
};

template <class F>
void CheckedWarp::for_each_share(uint32_t of, F&& f) {
  for (size_t i = 0, count = shares_.size(); i < count; ++i) {
    const uint32_t both = shares_[i].lanes & of;
    if (both == 0) continue;
    if (both != shares_[i].lanes) {
      LaneGroup rest = shares_[i];
      rest.lanes &= ~both;
      shares_[i].lanes = both;
      shares_.push_back(std::move(rest));
    }
    f(shares_[i], both);
  }
}

}  // namespace tandem::vgpu::check
