// Asynchronous operations: their issue, the memory that they access, and the events that make their completion known.
#include <algorithm>

#include "vgpu/src/check/names.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu::check {
namespace {

// Limits on outstanding operations of a cluster that may still signal a barrier. cp.async copies belong to one thread
// each and may be 4 bytes.
constexpr size_t kMaxOperations = 8192, kMaxCopies = 32768;
constexpr uint32_t kManySites = 1u << 16;
constexpr int kWarpgroup = 4;

bool signals(AsyncKind kind) {
  return kind == AsyncKind::bulk_load || kind == AsyncKind::cp_async || kind == AsyncKind::st_async ||
         kind == AsyncKind::cluster_launch;
}

// Returns the scope of an atomic operation.
int scope_of(const ptx::Instruction& source) {
  if (source.has("reduce")) return scope_code(Scope::gpu);
  return source.opcode == "red" ? scope_code(Scope::cluster) : kWeak;
}

std::string verb(AsyncKind kind, bool writes) { return std::string(name_of(kind)) + (writes ? " writes" : " reads"); }

}  // namespace

bool Watch::async_issues(const Actor& actor, AsyncKind kind, AsyncId id, std::span<const Span> reads,
                         std::span<const Span> writes) {
  const Scene scene = enter(actor);
  order_lanes(scene, actor);
  bool fits = true;
  for (const Span& span : reads) fits &= in_bounds(scene, actor, kind, span, false);
  for (const Span& span : writes) fits &= in_bounds(scene, actor, kind, span, true);
  if (!fits) return false;
  check_begun(scene, actor, reads, verb(kind, false));
  check_begun(scene, actor, writes, verb(kind, true));
  count_operation(scene, actor, kind);
  if (kind == AsyncKind::wgmma && !all_have_issued(scene, actor, id, reads)) return true;
  collect_sites(scene.cluster);
  CheckedOperation operation;
  operation.id = id;
  operation.kind = kind;
  operation.actor = actor;
  if (kind == AsyncKind::bulk_store) operation.copy = number_of_copy(scene, actor, reads, writes);
  touch_spans(scene, &operation, reads, false);
  touch_spans(scene, &operation, writes, true);
  if (kind == AsyncKind::wgmma) scene.cluster.quarters.erase(id);
  if (!signals(kind)) return true;
  operation.published = scene.warp.release(actor.lanes);
  const bool is_copy = kind == AsyncKind::cp_async;
  std::deque<uint64_t>& order = is_copy ? scene.cluster.copy_order : scene.cluster.operation_order;
  order.push_back(id);
  scene.cluster.operations[id] = std::move(operation);
  if (order.size() > (is_copy ? kMaxCopies : kMaxOperations)) {
    scene.cluster.operations.erase(order.front());
    order.pop_front();
  }
  return true;
}

uint32_t Watch::number_of_copy(const Scene& scene, const Actor& actor, std::span<const Span> reads,
                               std::span<const Span> writes) {
  LastCopy& last = scene.warp.last_copy;
  const bool again = last.event + 1 == scene.warp.events && last.instruction == actor.instruction &&
                     (last.lanes & actor.lanes) == 0 && std::ranges::equal(last.reads, reads) &&
                     std::ranges::equal(last.writes, writes);
  last.event = scene.warp.events;
  if (again) {
    last.lanes |= actor.lanes;
    return last.number;
  }
  last.instruction = actor.instruction;
  last.lanes = actor.lanes;
  last.reads.assign(reads.begin(), reads.end());
  last.writes.assign(writes.begin(), writes.end());
  return ++last.number;
}

bool Watch::in_bounds(const Scene& scene, const Actor& actor, AsyncKind kind, const Span& span, bool writes) {
  if (span.memory == Memory::tensor) return in_tensor_memory(span);
  if (span.memory == Memory::shared) {
    const CheckedBlock* const block = scene.cluster.find(span.cta);
    if (block && span.address >= kReservedShared && span.address + span.bytes <= block->shared_end) return true;
  } else if (global_.contains(span.address, span.bytes, writes)) {
    return true;
  }
  report_bounds(actor, first_of(actor.lanes), verb(kind, writes), span, writes);
  return false;
}

