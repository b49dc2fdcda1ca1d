// Sites and epochs. A site is a place in the program that one warp or one asynchronous operation has executed. An epoch
// is one execution of a site. Shadow memory holds epochs.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "vgpu/src/check/clock.h"
#include "vgpu/src/observer/observer.h"

namespace tandem::vgpu::check {

enum class SiteKind : uint8_t { thread, async };

// The clock entry that means that an asynchronous operation has completed. time 0: no entry yet.
struct ClockEntry {
  uint16_t row = 0;
  uint16_t lane = 0;  // or kTogether: each of the site's lanes has a group
  int32_t time = 0;
};

// In place of a lane: all lanes of a site at once.
inline constexpr int kTogether = 32;

struct Site {
  int32_t cluster = 0, cta = 0, instruction = -1;
  uint32_t lanes = 0;  // lanes that executed it together
  uint16_t warp = 0;   // index in the block
  uint16_t row = 0;    // row of the warp in clocks
  SiteKind kind = SiteKind::thread;
  AsyncKind async = AsyncKind::bulk_load;
  uint32_t copy = 0;         // the number of a bulk store in the warp, see LastCopy
  bool is_constant = false;  // the instruction always stores the same constant
  std::atomic<ClockEntry> done = ClockEntry{};

  void set(const Site& x) {
    cluster = x.cluster, cta = x.cta, instruction = x.instruction, lanes = x.lanes, warp = x.warp, row = x.row;
    kind = x.kind, async = x.async, copy = x.copy, is_constant = x.is_constant;
    done.store(x.done.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
};

// The scope of an atomic access. Weak accesses have none.
inline constexpr int kWeak = 0;
inline constexpr int scope_code(Scope scope) { return 1 + static_cast<int>(scope); }

// The smallest unit that asynchronous operations move; see shadow.h.
inline constexpr uint32_t kGranule = 16;

// 0 means no epoch. An epoch names a lane of its site, all of its lanes together, or a run. A run is adjacent lanes
// that share a granule, each with the same number of bytes.
class Epoch {
 public:
  static constexpr int32_t kLatest = (1 << 24) - 1;  // represents all later times
  static constexpr uint32_t kMaxSites = 1u << 27;

  Epoch() = default;
  Epoch(uint32_t site, int32_t time, int lane, int scope, bool wrote)
      : bits_(uint64_t{site} << 37 | static_cast<uint64_t>(time) << 13 | static_cast<uint64_t>(lane) << 4 |
              static_cast<uint64_t>(scope) << 1 | static_cast<uint64_t>(wrote)) {}
  // The run whose lane `first` has the granule's first `bytes` bytes: 1, 2, 4 or 8.
  static Epoch run(uint32_t site, int32_t time, int first, uint32_t bytes, int scope, bool wrote) {
    return {site, time, (1 + std::countr_zero(bytes)) * kRuns + first, scope, wrote};
  }
  explicit operator bool() const { return bits_ != 0; }
  friend bool operator==(Epoch a, Epoch b) = default;

  uint32_t site() const { return static_cast<uint32_t>(bits_ >> 37); }
  int32_t time() const { return static_cast<int32_t>(bits_ >> 13 & 0xffffff); }
  int lane() const { return who() % kRuns; }  // or kTogether; for a run, its first lane
  int scope() const { return static_cast<int>(bits_ >> 1 & 7); }
  bool wrote() const { return bits_ & 1; }

  bool is_run() const { return who() >= kRuns; }
  uint32_t bytes_of_lane() const { return 1u << (who() / kRuns - 1); }  // only for a run
  // For a run, the epoch of the lane that has this byte of the granule; otherwise the epoch itself.
  Epoch at(uint32_t byte) const {
    return is_run() ? Epoch(site(), time(), lane() + static_cast<int>(byte / bytes_of_lane()), scope(), wrote())
                    : *this;
  }
  // together: the site's lanes.
  uint32_t lanes(uint32_t together) const {
    if (is_run()) return ((1u << kGranule / bytes_of_lane()) - 1) << lane();
    return lane() == kTogether ? together : 1u << lane();
  }

 private:
  static constexpr int kRuns = 64;  // runs are numbered from here, by the bytes of a lane
  int who() const { return static_cast<int>(bits_ >> 4 & 0x1ff); }

  uint64_t bits_ = 0;
};

// Sites by number, from 1 on. One thread at a time adds and removes. Other threads may read sites whose numbers they
// received through a lock.
class Sites {
 public:
  // most: the maximum number of sites. Further sites share the last site.
  explicit Sites(uint32_t most);
  uint32_t add();
  // Removes all sites except the marked sites.
  void keep(const std::vector<bool>& marked);
  Site& operator[](uint32_t site) { return chunks_[site / kChunk][site % kChunk]; }
  const Site& operator[](uint32_t site) const { return chunks_[site / kChunk][site % kChunk]; }
  uint32_t count() const { return count_ - static_cast<uint32_t>(free_.size()); }
  uint32_t end() const { return count_; }  // above the highest number in use so far

 private:
  static constexpr uint32_t kChunk = 1024;
  std::vector<std::unique_ptr<Site[]>> chunks_;  // all exist from the beginning, but are empty
  std::vector<uint32_t> free_;
  uint32_t count_ = 1;
};

}  // namespace tandem::vgpu::check
