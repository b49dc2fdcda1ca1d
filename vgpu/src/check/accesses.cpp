// Ordinary accesses, and the knowledge that atomic accesses publish.
#include <algorithm>
#include <bit>

#include "vgpu/src/check/names.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu::check {
namespace {

std::string_view verb(const LaneAccess& access) {
  if (access.atomic && access.reads && access.writes) return "updates";
  return access.writes ? "writes" : "reads";
}

Pattern pattern_of(const LaneAccess& access, uint32_t lanes) {
  const uint64_t* const address = access.address;
  if (lanes == kAllLanes && !access.cta) {
    uint64_t apart = 0, off_row = 0;
    for (uint64_t i = 0; i < kLanes; ++i) {
      apart |= address[i] ^ address[0];
      off_row |= (address[i] - address[0]) ^ (i * access.bytes);
    }
    return apart == 0 ? Pattern::same : off_row == 0 ? Pattern::row : Pattern::any;
  }
  const int first = first_of(lanes);
  for (uint32_t m = lanes; m; m &= m - 1) {
    const int lane = first_of(m);
    if (address[lane] != address[first] || (access.cta && access.cta[lane] != access.cta[first])) return Pattern::any;
  }
  return Pattern::same;
}

bool releases(Order order) { return order == Order::release || order == Order::acquire_release; }
bool acquires(Order order) { return order == Order::acquire || order == Order::acquire_release; }

}  // namespace

uint32_t Watch::access(const Actor& actor, const LaneAccess& access) {
  const Scene scene = enter(actor);
  if (access.memory == Memory::local) {
    access_local(scene, actor, access);
    return 0;
  }
  if (access.memory != Memory::shared && access.memory != Memory::global) return 0;
  order_lanes(scene, actor);
  Pattern pattern = pattern_of(access, actor.lanes);
  const uint32_t bad = find_out_of_bounds(scene, actor, access, pattern);
  const uint32_t lanes = actor.lanes & ~bad;
  if (lanes == 0) return bad;
  if (bad) pattern = pattern_of(access, lanes);
  scene.warp.touched(lanes);
  check_begun(scene, actor, access, lanes);
  touch_lanes(scene, actor, access, lanes, pattern);
  if (access.atomic) atomics(scene, actor, access, lanes);
  return bad;
}

// The bytes between the lowest and the highest address usually lie in one allocation.
bool Watch::all_within(const Scene& scene, const Actor& actor, const LaneAccess& access, Pattern pattern) const {
  if (access.cta) return false;
  uint64_t begin = access.address[first_of(actor.lanes)], end = begin;
  if (pattern == Pattern::row) {
    end = access.address[kLanes - 1];
  } else if (pattern == Pattern::any) {
    for (uint32_t m = actor.lanes; m; m &= m - 1) {
      const uint64_t address = access.address[first_of(m)];
      begin = std::min(begin, address);
      end = std::max(end, address);
    }
  }
  if (end + access.bytes < end) return false;
  end += access.bytes;
  if (access.memory == Memory::global) return global_.contains(begin, end - begin, access.writes);
  return begin >= kReservedShared && end <= scene.block.shared_end;
}

uint32_t Watch::find_out_of_bounds(const Scene& scene, const Actor& actor, const LaneAccess& access, Pattern pattern) {
  if (all_within(scene, actor, access, pattern)) return 0;
  uint32_t bad = 0;
  for (uint32_t m = actor.lanes; m; m &= m - 1) {
    const int lane = first_of(m);
    const uint64_t address = access.address[lane];
    if (access.memory == Memory::global) {
      if (global_.contains(address, access.bytes, access.writes)) continue;
    } else {
      const CheckedBlock* const block = access.cta ? scene.cluster.find(access.cta[lane]) : &scene.block;
      if (block && address >= kReservedShared && address + access.bytes <= block->shared_end) continue;
    }
    bad |= 1u << lane;
    const int32_t cta = access.cta ? access.cta[lane] : actor.cta;
    report_bounds(actor, lane, verb(access), {access.memory, cta, address, access.bytes, 1}, access.writes);
  }
  return bad;
}

