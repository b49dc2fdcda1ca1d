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
  size_t at = 0;  // number of instructions before the event
  int64_t begin = 0;
  Mark end;
};

struct TracedOperation {
  Unit unit = kCopiesIn;
  int32_t block = 0;           // index of the recorded block
  int warps = 0;               // warps that have issued the operation
  int64_t issued = 0;          // step at which the last warp issued the operation
  int64_t begin = 0, end = 0;  // begin and end of the unit's work
  int64_t seen = 0;            // step at which waiters see the completion
  int32_t instruction = -1;
};

inline constexpr int64_t kNone = -1;  // in place of an operation's number

// A copy as the lanes of an instruction issue it. If all lanes issue the same copy, it is drawn once.
struct TracedCopy {
  int32_t instruction = -1;
  int64_t step = 0;
  uint64_t from = 0, to = 0;
  friend bool operator==(const TracedCopy&, const TracedCopy&) = default;
};

// Asynchronous operations in groups, as a warp commits them: the latest operation of each group and of the groups
// before it.
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
  int64_t matrices = kNone, loads = kNone, stores = kNone;  // tcgen05: the latest operation of each kind
  std::map<uint32_t, size_t> arrived;                       // by named barrier: generation of the last arrival
  TracedCopy copy;                                          // the latest copy

  int64_t clock() const { return static_cast<int64_t>(executed.size()) + waited; }
};

}  // namespace tandem::vgpu::trace
