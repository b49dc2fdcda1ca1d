// Synchronisation between threads: barriers and fences.
#include <algorithm>

#include "base/text.h"
#include "vgpu/src/check/names.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu::check {
namespace {

uint64_t key_of(BarrierId id) { return static_cast<uint64_t>(id.cta) << 32 | id.address; }

bool acquires(Order order) { return order == Order::acquire || order == Order::acquire_release; }
bool releases(Order order) { return order == Order::release || order == Order::acquire_release; }

}  // namespace

// The lanes of a warp execute an .aligned instruction together.
void Watch::order_lanes(const Scene& scene, const Actor& actor) {
  using Lanes = CheckedCluster::Lanes;
  const auto instruction = static_cast<size_t>(actor.instruction);
  std::vector<Lanes>& known = scene.cluster.lanes_of;
  if (instruction >= known.size()) known.resize(std::max(instruction + 1, 2 * known.size()));
  Lanes& lanes = known[instruction];
  if (lanes == Lanes::unknown) lanes = source_of(actor.instruction).has("aligned") ? Lanes::aligned : Lanes::apart;
  if (lanes == Lanes::aligned) scene.warp.sync(actor.lanes);
}

void Watch::passes(const Scene& scene, const Actor& actor, const VectorClock& published, Order order) {
  if (acquires(order)) {
    scene.warp.acquire(actor.lanes, published);
  } else {
    scene.warp.acquire_relaxed(actor.lanes, published);
  }
  scene.warp.tensor_stale |= actor.lanes;
  order_lanes(scene, actor);
}

void Watch::warp_syncs(const Actor& actor) { enter(actor).warp.sync(actor.lanes); }

void Watch::named_arrives(const Actor& actor, uint32_t id) {
  const Scene scene = enter(actor);
  CheckedNamedBarrier& barrier = scene.block.named.at(id);
  barrier.arrived.join(scene.warp.release(actor.lanes));
  barrier.generation_of.at(static_cast<size_t>(actor.warp)) = barrier.generation;
}

void Watch::named_completes(int32_t cta, uint32_t id) {
  CheckedNamedBarrier& barrier = cluster_of(cta).find(cta)->named.at(id);
  barrier.complete[static_cast<size_t>(barrier.generation) % barrier.complete.size()] = barrier.arrived;
  barrier.arrived = {};
  ++barrier.generation;
}

void Watch::named_passes(const Actor& actor, uint32_t id) {
  const Scene scene = enter(actor);
  const CheckedNamedBarrier& barrier = scene.block.named.at(id);
  const auto generation = static_cast<size_t>(barrier.generation_of.at(static_cast<size_t>(actor.warp)));
  passes(scene, actor, barrier.complete[generation % barrier.complete.size()], Order::acquire);
}

void Watch::cluster_arrives(const Actor& actor, Order order) {
  const Scene scene = enter(actor);
  const int32_t generation = scene.warp.cluster_arrivals[first_of(actor.lanes)];
  for (uint32_t m = actor.lanes; m; m &= m - 1) ++scene.warp.cluster_arrivals[first_of(m)];
  ClusterBarrier& barrier = scene.cluster.barrier[static_cast<size_t>(generation) % scene.cluster.barrier.size()];
  if (barrier.generation != generation) barrier = {{}, generation};
  barrier.published.join(releases(order) ? scene.warp.release(actor.lanes) : scene.warp.hand_over(actor.lanes));
}

void Watch::cluster_passes(const Actor& actor) {
  const Scene scene = enter(actor);
  const int32_t generation = scene.warp.cluster_arrivals[first_of(actor.lanes)] - 1;
  const auto& barriers = scene.cluster.barrier;
  passes(scene, actor, barriers[static_cast<size_t>(generation) % barriers.size()].published, Order::acquire);
  learn_begun(scene, actor);
}

CheckedMbarrier* Watch::find(CheckedCluster& cluster, BarrierId id) {
  const auto found = cluster.mbarriers.find(key_of(id));
  return found == cluster.mbarriers.end() || !found->second.alive ? nullptr : &found->second;
}

// Unordered ordinary writes make a barrier useless, above all the write of its init. The barrier's own operations are
// atomic.
void Watch::use_barrier(const Scene& scene, const Actor& actor, BarrierId id, bool writes, std::string_view does) {
  CheckedBlock* const block = scene.cluster.find(id.cta);
  if (!block) return;
  scene.warp.touched(actor.lanes);
  const bool alone = (actor.lanes & (actor.lanes - 1)) == 0;
  const int scope = writes ? kWeak : scope_code(Scope::cluster);
  scene.warp.for_each_share(actor.lanes, [&](const LaneGroup& share, uint32_t by) {
    Access access(scene.cluster.sites, scene.cluster.id, actor.cta);
    access.issued_by(scene.warp, share, by);
    if (block == &scene.block) access.trusts_relaxed(Relaxed::by_the_letter);
    const uint32_t site = thread_site(scene, actor, alone ? 0 : by, false);
    access.epoch = Epoch(site, scene.warp.time(), alone ? first_of(by) : kTogether, scope, writes);
    access.writes = writes;
    block->shared.touch(id.address, sizeof(uint64_t), access, [&](uint64_t page) { access.page = page; });
    if (!access.conflicts.empty())
      report(party_of(actor, alone ? first_of(by) : -1, does), access, Memory::shared, scene.cluster.sites);
    if (CheckedMbarrier* const barrier = find(scene.cluster, id); barrier && writes) barrier->init = access.epoch;
  });
}

