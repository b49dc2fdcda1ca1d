#include "vgpu/check/warp.h"

namespace tandem::vgpu::check {

void Warp::begin(uint32_t existing) {
  lanes = existing;
  shares_.assign(1, Share{existing, {}, {}, {}, {}});
}

const Share& Warp::share_of(int lane) const {
  for (const Share& share : shares_)
    if (share.lanes >> lane & 1) return share;
  return shares_[0];
}

// Others learn of a thread's own deeds by its releases.
void Warp::raise_own(Knowledge* told, uint32_t of) const {
  Times now;
  now.fill(time_);
  raise(&told->seen, row, of, now);
  if (told->wide) raise(&told->wide, row, of, now);
  raise(&told->proxied.shared, row, of, proxied_.shared);
  raise(&told->proxied.global, row, of, proxied_.global);
  raise(&told->fenced, row, of, fenced_);
  for (const Groups* groups : {cp_async.get(), bulk.get()}) {
    if (!groups) continue;
    raise(&told->seen, groups->reads, of, groups->reads_done);
    raise(&told->seen, groups->writes, of, groups->done);
  }
}

Knowledge Warp::release(uint32_t of) {
  Knowledge told;
  for (const Share& share : shares_)
    if (share.lanes & of) told.join(share.known);
  raise_own(&told, of);
  end_time();
  return told;
}

Knowledge Warp::release_relaxed(uint32_t of, bool beyond_cluster) const {
  Knowledge told;
  for (const Share& share : shares_) {
    if (!(share.lanes & of)) continue;
    const ClockRef& at_fence = beyond_cluster ? share.known.fenced : share.fenced_here;
    if (at_fence) told.join({at_fence, share.known.proxied, share.known.fenced});
  }
  if (beyond_cluster) raise(&told.seen, row, of, fenced_);
  return told;
}

Knowledge Warp::hand_over(uint32_t of) {
  Knowledge told = release_relaxed(of, false);
  const Knowledge all = release(of);
  join(&told.relaxed, all.seen);
  join(&told.relaxed, all.relaxed);
  return told;
}

Knowledge Warp::release_narrow(uint32_t of) {
  ClockRef at_fence = release_relaxed(of, false).seen;
  Knowledge told = release(of);
  told.wide = at_fence ? std::move(at_fence) : ClockRef(new Clock);
  return told;
}

void Warp::acquire(uint32_t of, const Knowledge& told) {
  if (!told.seen && !told.relaxed) return;
  for_each_share(of, [&](Share& share, uint32_t) { share.known.join(told); });
  if (shares_.size() > 1) dirty_ |= of;
}

void Warp::acquire_relaxed(uint32_t of, const Knowledge& told) {
  if (!told.seen && !told.relaxed) return;
  for_each_share(of, [&](Share& share, uint32_t) {
    share.observed.join(told);
    join(&share.known.relaxed, told.seen);
    join(&share.known.relaxed, told.relaxed);
  });
}

void Warp::fence(uint32_t of, bool acquires, bool releases, bool beyond_block) {
  if (acquires) {
    for_each_share(of, [&](Share& share, uint32_t) {
      share.known.join(share.observed);
      share.observed = {};
    });
  }
  if (!releases) return;
  const int32_t now = time_;
  for_each_share(of, [&](Share& share, uint32_t both) {
    Knowledge told = share.known;
    raise_own(&told, both);
    share.fenced_here = told.seen;
    if (beyond_block) join(&share.known.fenced, told.seen);
  });
  if (beyond_block) {
    for (uint32_t m = of; m; m &= m - 1) fenced_[first_of(m)] = now;
  }
  end_time();
  dirty_ |= of;
}

void Warp::proxy_fence(uint32_t of, FencedSpaces spaces) {
  for (const Memory memory : {Memory::shared, Memory::global}) {
    if (spaces == (memory == Memory::global ? FencedSpaces::shared : FencedSpaces::global)) continue;
    for_each_share(of, [&](Share& share, uint32_t) { join(&share.known.proxied.of(memory), share.known.seen); });
    for (uint32_t m = of; m; m &= m - 1) proxied_.of(memory)[first_of(m)] = time_;
  }
  end_time();
  dirty_ |= of;
}

void Warp::tensor_fence(uint32_t of) {
  for_each_share(of, [&](Share& share, uint32_t) { share.tensor_seen = share.known.seen; });
  tensor_stale &= ~of;
}

void Warp::sync(uint32_t of) {
  of &= lanes;
  if (shares_.size() == 1 && !(dirty_ & of)) return;  // nothing to tell each other
  Share together;
  together.lanes = of;
  together.known = release(of);
  for (size_t i = 0; i < shares_.size();) {
    Share& share = shares_[i];
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

void Warp::learn(uint32_t of, uint16_t stream, int lane, int32_t time) {
  for_each_share(of, [&](Share& share, uint32_t) { raise(&share.known.seen, stream, lane, time); });
  if (shares_.size() > 1) dirty_ |= of;
}

bool Warp::seen(const Share& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const {
  const bool alone = (by & (by - 1)) == 0;
  if (alone && (of_lanes & by)) {
    if (of_row == row) of_lanes &= ~by;
    for (const Groups* groups : {cp_async.get(), bulk.get()}) {
      if (groups && of_row == groups->reads && groups->reads_done[first_of(by)] >= time) of_lanes &= ~by;
      if (groups && of_row == groups->writes && groups->done[first_of(by)] >= time) of_lanes &= ~by;
    }
  }
  return knows(share.known.seen, of_row, of_lanes, time);
}

bool Warp::handed(const Share& share, uint32_t by, uint16_t of_row, uint32_t of_lanes, int32_t time) const {
  for (uint32_t m = of_lanes; m; m &= m - 1)
    if (!knows(share.known.relaxed, of_row, m & -m, time) && !seen(share, by, of_row, m & -m, time)) return false;
  return true;
}

bool Warp::proxied(const Share& share, uint32_t by, Memory memory, uint16_t of_row, uint32_t of_lanes,
                   int32_t time) const {
  if (of_row == row && (by & (by - 1)) == 0 && (of_lanes & by) && proxied_.of(memory)[first_of(by)] >= time)
    of_lanes &= ~by;
  return knows(share.known.proxied.of(memory), of_row, of_lanes, time);
}

}  // namespace tandem::vgpu::check
