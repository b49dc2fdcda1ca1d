#include "vgpu/src/machine/run/async.h"

#include <algorithm>

#include "vgpu/src/machine/run/state.h"

namespace tandem::vgpu::machine {

AsyncRef AsyncQueue::issue(const Actor& issuer, std::function<void()> complete, const std::vector<AsyncRef>& after,
                           int parts) {
  auto op = std::make_shared<AsyncOp>();
  op->id = grid_->next_async.fetch_add(1, std::memory_order_relaxed);
  op->issuer = issuer;
  op->complete = std::move(complete);
  op->blockers = parts;
  for (const AsyncRef& earlier : after) {
    if (!earlier || earlier->done) continue;
    ++op->blockers;
    earlier->followers.push_back(op);
  }
  op->place = under_way_.size();
  under_way_.push_back(op);
  if (op->blockers == 0) add_ready(op.get());
  return op;
}

// Few operations become ready later than operations issued after them.
void AsyncQueue::add_ready(AsyncOp* op) {
  const auto later = [](AsyncId id, const AsyncOp* other) { return id < other->id; };
  ready_.insert(std::upper_bound(ready_.begin(), ready_.end(), op->id, later), op);
}

void AsyncQueue::unblock(const AsyncRef& op) {
  if (--op->blockers == 0) add_ready(op.get());
}

AsyncRef AsyncQueue::find(uint32_t blocks) const {
  AsyncRef first;
  for (const AsyncRef& op : under_way_)
    if ((op->blocks & blocks) != 0 && !op->outlives && (!first || op->id < first->id)) first = op;
  return first;
}

void AsyncQueue::clear() {
  under_way_.clear();
  ready_.clear();
}

void AsyncQueue::run(size_t n) {
  const AsyncRef op = under_way_[ready_[n]->place];
  ready_.erase(ready_.begin() + static_cast<ptrdiff_t>(n));
  under_way_.back()->place = op->place;
  under_way_[op->place] = under_way_.back();
  under_way_.pop_back();
  op->done = true;
  op->complete();
  op->complete = nullptr;
  ++cluster_->events;
  for (const AsyncRef& follower : op->followers) unblock(follower);
  op->followers.clear();
}

void AsyncQueue::drain() {
  if (draining_) return;
  draining_ = true;
  while (!ready_.empty()) run(0);
  draining_ = false;
}

void AsyncQueue::advance(Random* random) {
  switch (grid_->options.schedule.completion) {
    case Completion::early: return drain();
    case Completion::late: return;
    case Completion::random: break;
  }
  while (!under_way_.empty() && random->below(3) == 0 && force(random)) {
  }
}

bool AsyncQueue::force(Random* random) {
  if (ready_.empty()) return false;
  const bool in_order = grid_->options.schedule.seed == 0;
  run(in_order ? 0 : random->below(static_cast<uint32_t>(ready_.size())));
  return true;
}

void AsyncQueue::finish(const AsyncRef& op) {
  while (!op->done && !ready_.empty()) run(0);  // else a part has not been issued
}

}  // namespace tandem::vgpu::machine
