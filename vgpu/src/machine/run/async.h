// Asynchronous operations: a warp issues them, and they complete when the schedule decides. Data moves at completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/machine/run/random.h"
#include "vgpu/src/observer/observer.h"

namespace tandem::vgpu::machine {

struct Grid;
struct Cluster;

struct AsyncOp {
  AsyncId id = 0;
  Actor issuer;
  int blockers = 0;  // conditions before the operation may complete
  std::vector<std::shared_ptr<AsyncOp>> followers;
  std::function<void()> complete;
  uint32_t blocks = 0;    // mask of the ranks whose shared memory is used
  bool outlives = false;  // the block may end first: hardware keeps its memory
  bool done = false;
  bool announced = false;  // the observer has the issue and gets the completion
  bool moves_data = true;  // false: the operation's memory does not exist
  size_t place = 0;        // index in the queue's list of outstanding operations
};
using AsyncRef = std::shared_ptr<AsyncOp>;

// The number of outstanding operations that a wait covers.
struct Progress {
  int left = 0;
};

// Groups of one thread: bulk stores, or cp.async.
struct AsyncGroups {
  std::shared_ptr<Progress> open;                   // not committed; null: empty
  std::deque<std::shared_ptr<Progress>> committed;  // oldest first
};
struct LaneGroups {
  AsyncGroups bulk, cp_async;
  std::vector<AsyncRef> copies;  // cp.async copies that no mbarrier arrive has covered
};

class AsyncQueue {
 public:
  void begin(Grid* grid, Cluster* cluster) {
    grid_ = grid;
    cluster_ = cluster;
  }
  // Issues an operation. after: operations that complete first. An operation may complete at once.
  AsyncRef issue(const Actor& issuer, std::function<void()> complete, const std::vector<AsyncRef>& after = {},
                 int parts = 0);
  // Records that a part of the operation has been issued.
  void unblock(const AsyncRef& op);
  // Returns an operation that uses the shared memory of these blocks and must not outlive them, or null.
  AsyncRef find(uint32_t blocks) const;
  // Completes the operations that the schedule selects, between turns.
  void advance(Random* random);
  // Completes an operation when no warp can proceed. Returns false if no operation is outstanding.
  bool force(Random* random);
  // Completes the operation and all operations that it waits for.
  void finish(const AsyncRef& op);
  void clear();

 private:
  void add_ready(AsyncOp* op);
  // Completes the n-th operation that may complete.
  void run(size_t n);
  void drain();  // .early: completes every operation that may complete

  Grid* grid_ = nullptr;
  Cluster* cluster_ = nullptr;
  std::vector<AsyncRef> under_way_;  // in no order
  std::vector<AsyncOp*> ready_;      // the operations without blockers, in order of issue
  bool draining_ = false;
};

}  // namespace tandem::vgpu::machine