void Watch::mbarrier_inits(const Actor& actor, BarrierId id, uint32_t count) {
  const Scene scene = enter(actor);
  CheckedMbarrier& barrier = scene.cluster.mbarriers[key_of(id)];
  CheckedCluster& cluster = scene.cluster;
  if (barrier.row == 0) {
    if (cluster.barriers_in_row == kLanes) {
      cluster.barrier_row = new_row(cluster);
      cluster.barriers_in_row = 0;
    }
    barrier.row = cluster.barrier_row;
    barrier.lane = static_cast<uint8_t>(cluster.barriers_in_row++);
  }
  CheckedMbarrier fresh;
  fresh.row = barrier.row;
  fresh.lane = barrier.lane;
  fresh.phases_before = barrier.phases_before + static_cast<int32_t>(barrier.phase) + 1;
  fresh.alive = true;
  fresh.count = count;
  barrier = std::move(fresh);
  use_barrier(scene, actor, id, true, "initialises the barrier");
}

void Watch::mbarrier_invalidates(const Actor& actor, BarrierId id) {
  const Scene scene = enter(actor);
  use_barrier(scene, actor, id, true, "invalidates the barrier");
  CheckedMbarrier* const barrier = find(scene.cluster, id);
  if (!barrier) return;
  check_commit_to_invalidated(scene, actor, id, *barrier);
  barrier->alive = false;
}

void Watch::mbarrier_arrives(const Actor& actor, BarrierId id, uint32_t count, uint32_t, Order order, Scope scope) {
  const Scene scene = enter(actor);
  check_begun(scene, actor, id.cta, "arrives at the barrier");
  use_barrier(scene, actor, id, false, count ? "arrives at the barrier" : "expects bytes at the barrier");
  CheckedMbarrier* const barrier = find(scene.cluster, id);
  if (!barrier || count == 0) return;
  if (!releases(order)) {
    barrier->published.join(scene.warp.hand_over(actor.lanes));
  } else if (id.cta != actor.cta && scope == Scope::cta) {
    barrier->published.join(scene.warp.release_narrow(actor.lanes));
  } else {
    barrier->published.join(scene.warp.release(actor.lanes));
  }
}

void Watch::mbarrier_completes(BarrierId id, uint64_t phase) {
  CheckedCluster* const cluster = running_cluster(id.cta);
  CheckedMbarrier* const barrier = cluster ? find(*cluster, id) : nullptr;
  if (!barrier) return;
  const ClockEntry entry = barrier->completion_entry();
  raise(&barrier->published.seen, entry.row, entry.lane, entry.time);
  barrier->complete[phase % 2] = barrier->published;
  barrier->phase = static_cast<int64_t>(phase) + 1;
}

void Watch::mbarrier_passes(const Actor& actor, BarrierId id, uint64_t phase, Order order, Scope) {
  const Scene scene = enter(actor);
  use_barrier(scene, actor, id, false, "waits at the barrier");
  const CheckedMbarrier* const barrier = find(scene.cluster, id);
  if (!barrier || static_cast<int64_t>(phase) >= barrier->phase || static_cast<int64_t>(phase) < 0) return;
  passes(scene, actor, barrier->complete[phase % 2], order);
}

// An operation that signals a barrier must have seen it initialised.
void Watch::check_barrier_visible(CheckedCluster& cluster, const CheckedOperation& operation, BarrierId id,
                                  const CheckedMbarrier& barrier) {
  if (!barrier.init || !is_proxy(operation.kind)) return;
  const Site& site = cluster.sites[barrier.init.site()];
  const uint32_t lanes = barrier.init.lane() == kTogether ? site.lanes : 1u << barrier.init.lane();
  const Actor& actor = operation.actor;
  Rule rule = Rule::data_race;
  std::string message =
      str_cat("the ", name_of(operation.kind), " signals a barrier, but no synchronisation follows the barrier's init");
  if (knows(operation.published.seen, site.row, lanes, barrier.init.time())) {
    if (barrier.fenced || knows(operation.published.proxied.shared, site.row, lanes, barrier.init.time())) return;
    rule = Rule::missing_init_fence;
    message = str_cat(
        "the ", name_of(operation.kind),
        " signals a barrier, but neither fence.mbarrier_init nor fence.proxy.async followed the barrier's init");
  }
  if (!findings_.counts({rule, actor.cta, actor.warp, actor.instruction, site.instruction, id.address})) return;
  findings_.add(rule, party_of(actor, first_of(actor.lanes), "signals the barrier"), party_of(site, barrier.init),
                str_cat("barrier ", subject_of(Memory::shared, id.address)), std::move(message));
}

void Watch::fence(const Actor& actor, Order order, Scope scope) {
  const Scene scene = enter(actor);
  scene.warp.fence(actor.lanes, acquires(order), releases(order), scope >= Scope::gpu);
  if (!source_of(actor.instruction).has("mbarrier_init")) return;
  CheckedCluster& cluster = scene.cluster;
  for (auto& [key, barrier] : cluster.mbarriers) {
    if (!barrier.init || barrier.fenced) continue;
    const Site& site = cluster.sites[barrier.init.site()];
    const uint32_t lanes = barrier.init.lane() == kTogether ? site.lanes : 1u << barrier.init.lane();
    for (uint32_t m = actor.lanes; m; m &= m - 1)
      barrier.fenced |= scene.warp.seen(scene.warp.share_of(first_of(m)), m & -m, site.row, lanes, barrier.init.time());
  }
}

void Watch::proxy_fence(const Actor& actor, FencedSpaces spaces) { enter(actor).warp.proxy_fence(actor.lanes, spaces); }

void Watch::wgmma_fence(const Actor& actor) { order_lanes(enter(actor), actor); }

}  // namespace tandem::vgpu::check