void Watch::touch_spans(const Scene& scene, CheckedOperation* operation, std::span<const Span> spans, bool writes) {
  const Actor& actor = operation->actor;
  // Threads issue together, but each lane has a separate operation.
  const bool per_lane = operation->kind == AsyncKind::cp_async && (actor.lanes & (actor.lanes - 1)) != 0 &&
                        spans.size() == static_cast<size_t>(std::popcount(actor.lanes));
  if (!per_lane) {
    for (size_t i = 0; i < spans.size();) {
      size_t end = i + 1;  // end of the spans that differ in their addresses only
      while (end < spans.size() && spans[end].memory == spans[i].memory && spans[end].cta == spans[i].cta &&
             spans[end].warp == spans[i].warp)
        ++end;
      touch_alike(scene, operation, spans.subspan(i, end - i), writes, actor.lanes);
      i = end;
    }
    return;
  }
  size_t i = 0;
  for (uint32_t m = actor.lanes; m; m &= m - 1) touch_alike(scene, operation, spans.subspan(i++, 1), writes, m & -m);
}

// spans: of one memory. by: on behalf of these lanes.
void Watch::touch_alike(const Scene& scene, CheckedOperation* operation, std::span<const Span> spans, bool writes,
                        uint32_t by) {
  const Memory memory = spans[0].memory;
  const AsyncKind kind = operation->kind;
  const Actor& actor = operation->actor;
  const bool global = memory == Memory::global;
  const Sites& sites = global ? global_.sites() : scene.cluster.sites;
  const bool alone = (by & (by - 1)) == 0;
  const int scope = writes ? scope_of(source_of(actor.instruction)) : kWeak;
  const bool reads = !writes || source_of(actor.instruction).has("reduce");
  Access access(sites, scene.cluster.id, actor.cta);
  access.asynchronous(kind, memory);
  add_issuers(scene, *operation, spans[0].warp, by, &access);
  access.epoch =
      Epoch(site_of(scene, operation, spans[0], writes, by), 0, alone ? first_of(by) : kTogether, scope, writes);
  access.writes = writes;
  GlobalMemory::Toucher toucher(&global_, &scene.cluster.global_pages);
  CheckedBlock* const block = global ? nullptr : scene.cluster.find(spans[0].cta);
  const auto enters_page = [&](uint64_t page) { access.page = page; };
  const auto party = [&] { return party_of(actor, alone ? first_of(by) : -1, verb(kind, writes)); };
  for (const Span& span : spans) {
    access.met_initialised = false;
    if (global) {
      toucher.touch(span.address, span.bytes, access, enters_page);
    } else if (memory == Memory::shared) {
      block->shared.touch(span.address, span.bytes, access, enters_page);
    } else {
      touch_columns(*block, span, access);
    }
    if (reads && !access.met_initialised) report_uninitialised(party(), memory, shadow_address(span));
  }
  if (!access.conflicts.empty()) report(party(), access, memory, sites);
  for (const uint32_t past : access.tensor_past) check_tensor_fences(scene, actor, party(), scene.cluster.sites[past]);
}

// A wgmma reads what each of its warps knew when it issued its quarter.
bool Watch::all_have_issued(const Scene& scene, const Actor& actor, AsyncId id, std::span<const Span> reads) {
  scene.cluster.quarters[id].push_back({actor.warp, scene.warp.wgmma_committed, scene.warp.share_of(0)});
  return !reads.empty();
}

// warp: of the block; -1: all that issue it.
void Watch::add_issuers(const Scene& scene, const CheckedOperation& operation, int32_t warp, uint32_t by,
                        Access* access) {
  if (operation.kind != AsyncKind::wgmma) {
    access->issued_by(scene.warp, scene.warp.share_of(first_of(by)), by);
    return;
  }
  for (const Quarter& quarter : scene.cluster.quarters[operation.id]) {
    const CheckedWarp& each = scene.cluster.warps[scene.block.first_warp + static_cast<size_t>(quarter.warp)];
    if (warp < 0 || quarter.warp == warp) access->issued_by(each, quarter.share, each.lanes);
  }
}