namespace {

// Returns the number of lanes from `first` on whose bytes are contiguous.
int side_by_side(const LaneAccess& access, uint32_t lanes, int first) {
  int end = first + 1;
  while (end < kLanes && (lanes >> end & 1) && access.address[end] == access.address[end - 1] + access.bytes &&
         (!access.cta || access.cta[end] == access.cta[first]))
    ++end;
  return end - first;
}

}  // namespace

void Watch::touch_lanes(const Scene& scene, const Actor& actor, const LaneAccess& access, uint32_t lanes,
                        Pattern pattern) {
  const bool global = access.memory == Memory::global;
  const Sites& sites = global ? global_.sites() : scene.cluster.sites;
  const int scope = access.atomic ? scope_code(access.scope) : kWeak;
  const bool together = !access.writes && pattern == Pattern::same;
  GlobalMemory::Toucher toucher(&global_, &scene.cluster.global_pages);
  const LaneGroup* share_now = nullptr;
  Access touched(sites, scene.cluster.id, actor.cta);
  touched.lanes_of(access, lanes);
  touched.writes = access.writes;
  touched.is_wide = access.atomic && access.scope >= Scope::gpu;
  touched.is_plain = !access.atomic;
  const auto enters_page = [&](uint64_t page) { touched.page = page; };
  const auto block_of = [&](int lane) -> CheckedBlock& {
    return access.cta ? *scene.cluster.find(access.cta[lane]) : scene.block;
  };
  const auto touch = [&](uint32_t by, int lane, uint32_t site, int epoch_lane) {
    touched.begin(Epoch(site, scene.warp.time(), epoch_lane, scope, access.writes));
    touched.issued_by(scene.warp, *share_now, by);
    if (global) {
      toucher.touch(access.address[lane], access.bytes, touched, enters_page);
    } else {
      CheckedBlock& block = block_of(lane);
      touched.trusts_relaxed(&block == &scene.block ? Relaxed::by_the_letter : Relaxed::nothing);
      block.shared.touch(access.address[lane], access.bytes, touched, enters_page);
    }
    if (!touched.conflicts.empty())
      report(party_of(actor, by & (by - 1) ? -1 : lane, verb(access)), touched, access.memory, sites);
    if (access.reads && !touched.met_initialised)
      report_uninitialised(party_of(actor, lane, verb(access)), access.memory, access.address[lane]);
  };
  const uint32_t site = thread_site(scene, actor, 0, global, access.stored && access.stored->are_constant());
  const int in_granule = access.bytes < kGranule ? static_cast<int>(kGranule / access.bytes) : kLanes + 1;
  const auto page_of = [&](int lane) -> Page& {
    const uint64_t number = access.address[lane] / kPageBytes;
    return global ? toucher.page(number) : block_of(lane).shared.page(number);
  };
  const auto touch_granule = [&](int first) {
    const auto granule = static_cast<uint32_t>(access.address[first] % kPageBytes / kGranule);
    touched.begin(Epoch::run(site, scene.warp.time(), first, access.bytes, scope, access.writes));
    touched.issued_by(scene.warp, *share_now, touched.epoch.lanes(0));
    if (page_of(first).touch_run(granule, touched)) return;
    for (int lane = first; lane < first + in_granule; ++lane) touch(1u << lane, lane, site, lane);
    page_of(first).join(granule);
  };
  scene.warp.for_each_share(lanes, [&](const LaneGroup& share, uint32_t by) {
    share_now = &share;
    if (together && (by & (by - 1))) {
      touch(by, first_of(by), thread_site(scene, actor, by, global), kTogether);
      return;
    }
    for (uint32_t left = by; left;) {
      const int first = first_of(left),
                end = pattern == Pattern::row && by == kAllLanes ? kLanes : first + side_by_side(access, left, first);
      for (int lane = first; lane < end;) {
        if (access.address[lane] % kGranule == 0 && lane + in_granule <= end) {
          touch_granule(lane);
          lane += in_granule;
        } else {
          touch(1u << lane, lane, site, lane);
          ++lane;
        }
      }
      left &= end < kLanes ? ~0u << end : 0;
    }
  });
}

