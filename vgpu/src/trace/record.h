// The recording of a block.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "vgpu/src/observer/observer.h"

namespace tandem::vgpu::trace {

enum Unit : int32_t { kCopiesIn, kCopiesOut, kThreadCopies, kTensorCore, kTensorMemory, kUnits };

// An event that others wait for: the step from which they may proceed, its row, and its time.
struct Mark {
  int64_t step = 0;
  int32_t row = -1;
  int64_t happened = 0;
};

struct TracedWait {
  size_t at = 0;  // number of instructions before it
  int64_t begin = 0;
  Mark end;
};

struct TracedOperation {
  Unit unit = kCopiesIn;
  int32_t block = 0;           // index of the recorded block
  int warps = 0;               // warps that have issued it
  int64_t issued = 0;          // by the last of them
  int64_t begin = 0, end = 0;  // begin and end of the unit's work
  int64_t seen = 0;            // by waiters
  int32_t instruction = -1;
};

inline constexpr int64_t kNone = -1;  // in place of an operation's number

// A copy as the lanes of an instruction issue it. If all of them issue the same copy, it is drawn once.
struct TracedCopy {
  int32_t instruction = -1;
  int64_t step = 0;
  uint64_t from = 0, to = 0;
  friend bool operator==(const TracedCopy&, const TracedCopy&) = default;
};

// Asynchronous operations in groups, as a warp commits them: the latest that each group or one before it has.
struct TracedGroups {
  int64_t latest = kNone;
  std::vector<int64_t> committed;
};

struct TracedWarp {
  std::vector<int32_t> executed;  // instructions, one a step between waits
  std::vector<TracedWait> waits;
  int64_t waited = 0;
  int32_t trying = -1;  // the instruction that retries a barrier from `tried_at` on
  size_t tried_at = 0;
  std::map<AsyncKind, TracedGroups> groups;
  int64_t matrices = kNone, loads = kNone, stores = kNone;  // tcgen05: the latest of each
  std::map<uint32_t, size_t> arrived;                       // at named barriers: in which generation
  TracedCopy copy;                                          // the latest

  int64_t clock() const { return static_cast<int64_t>(executed.size()) + waited; }
};

}  // namespace tandem::vgpu::trace