// One site for each block whose memory the operation touches, because a barrier of that block orders it, and one for
// global memory.
uint32_t Watch::site_of(const Scene& scene, CheckedOperation* operation, const Span& span, bool writes, uint32_t by) {
  const bool global = span.memory == Memory::global;
  for (const CheckedOperation::SpanSite& part : operation->parts)
    if (part.global == global && part.writes == writes && part.by == by && (global || part.cta == span.cta))
      return part.site;
  const Actor& actor = operation->actor;
  Site like;
  like.cluster = scene.cluster.id;
  like.cta = actor.cta;
  like.instruction = actor.instruction;
  like.lanes = by;
  like.warp = static_cast<uint16_t>(actor.warp);
  like.row = scene.warp.row;
  like.kind = SiteKind::async;
  like.async = operation->kind;
  like.copy = operation->copy;
  like.done.store(completion_entry(scene, *operation, writes, by));
  const uint32_t site = add_site(scene.cluster, like, global);
  operation->parts.push_back({span.cta, by, site, global, writes});
  return site;
}

CheckedGroups& Watch::groups_of(const Scene& scene, AsyncKind kind) {
  std::unique_ptr<CheckedGroups>& groups = kind == AsyncKind::bulk_store ? scene.warp.bulk : scene.warp.cp_async;
  if (!groups) {
    groups = std::make_unique<CheckedGroups>();
    groups->reads = new_row(scene.cluster);
    groups->writes = new_row(scene.cluster);
  }
  return *groups;
}

// The clock entry that means that the operation has completed. An operation that signals a barrier has no entry yet.
ClockEntry Watch::completion_entry(const Scene& scene, const CheckedOperation& operation, bool writes, uint32_t by) {
  const AsyncKind kind = operation.kind;
  const Actor& actor = operation.actor;
  const int lane = first_of(by);
  switch (kind) {
    case AsyncKind::bulk_store: {
      const CheckedGroups& groups = groups_of(scene, kind);
      return {writes ? groups.writes : groups.reads, static_cast<uint16_t>(lane), groups.committed[lane] + 1};
    }
    case AsyncKind::cp_async: {
      const CheckedGroups& groups = groups_of(scene, kind);
      return {groups.writes, kTogether, groups.committed[lane] + 1};
    }
    case AsyncKind::wgmma: {
      const auto [row, entry] = warpgroup_entry(scene, actor.warp);
      return {row, entry, scene.cluster.quarters[operation.id].front().committed + 1};
    }
    default: return tensor_completion_entry(scene, actor, kind);
  }
}

// The clock entry for the products of a warpgroup.
std::pair<uint16_t, uint16_t> Watch::warpgroup_entry(const Scene& scene, int32_t warp) {
  const auto first = scene.block.first_warp + static_cast<size_t>(warp / kWarpgroup * kWarpgroup);
  CheckedWarp& leader = scene.cluster.warps[first];
  if (leader.wgmma_row == 0) {
    CheckedCluster& cluster = scene.cluster;
    if (cluster.warpgroups_in_row == kLanes) {
      cluster.wgmma_row = new_row(cluster);
      cluster.warpgroups_in_row = 0;
    }
    leader.wgmma_row = cluster.wgmma_row;
    leader.wgmma_lane = static_cast<uint8_t>(cluster.warpgroups_in_row++);
  }
  return {leader.wgmma_row, leader.wgmma_lane};
}

void Watch::count_operation(const Scene& scene, const Actor& actor, AsyncKind kind) {
  if (kind == AsyncKind::wgmma) {
    scene.warp.wgmma_open = actor.instruction;
  } else if (kind == AsyncKind::bulk_store || kind == AsyncKind::cp_async) {
    CheckedGroups& groups = groups_of(scene, kind);
    groups.open |= actor.lanes;
    for (uint32_t m = actor.lanes; m; m &= m - 1) groups.last[first_of(m)] = actor.instruction;
  }
}

