// Asynchronous operations: issued by a warp, completed when the schedule says so. Data moves at completion.
#pragma once

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
  int blockers = 0;  // what must happen before it may complete: earlier operations, parts not yet issued
  std::vector<std::shared_ptr<AsyncOp>> followers;
  std::function<void()> complete;
  uint32_t blocks = 0;    // whose shared memory it uses: a mask of ranks in the cluster
  bool outlives = false;  // its block: hardware keeps that until it is done
  bool done = false;
  bool announced = false;  // to the observer, which hears of its completion too
  bool moves_data = true;  // false: its memory does not exist
};
using AsyncRef = std::shared_ptr<AsyncOp>;

// Operations whose end somebody waits for, as a number that falls to 0.
struct Progress {
  int left = 0;
};

// Groups of one thread: bulk stores, or cp.async.
struct Groups {
  std::shared_ptr<Progress> open;                   // not committed; null: empty
  std::deque<std::shared_ptr<Progress>> committed;  // oldest first
};
struct LaneGroups {
  Groups bulk, cp_async;
  std::vector<AsyncRef> copies;  // cp.async of this thread that no cp.async.mbarrier.arrive has covered
};

class AsyncQueue {
 public:
  void begin(Grid* grid, Cluster* cluster) {
    grid_ = grid;
    cluster_ = cluster;
  }
  // Puts it under way; after: operations that complete first. May complete at once.
  AsyncRef issue(const Actor& issuer, std::function<void()> complete, const std::vector<AsyncRef>& after = {},
                 int parts = 0);
  // One of its parts has been issued.
  void unblock(const AsyncRef& op);
  bool empty() const { return under_way_.empty(); }
  // One that uses the shared memory of these blocks, and does not outlive them; null: none.
  AsyncRef find(uint32_t blocks) const;
  // Between turns: what the schedule wants to complete by itself.
  void advance(Random* random);
  // Nobody can go on: completes one. False: nothing can be completed.
  bool force(Random* random);
  // Completes it and all it waits for.
  void finish(const AsyncRef& op);
  void clear() { under_way_.clear(); }

 private:
  void run(const AsyncRef& op);
  void drain();  // .early: everything that may

  Grid* grid_ = nullptr;
  Cluster* cluster_ = nullptr;
  std::deque<AsyncRef> under_way_;  // in order of issue
  bool draining_ = false;
};

}  // namespace tandem::vgpu::machine
