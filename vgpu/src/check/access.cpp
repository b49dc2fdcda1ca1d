#include "vgpu/src/check/access.h"

#include <algorithm>

namespace tandem::vgpu::check {

bool is_proxy(AsyncKind kind) {
  switch (kind) {
    case AsyncKind::bulk_load:
    case AsyncKind::bulk_store:
    case AsyncKind::wgmma:
    case AsyncKind::tcgen05_mma:
    case AsyncKind::tcgen05_cp:
    case AsyncKind::cluster_launch: return true;
    default: return false;
  }
}

bool on_tensor_memory(AsyncKind kind) {
  switch (kind) {
    case AsyncKind::tcgen05_mma:
    case AsyncKind::tcgen05_cp:
    case AsyncKind::tcgen05_shift:
    case AsyncKind::tcgen05_ld:
    case AsyncKind::tcgen05_st: return true;
    default: return false;
  }
}

void Access::asynchronous(AsyncKind kind, Memory memory) {
  async_ = true;
  kind_ = kind;
  memory_ = memory;
  proxy_ = is_proxy(kind);
}

Touch::Verdict Access::judge(Epoch x) {
  if (x != last_) {
    last_ = x;
    last_verdict_ = decide(x);
  }
  return last_verdict_;
}

void Access::conflict(Epoch x, Verdict verdict, uint32_t at) {
  for (const Conflict& known : conflicts)
    if (known.other.site() == x.site()) return;
  conflicts.push_back({x, verdict, page + at});
}

Touch::Verdict Access::decide(Epoch x) {
  const Site& site = sites_[x.site()];
  if (async_ && x.site() == epoch.site()) return Verdict::ordered;
  if (site.kind == SiteKind::async) {
    const ClockEntry done = site.done.load(std::memory_order_acquire);
    const uint32_t lanes = done.lane == kTogether ? x.lanes(site.lanes) : 1u << done.lane;
    if (in_order(site) || same_copy(site)) return Verdict::ordered;
    if (done.time && seen(site, done.row, lanes, done.time)) {
      if (async_ && on_tensor_memory(kind_) && on_tensor_memory(site.async)) note_past(x.site());
      return Verdict::ordered;
    }
    if (relaxed_ == Relaxed::ordered && done.time && handed_over(site, done.row, lanes, done.time) == Verdict::ordered)
      return Verdict::ordered;
  } else {
    const uint32_t lanes = x.lanes(site.lanes);
    if (same_lanes(site, x)) return Verdict::ordered;
    if (seen(site, site.row, lanes, x.time())) {
      if (crosses_proxies(x) && !proxied(site, lanes, x.time())) return Verdict::unfenced;
      if (!x.wrote() || widely(site, lanes, x.time())) return Verdict::ordered;
      // Atomic operations need no publication by other threads.
      return both_atomic(site, x) ? Verdict::allowed : Verdict::narrow;
    }
    if (same_store(x)) return Verdict::ordered;
    if (both_atomic(site, x) || changes_nothing(site, x)) return Verdict::allowed;
    return handed_over(site, site.row, lanes, x.time());
  }
  return both_atomic(site, x) ? Verdict::allowed : Verdict::unordered;
}

// A thread's outstanding load may return the bytes of a copy, because an arrival at a barrier does not wait for loads.
bool Access::crosses_proxies(Epoch x) const { return proxy_ && (x.wrote() || (writes && memory_ == Memory::shared)); }

void Access::note_past(uint32_t site) {
  if (std::find(tensor_past.begin(), tensor_past.end(), site) == tensor_past.end()) tensor_past.push_back(site);
}

bool Access::seen(const Site& site, uint16_t row, uint32_t lanes, int32_t time) const {
  return std::all_of(issuers_.begin(), issuers_.begin() + issuers_count_, [&](const Issuer& by) {
    return site.cluster == cluster_ ? by.warp->seen(*by.share, by.lanes, row, lanes, time)
                                    : knows(by.share->known.seen, site.cluster, row, lanes, time);
  });
}

bool Access::proxied(const Site& site, uint32_t lanes, int32_t time) const {
  return std::all_of(issuers_.begin(), issuers_.begin() + issuers_count_, [&](const Issuer& by) {
    return site.cluster == cluster_ ? by.warp->proxied(*by.share, by.lanes, memory_, site.row, lanes, time)
                                    : knows(by.share->known.proxied.of(memory_), site.cluster, site.row, lanes, time);
  });
}

// Other blocks see ordinary stores only after releases of sufficient scope.
bool Access::widely(const Site& site, uint32_t lanes, int32_t time) const {
  if (site.cta == cta_ || site.cluster != cluster_) return true;
  return std::all_of(issuers_.begin(), issuers_.begin() + issuers_count_,
                     [&](const Issuer& by) { return CheckedWarp::widely(*by.share, site.row, lanes, time); });
}

Touch::Verdict Access::handed_over(const Site& site, uint16_t row, uint32_t lanes, int32_t time) const {
  if (relaxed_ == Relaxed::nothing || site.cluster != cluster_) return Verdict::unordered;
  if (relaxed_ == Relaxed::by_the_letter && site.cta != cta_) return Verdict::unordered;
  const bool published = std::all_of(issuers_.begin(), issuers_.begin() + issuers_count_, [&](const Issuer& by) {
    return by.warp->handed(*by.share, by.lanes, row, lanes, time);
  });
  return !published ? Verdict::unordered : relaxed_ == Relaxed::ordered ? Verdict::ordered : Verdict::relaxed;
}

bool Access::is_by_warp_of(const Site& site) const {
  const Site& own = sites_[epoch.site()];
  return async_ && (kind_ == AsyncKind::tcgen05_ld || kind_ == AsyncKind::tcgen05_st) && own.cta == site.cta &&
         own.warp == site.warp;
}

bool Access::both_atomic(const Site& site, Epoch x) const {
  if (x.scope() == kWeak || epoch.scope() == kWeak) return false;
  if (site.cta == cta_) return true;
  const int least = scope_code(site.cluster == cluster_ ? Scope::cluster : Scope::gpu);
  return x.scope() >= least && epoch.scope() >= least;
}

bool Access::same_store(Epoch x) const {
  if (!instruction_ || !writes || x.site() != epoch.site() || x.time() != epoch.time()) return false;
  if (x.is_run() || epoch.is_run() || x.lane() == kTogether || !(instruction_lanes_ >> x.lane() & 1)) return false;
  const uint64_t a = instruction_->address[x.lane()], b = instruction_->address[epoch.lane()];
  return (a < b ? b - a : a - b) < instruction_->bytes;
}

// PTX ISA, "Memory Consistency Model": a read returns the value of one of the racing writes. If all racing writes have
// the same value, no other result is possible. Values that depend on the input count only at the same instruction, so
// that equal input numbers hide no race between different instructions.
bool Access::changes_nothing(const Site& site, Epoch x) const {
  const StoredValues* const stored = instruction_ ? instruction_->stored : nullptr;
  if (!stored || x.scope() != kWeak || async_) return false;
  const bool same_instruction = x.wrote() && site.instruction == sites_[epoch.site()].instruction;
  if (!same_instruction && !stored->are_constant()) return false;
  for (uint32_t m = epoch.lanes(instruction_lanes_); m; m &= m - 1)
    if (!stored->change_nothing(first_of(m))) return false;
  return true;
}

// Returns true if the lanes of both runs access the same bytes each, so that no lane conflicts with another lane.
bool Access::same_lanes(const Site& site, Epoch x) const {
  return x.is_run() && epoch.is_run() && x.lane() == epoch.lane() && x.bytes_of_lane() == epoch.bytes_of_lane() &&
         site.cluster == cluster_ && site.row == issuers_[0].warp->row;
}

// Whole warps issue a copy if the compiler merges their lanes' copies into one.
bool Access::same_copy(const Site& site) const {
  const Site& own = sites_[epoch.site()];
  return own.copy != 0 && own.copy == site.copy && own.warp == site.warp && own.cta == site.cta;
}

// The tensor core executes operations on tensor memory of one thread in the order of issue.
bool Access::in_order(const Site& site) const {
  const auto pipelined = [](AsyncKind kind) {
    return kind == AsyncKind::tcgen05_mma || kind == AsyncKind::tcgen05_cp || kind == AsyncKind::tcgen05_shift;
  };
  if (!async_ || !pipelined(kind_) || !pipelined(site.async)) return false;
  const Site& own = sites_[epoch.site()];
  return own.cta == site.cta && own.warp == site.warp && own.lanes == site.lanes;
}

}  // namespace tandem::vgpu::check
