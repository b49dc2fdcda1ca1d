// What the threads of a warp know. Threads that have done the same share one knowledge: a warp is a few shares, mostly
// one.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "vgpu/src/check/clock.h"
#include "vgpu/src/check/site.h"

namespace tandem::vgpu::check {

// Groups of asynchronous operations: cp.async, or bulk stores. Each thread counts its own.
struct Groups {
  uint16_t reads = 0, writes = 0;           // rows of clocks: of which groups the reads, the writes are done
  Times committed{}, reads_done{}, done{};  // as the thread itself knows
  uint32_t open = 0;                        // lanes with operations since their last commit
  std::array<int32_t, kLanes> last{};       // instruction of each lane's last operation
};

// Bulk stores are numbered, all those alike that lanes issue together: right behind each other, by one instruction, of
// the same bytes to the same place.
struct LastCopy {
  uint32_t number = 0;
  uint64_t event = 0;  // of the warp
  int32_t instruction = -1;
  uint32_t lanes = 0;
  std::vector<Span> reads, writes;
};

// Threads with the same knowledge.
struct LaneGroup {
  uint32_t lanes = 0;
  VectorClock known;
  ClockRef fenced_here;  // known.seen at the last fence of any scope
  VectorClock observed;  // by relaxed reads: known behind the next fence
  ClockRef tensor_seen;  // known.seen at the last tcgen05.fence::after_thread_sync
};

// Sites of a warp by instruction and lanes; those that it was at lately are found without a search.
class KnownSites {
 public:
  // 0 of one that is new.
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

class CheckedWarp {
 public:
  int32_t cta = 0, index = 0;  // of the block, in it
  uint16_t row = 0;
  uint32_t lanes = kAllLanes;  // those that exist

  uint64_t events = 0;  // so far
  std::unique_ptr<Groups> cp_async, bulk;
  LastCopy last_copy;
  int32_t wgmma_committed = 0, wgmma_done = 0;  // groups
  int32_t wgmma_open = -1, wgmma_last = -1;     // instruction of the last product since the last commit; before it
  uint16_t wgmma_row = 0;                       // where clocks tell of the warpgroup's groups; 0: it has none yet
  uint8_t wgmma_lane = 0;
  Times cluster_arrivals{};

  // Of tensor memory. Rows of clocks, 0: none yet. Products, copies and shifts of a thread between two commits, loads
  // and stores of the warp between two waits are groups.
  uint16_t tensor_row = 0, tensor_io_row = 0;
  Times tensor_committed{};
  int32_t tensor_loads = 0, tensor_stores = 0;                // groups
  int32_t tensor_fenced_loads = 0, tensor_fenced_stores = 0;  // those that a fence::before_thread_sync came behind
  uint32_t tensor_stale = 0;  // lanes that were told something and have executed no fence::after_thread_sync since

  // Strong reads of global memory. What they tell is looked up at the warp's next event: the read itself comes after
  // its event, and the write that it sees may be another host thread's, between the two.
  struct Read {
    uint64_t address = 0;
    uint32_t lanes = 0;
    bool acquires = false;
  };
  std::vector<Read> reads;

  KnownSites shared_sites, global_sites;

  void begin(uint32_t existing);
  // What these lanes do from now on bears this time. Each release ends a time.
  int32_t time() const { return time_; }

  // f(share, lanes of it); what belongs to a share only in part becomes one of its own.
  template <class F>
  void for_each_share(uint32_t of, F&& f);
  const LaneGroup& share_of(int lane) const;

  // What these lanes tell together.
  VectorClock release(uint32_t of);
  // What they tell by a relaxed write: what they knew at their last fence. beyond_cluster: what anybody fenced for all
  // the GPU, as they know.
  VectorClock release_relaxed(uint32_t of, bool beyond_cluster) const;
  // The same within the cluster, with what it would tell if it were a release.
  VectorClock hand_over(uint32_t of);
  // What they tell another block by a release that reaches their own only: of ordinary writes those before a fence.
  VectorClock release_narrow(uint32_t of);
  void acquire(uint32_t of, const VectorClock& published);
  void acquire_relaxed(uint32_t of, const VectorClock& published);
  void fence(uint32_t of, bool acquires, bool releases, bool beyond_block);
  void proxy_fence(uint32_t of, FencedSpaces spaces);
  // tcgen05.fence::after_thread_sync: what they know of tensor memory is ordered before what they do there.
  void tensor_fence(uint32_t of);
  // From now on all of these lanes know what each of them has done.
  void sync(uint32_t of);
  // All of these lanes have seen an operation complete.
  void learn(uint32_t of, uint16_t stream, int lane, int32_t time);

  // A thread of these lanes knows what these others (of a row of its cluster) have done up to a time. own: by program
  // order it knows that of itself.
  bool seen(const LaneGroup& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const;
  // Or would know, if relaxed operations told all.
  bool handed(const LaneGroup& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const;
  bool proxied(const LaneGroup& share, uint32_t by, Memory memory, uint16_t of_row, uint32_t of_lanes,
               int32_t time) const;
  // The same by releases whose scope reaches here.
  static bool widely(const LaneGroup& share, uint16_t of_row, uint32_t of_lanes, int32_t time) {
    return !share.known.wide || knows(share.known.wide, of_row, of_lanes, time);
  }

  void touched(uint32_t by) { dirty_ |= by; }

 private:
  void end_time() { time_ += time_ < Epoch::kLatest; }
  void raise_own(VectorClock* published, uint32_t of) const;

  std::vector<LaneGroup> shares_;
  int32_t time_ = 1;
  BySpace<Times> proxied_;  // until when each lane's accesses came before a proxy fence
  Times fenced_{};          // and a fence
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
