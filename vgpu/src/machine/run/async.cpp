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
  under_way_.push_back(op);
  return op;
}

void AsyncQueue::unblock(const AsyncRef& op) { --op->blockers; }

AsyncRef AsyncQueue::find(uint32_t blocks) const {
  for (const AsyncRef& op : under_way_)
    if ((op->blocks & blocks) != 0 && !op->outlives) return op;
  return nullptr;
}

void AsyncQueue::run(const AsyncRef& op) {
  const auto at = std::find(under_way_.begin(), under_way_.end(), op);
  if (at != under_way_.end()) under_way_.erase(at);
  op->done = true;
  op->complete();
  op->complete = nullptr;
  ++cluster_->events;
  for (const AsyncRef& follower : op->followers) --follower->blockers;
  op->followers.clear();
}

void AsyncQueue::drain() {
  if (draining_) return;
  draining_ = true;
  for (bool any = true; any;) {
    any = false;
    for (size_t i = 0; i < under_way_.size(); ++i) {
      if (under_way_[i]->blockers != 0) continue;
      const AsyncRef op = under_way_[i];
      run(op);
      any = true;
      break;
    }
  }
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
  const auto is_ready = [](const AsyncRef& op) { return op->blockers == 0; };
  auto at = std::find_if(under_way_.begin(), under_way_.end(), is_ready);
  if (at == under_way_.end()) return false;
  if (grid_->options.schedule.seed != 0) {
    auto ready = random->below(static_cast<uint32_t>(std::count_if(at, under_way_.end(), is_ready)));
    for (; ready > 0; --ready) at = std::find_if(at + 1, under_way_.end(), is_ready);
  }
  run(AsyncRef(*at));
  return true;
}

void AsyncQueue::finish(const AsyncRef& op) {
  while (!op->done) {
    bool any = false;
    for (size_t i = 0; i < under_way_.size() && !any; ++i) {
      if (under_way_[i]->blockers != 0) continue;
      const AsyncRef earlier = under_way_[i];
      run(earlier);
      any = true;
    }
    if (!any) return;  // a part has not been issued
  }
}

}  // namespace tandem::vgpu::machine