// lanes: 0 for a site whose epochs name the lane.
uint32_t Watch::thread_site(const Scene& scene, const Actor& actor, uint32_t lanes, bool global, bool is_constant) {
  KnownSites& known = global ? scene.warp.global_sites : scene.warp.shared_sites;
  uint32_t& site = known.find(actor.instruction, lanes);
  if (site) return site;
  Site like;
  like.cluster = scene.cluster.id;
  like.cta = actor.cta;
  like.instruction = actor.instruction;
  like.lanes = lanes;
  like.warp = static_cast<uint16_t>(actor.warp);
  like.row = scene.warp.row;
  like.is_constant = is_constant;
  site = add_site(scene.cluster, like, global);
  return site;
}

uint32_t Watch::add_site(CheckedCluster& cluster, const Site& like, bool global) {
  if (global) return global_.add_site(like);
  cluster.async_in_shared |= like.kind == SiteKind::async;
  const uint32_t site = cluster.sites.add();
  cluster.sites[site].set(like);
  return site;
}

namespace {

// A strong read learns what the writes of its address have published.
void learn(CheckedWarp& warp, uint64_t address, uint32_t lane, const LaneAccess& access,
           const CheckedCluster::Published& there) {
  const bool acquire = acquires(access.order);
  KnownVersions& versions = warp.versions_here[access.memory == Memory::global];
  if (versions.find(address, lane, acquire) == there.version) return;
  versions.learn(address, lane, acquire, there.version);
  if (acquire) {
    warp.acquire(lane, there.clock);
  } else {
    warp.acquire_relaxed(lane, there.clock);
  }
}

}  // namespace

void Watch::atomics(const Scene& scene, const Actor& actor, const LaneAccess& access, uint32_t lanes) {
  const bool global = access.memory == Memory::global;
  const bool beyond = global && !alone_ && access.scope >= Scope::gpu;
  auto& syncs = global ? scene.cluster.global_syncs : scene.cluster.shared_syncs;
  for (uint32_t m = lanes; m; m &= m - 1) {
    const int lane = first_of(m);
    const uint32_t by = 1u << lane;
    uint64_t address = access.address[lane];
    if (!global) address |= static_cast<uint64_t>(access.cta ? access.cta[lane] : actor.cta) << 32;
    if (access.writes) {
      const bool released = releases(access.order);
      const VectorClock published = released ? scene.warp.release(by)
                                    : global ? scene.warp.release_relaxed(by, false)
                                             : scene.warp.hand_over(by);
      if (published.seen || published.relaxed) {
        CheckedCluster::Published& there = syncs[address];
        there.clock.join(published);
        ++there.version;
      }
      if (beyond) syncs_.tell(address, released ? published : scene.warp.release_relaxed(by, true), scene.cluster.id);
    }
    if (!access.reads) continue;
    if (const auto found = syncs.find(address); found != syncs.end())
      learn(scene.warp, address, by, access, found->second);
    if (beyond) scene.warp.reads.push_back({address, by, acquires(access.order)});
  }
}

void Watch::access_local(const Scene& scene, const Actor& actor, const LaneAccess& access) {
  std::vector<uint32_t>& written = scene.block.local[static_cast<size_t>(actor.warp)];
  for (uint32_t m = actor.lanes; m; m &= m - 1) {
    const int lane = first_of(m);
    const size_t begin = access.address[lane], end = begin + access.bytes;
    if (written.size() < end) written.resize(end);
    uint32_t any = 0;
    for (size_t i = begin; i < end; ++i) {
      any |= written[i];
      if (access.writes) written[i] |= 1u << lane;
    }
    if (access.reads && !(any >> lane & 1))
      report_uninitialised(party_of(actor, lane, verb(access)), Memory::local, begin);
  }
}

}  // namespace tandem::vgpu::check