void Watch::async_signals(AsyncId id, BarrierId barrier_id, uint32_t) {
  CheckedCluster* const at = running_cluster(barrier_id.cta);
  if (!at) return;
  CheckedCluster& cluster = *at;
  const auto found = cluster.operations.find(id);
  CheckedMbarrier* const barrier = find(cluster, barrier_id);
  if (found == cluster.operations.end() || !barrier) return;
  CheckedOperation& operation = found->second;
  check_barrier_visible(cluster, operation, barrier_id, *barrier);
  // The barrier orders writes in its own block and all reads. In a pair of blocks one barrier may order both.
  const bool pairs = source_of(operation.actor.instruction).has("cta_group::2");
  for (const CheckedOperation::SpanSite& part : operation.parts) {
    if (part.global) {
      global_.set_done(part.site, barrier->completion_entry());
    } else if (!part.writes || part.cta == barrier_id.cta || (pairs && cluster.are_pair(part.cta, barrier_id.cta))) {
      cluster.sites[part.site].done.store(barrier->completion_entry(), std::memory_order_relaxed);
    }
  }
  barrier->published.join(operation.published);
}

void Watch::group_commits(const Actor& actor, AsyncKind kind) {
  const Scene scene = enter(actor);
  order_lanes(scene, actor);
  if (kind == AsyncKind::wgmma) {
    ++scene.warp.wgmma_committed;
    if (scene.warp.wgmma_open >= 0) scene.warp.wgmma_last = std::exchange(scene.warp.wgmma_open, -1);
    return;
  }
  CheckedGroups& groups = groups_of(scene, kind);
  groups.open &= ~actor.lanes;
  for (uint32_t m = actor.lanes; m; m &= m - 1) ++groups.committed[first_of(m)];
}

void Watch::group_waits(const Actor& actor, AsyncKind kind, uint32_t pending, bool read_only) {
  const Scene scene = enter(actor);
  order_lanes(scene, actor);
  const auto left = static_cast<int32_t>(std::min(pending, uint32_t{1} << 30));
  CheckedWarp& warp = scene.warp;
  if (kind == AsyncKind::wgmma) {
    warp.wgmma_done = std::max(warp.wgmma_done, warp.wgmma_committed - left);
    const auto [row, entry] = warpgroup_entry(scene, actor.warp);
    warp.learn(actor.lanes, row, entry, warp.wgmma_done);
    return;
  }
  CheckedGroups& groups = groups_of(scene, kind);
  for (uint32_t m = actor.lanes; m; m &= m - 1) {
    const int lane = first_of(m);
    const int32_t done = groups.committed[lane] - left;
    groups.reads_done[lane] = std::max(groups.reads_done[lane], done);
    if (!read_only) groups.done[lane] = std::max(groups.done[lane], done);
  }
  warp.touched(actor.lanes);
}

// Sites of operations that nothing refers to any more make room for new sites.
void Watch::collect_sites(CheckedCluster& cluster) {
  if (cluster.sites.count() < std::max(kManySites, 2 * cluster.sites_kept)) return;
  std::vector<bool> marked(cluster.sites.end());
  const auto mark = [&](Epoch epoch, uint64_t) { marked[epoch.site()] = true; };
  for (const CheckedBlock& block : cluster.blocks) {
    block.shared.for_each(mark);
    block.tensor.for_each(mark);
  }
  for (const auto& [id, operation] : cluster.operations)
    for (const CheckedOperation::SpanSite& part : operation.parts)
      if (!part.global) marked[part.site] = true;
  for (const auto& [id, barrier] : cluster.mbarriers) mark(barrier.init, 0);
  for (const CheckedWarp& warp : cluster.warps) warp.shared_sites.for_each([&](uint32_t site) { marked[site] = true; });
  cluster.sites.keep(marked);
  cluster.sites_kept = cluster.sites.count();
}

}  // namespace tandem::vgpu::check
