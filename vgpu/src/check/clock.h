// Vector clocks. A cluster numbers its rows. Each warp has a row, whose lanes are threads, then rows of streams of
// asynchronous operations, whose lanes are barriers or threads. For each lane of each row, a clock holds the time up to
// which events are known. An event of a thread at time t happened before every holder of an entry of at least t. An
// operation is complete for every holder of an entry of at least its phase or group.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "vgpu/src/check/ref.h"
#include "vgpu/src/observer/observer.h"

namespace tandem::vgpu::check {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = ~0u;

// Returns the lowest lane of a nonempty mask. To iterate: for (m; m; m &= m - 1) first_of(m).
inline int first_of(uint32_t lanes) { return std::countr_zero(lanes); }

using Times = std::array<int32_t, kLanes>;

// Clocks share rows. A row changes only while a single clock owns it.
struct Row {
  Times times{};
  int references = 0;
};

// Knowledge about other clusters, learnt through global memory. Clusters may share these objects, so that they never
// change.
using Rows = std::vector<Times>;
struct ClusterRows {
  int32_t cluster = 0;
  std::shared_ptr<const Rows> rows;
};
using Foreign = std::vector<ClusterRows>;           // ordered by cluster
using ForeignRef = std::shared_ptr<const Foreign>;  // null: nothing is known

struct Clock {
  std::vector<Ref<Row>> rows;  // without a row: nothing is known
  ForeignRef foreign;
  int references = 0;
};

using ClockRef = Ref<Clock>;  // without a clock: nothing is known

// Returns true if all these lanes have entries of at least time.
bool knows(const ClockRef& clock, uint16_t row, uint32_t lanes, int32_t time);
bool knows(const ClockRef& clock, int32_t cluster, uint16_t row, uint32_t lanes, int32_t time);

void join(ClockRef* clock, const ClockRef& other);
// Raises the entries of these lanes to at least the values in times.
void raise(ClockRef* clock, uint16_t row, uint32_t lanes, const Times& times);
void raise(ClockRef* clock, uint16_t row, int lane, int32_t time);

// The part of a clock that other clusters may learn through global memory: all entries, with the clock's rows under the
// name of its cluster.
ForeignRef export_clock(const ClockRef& clock, int32_t cluster);
void import_clock(ClockRef* clock, const ForeignRef& foreign, int32_t cluster);
void join(ForeignRef* foreign, const ForeignRef& other);

// A value each for shared and for global memory, because a proxy fence orders either or both.
template <class T>
struct BySpace {
  T shared = {}, global = {};
  T& of(Memory memory) { return memory == Memory::global ? global : shared; }
  const T& of(Memory memory) const { return memory == Memory::global ? global : shared; }
};

// The knowledge of a thread. A release publishes this knowledge.
struct VectorClock {
  ClockRef seen = {};              // has happened before
  BySpace<ClockRef> proxied = {};  // precedes a proxy fence: ordered for the async proxy
  ClockRef fenced = {};            // precedes a fence: a relaxed write passes it to other blocks
  ClockRef relaxed = {};           // additional entries if relaxed operations were strong
  ClockRef wide = {};              // published by releases whose scope reaches here; null: seen

  void join(const VectorClock& other) {
    if (wide || other.wide) {
      ClockRef all = wide ? wide : seen;
      check::join(&all, other.wide ? other.wide : other.seen);
      wide = std::move(all);
    }
    check::join(&seen, other.seen);
    check::join(&proxied.shared, other.proxied.shared);
    check::join(&proxied.global, other.proxied.global);
    check::join(&fenced, other.fenced);
    check::join(&relaxed, other.relaxed);
  }
};

}  // namespace tandem::vgpu::check
