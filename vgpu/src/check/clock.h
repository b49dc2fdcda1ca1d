// Vector clocks. A cluster numbers its rows: one for each of its warps, whose lanes are threads, then those of streams
// of asynchronous operations, whose lanes are barriers or threads. A clock says of each lane of each row up to which
// time something is known about it: what a thread did at time t has happened before whoever has an entry of at least t
// for it, and an operation is complete for whoever has an entry of at least its phase or group.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "vgpu/src/check/ref.h"
#include "vgpu/src/observer/observer.h"

namespace tandem::vgpu::check {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = ~0u;

// The lowest lane of a mask that is not empty, and the mask without it: for (m; m; m &= m - 1) first_of(m).
inline int first_of(uint32_t lanes) { return std::countr_zero(lanes); }

using Times = std::array<int32_t, kLanes>;

// Many clocks share a row: it changes only while one alone has it.
struct Row {
  Times times{};
  int references = 0;
};

// What is known of other clusters, learnt through global memory. May be shared by clusters, so it never changes.
using Rows = std::vector<Times>;
using Foreign = std::map<int32_t, std::shared_ptr<const Rows>>;  // by cluster
using ForeignRef = std::shared_ptr<const Foreign>;               // may be null: nothing

struct Clock {
  std::vector<Ref<Row>> rows;  // without a row: nothing is known
  ForeignRef foreign;
  int references = 0;
};

using ClockRef = Ref<Clock>;  // without a clock: nothing is known

// All these lanes have entries of at least time.
bool knows(const ClockRef& clock, uint16_t row, uint32_t lanes, int32_t time);
bool knows(const ClockRef& clock, int32_t cluster, uint16_t row, uint32_t lanes, int32_t time);

void join(ClockRef* clock, const ClockRef& other);
// Raises the entries of these lanes to at least those of times.
void raise(ClockRef* clock, uint16_t row, uint32_t lanes, const Times& times);
void raise(ClockRef* clock, uint16_t row, int lane, int32_t time);

// What others may learn of a clock through global memory: all it says, its own rows under the name of its cluster.
ForeignRef export_clock(const ClockRef& clock, int32_t cluster);
void import_clock(ClockRef* clock, const ForeignRef& foreign, int32_t cluster);
void join(ForeignRef* foreign, const ForeignRef& other);

// What a proxy fence can be of: shared memory, global memory, or both.
template <class T>
struct BySpace {
  T shared = {}, global = {};
  T& of(Memory memory) { return memory == Memory::global ? global : shared; }
  const T& of(Memory memory) const { return memory == Memory::global ? global : shared; }
};

// What a thread knows, and what it tells when it releases.
struct VectorClock {
  ClockRef seen = {};              // has happened before
  BySpace<ClockRef> proxied = {};  // of this, what has so for the async proxy: a proxy fence came behind it
  ClockRef fenced = {};            // of this, what a relaxed write passes on to other blocks: a fence came behind it
  ClockRef relaxed = {};  // beyond this, what would be seen if all relaxed operations on shared memory were strong
  ClockRef wide = {};     // of seen, what was told by releases whose scope reaches here. Null: all of it, as mostly

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
