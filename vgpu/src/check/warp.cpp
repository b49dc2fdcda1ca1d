#include "vgpu/src/check/warp.h"

namespace tandem::vgpu::check {

void CheckedWarp::begin(uint32_t existing) {
  lanes = existing;
  shares_.assign(1, LaneGroup{existing, {}, {}, {}, {}});
}

const LaneGroup& CheckedWarp::share_of(int lane) const {
  for (const LaneGroup& share : shares_)
    if (share.lanes >> lane & 1) return share;
  return shares_[0];
}

// Raises the published knowledge by the thread's accesses.
void CheckedWarp::raise_own(VectorClock* published, uint32_t of) const {
  Times now;
  now.fill(time_);
  raise(&published->seen, row, of, now);
  if (published->wide) raise(&published->wide, row, of, now);
  raise(&published->proxied.shared, row, of, proxied_.shared);
  raise(&published->proxied.global, row, of, proxied_.global);
  raise(&published->fenced, row, of, fenced_);
  for (const CheckedGroups* groups : {cp_async.get(), bulk.get()}) {
    if (!groups) continue;
    raise(&published->seen, groups->reads, of, groups->reads_done);
    raise(&published->seen, groups->writes, of, groups->done);
  }
}

VectorClock CheckedWarp::release(uint32_t of) {
  VectorClock published;
  for (const LaneGroup& share : shares_)
    if (share.lanes & of) published.join(share.known);
  raise_own(&published, of);
  end_time();
  return published;
}

VectorClock CheckedWarp::release_relaxed(uint32_t of, bool beyond_cluster) const {
  VectorClock published;
  for (const LaneGroup& share : shares_) {
    if (!(share.lanes & of)) continue;
    const ClockRef& at_fence = beyond_cluster ? share.known.fenced : share.fenced_here;
    if (at_fence) published.join({at_fence, share.known.proxied, share.known.fenced});
  }
  if (beyond_cluster) raise(&published.seen, row, of, fenced_);
  return published;
}

VectorClock CheckedWarp::hand_over(uint32_t of) {
  VectorClock published = release_relaxed(of, false);
  const VectorClock all = release(of);
  join(&published.relaxed, all.seen);
  join(&published.relaxed, all.relaxed);
  return published;
}

VectorClock CheckedWarp::release_narrow(uint32_t of) {
  ClockRef at_fence = release_relaxed(of, false).seen;
  VectorClock published = release(of);
  published.wide = at_fence ? std::move(at_fence) : ClockRef(new Clock);
  return published;
}

void CheckedWarp::acquire(uint32_t of, const VectorClock& published) {
  if (!published.seen && !published.relaxed) return;
  for_each_share(of, [&](LaneGroup& share, uint32_t) { share.known.join(published); });
  if (shares_.size() > 1) dirty_ |= of;
}

void CheckedWarp::acquire_relaxed(uint32_t of, const VectorClock& published) {
  if (!published.seen && !published.relaxed) return;
  for_each_share(of, [&](LaneGroup& share, uint32_t) {
    share.observed.join(published);
    join(&share.known.relaxed, published.seen);
    join(&share.known.relaxed, published.relaxed);
  });
}

void CheckedWarp::fence(uint32_t of, bool acquires, bool releases, bool beyond_block) {
  if (acquires) {
    for_each_share(of, [&](LaneGroup& share, uint32_t) {
      share.known.join(share.observed);
      share.observed = {};
    });
  }
  if (!releases) return;
  const int32_t now = time_;
  for_each_share(of, [&](LaneGroup& share, uint32_t both) {
    VectorClock published = share.known;
    raise_own(&published, both);
    share.fenced_here = published.seen;
    if (beyond_block) join(&share.known.fenced, published.seen);
  });
  if (beyond_block) {
    for (uint32_t m = of; m; m &= m - 1) fenced_[first_of(m)] = now;
  }
  end_time();
  dirty_ |= of;
}

void CheckedWarp::proxy_fence(uint32_t of, FencedSpaces spaces) {
  for (const Memory memory : {Memory::shared, Memory::global}) {
    if (spaces == (memory == Memory::global ? FencedSpaces::shared : FencedSpaces::global)) continue;
    for_each_share(of, [&](LaneGroup& share, uint32_t) { join(&share.known.proxied.of(memory), share.known.seen); });
    for (uint32_t m = of; m; m &= m - 1) proxied_.of(memory)[first_of(m)] = time_;
  }
  end_time();
  dirty_ |= of;
}

void CheckedWarp::tensor_fence(uint32_t of) {
  for_each_share(of, [&](LaneGroup& share, uint32_t) { share.tensor_seen = share.known.seen; });
  tensor_stale &= ~of;
}

void CheckedWarp::sync(uint32_t of) {
  of &= lanes;
  if (shares_.size() == 1 && !(dirty_ & of)) return;  // no knowledge to exchange
  LaneGroup together;
  together.lanes = of;
  together.known = release(of);
  for (size_t i = 0; i < shares_.size();) {
    LaneGroup& share = shares_[i];
    if (!(share.lanes & of)) {
      ++i;
      continue;
    }
    join(&together.fenced_here, share.fenced_here);
    together.observed.join(share.observed);
    join(&together.tensor_seen, share.tensor_seen);
    share.lanes &= ~of;
    if (share.lanes) {
      ++i;
    } else {
      std::swap(share, shares_.back());
      shares_.pop_back();
    }
  }
  shares_.push_back(std::move(together));
  dirty_ &= ~of;
}

void CheckedWarp::learn(uint32_t of, uint16_t stream, int lane, int32_t time) {
  for_each_share(of, [&](LaneGroup& share, uint32_t) { raise(&share.known.seen, stream, lane, time); });
  if (shares_.size() > 1) dirty_ |= of;
}

bool CheckedWarp::seen(const LaneGroup& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const {
  const bool alone = (by & (by - 1)) == 0;
  if (alone && (of_lanes & by)) {
    if (of_row == row) of_lanes &= ~by;
    for (const CheckedGroups* groups : {cp_async.get(), bulk.get()}) {
      if (groups && of_row == groups->reads && groups->reads_done[first_of(by)] >= time) of_lanes &= ~by;
      if (groups && of_row == groups->writes && groups->done[first_of(by)] >= time) of_lanes &= ~by;
    }
  }
  return knows(share.known.seen, of_row, of_lanes, time);
}

bool CheckedWarp::handed(const LaneGroup& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const {
  for (uint32_t m = of_lanes; m; m &= m - 1)
    if (!knows(share.known.relaxed, of_row, m & -m, time) && !seen(share, by, of_row, m & -m, time)) return false;
  return true;
}

bool CheckedWarp::proxied(const LaneGroup& share, uint32_t by, Memory memory, uint16_t of_row, uint32_t of_lanes,
                          int32_t time) const {
  if (of_row == row && (by & (by - 1)) == 0 && (of_lanes & by) && proxied_.of(memory)[first_of(by)] >= time)
    of_lanes &= ~by;
  return knows(share.known.proxied.of(memory), of_row, of_lanes, time);
}

}  // namespace tandem::vgpu::check
