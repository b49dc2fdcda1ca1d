// Tensor memory: its columns, and operations of the tensor core on it.
#include <algorithm>

#include "base/text.h"
#include "vgpu/src/check/names.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu::check {
namespace {

constexpr uint32_t kTensorColumns = 512;

uint32_t lane_of(const Span& span) { return static_cast<uint32_t>(span.address >> 16); }
uint32_t column_of(const Span& span) { return static_cast<uint32_t>(span.address & 0xffff); }

// Entries in a warp's row for loads and stores.
constexpr uint16_t kLoads = 0, kStores = 1;

}  // namespace

uint64_t shadow_address(const Span& span) {
  return span.memory == Memory::tensor ? uint64_t{column_of(span)} * kTensorLanes + lane_of(span) : span.address;
}

// The machine reports cells outside the allocations or the warp's lanes.
bool Watch::in_tensor_memory(const Span& span) {
  return lane_of(span) + span.rows <= kTensorLanes && column_of(span) + span.bytes / 4 <= kTensorColumns;
}

void Watch::touch_columns(CheckedBlock& block, const Span& span, Access& access) {
  const auto enters_page = [&](uint64_t page) { access.page = page; };
  if (span.rows == kTensorLanes) {
    block.tensor.touch(shadow_address(span), uint64_t{span.bytes} / 4 * kTensorLanes, access, enters_page);
    return;
  }
  for (uint32_t c = 0; c < span.bytes / 4; ++c)
    block.tensor.touch(shadow_address(span) + uint64_t{c} * kTensorLanes, span.rows, access, enters_page);
}

ClockEntry Watch::tensor_completion_entry(const Scene& scene, const Actor& actor, AsyncKind kind) {
  CheckedWarp& warp = scene.warp;
  switch (kind) {
    case AsyncKind::tcgen05_mma:
    case AsyncKind::tcgen05_cp:
    case AsyncKind::tcgen05_shift: {
      if (!warp.tensor_row) warp.tensor_row = new_row(scene.cluster);
      const int lane = first_of(actor.lanes);
      return {warp.tensor_row, static_cast<uint16_t>(lane), warp.tensor_committed[lane] + 1};
    }
    case AsyncKind::tcgen05_ld:
    case AsyncKind::tcgen05_st: {
      if (!warp.tensor_io_row) warp.tensor_io_row = new_row(scene.cluster);
      const bool load = kind == AsyncKind::tcgen05_ld;
      return {warp.tensor_io_row, load ? kLoads : kStores, (load ? warp.tensor_loads : warp.tensor_stores) + 1};
    }
    default: return {};
  }
}

void Watch::tcgen05_commits(const Actor& actor, std::span<const BarrierId> barriers) {
  const Scene scene = enter(actor);
  CheckedWarp& warp = scene.warp;
  // The barriers are used before the release, so that threads that wait for the phase know of this use in every block.
  for (const BarrierId id : barriers) {
    check_begun(scene, actor, id.cta, "commits to the barrier");
    use_barrier(scene, actor, id, false, "commits to the barrier");
  }
  if (!warp.tensor_row) warp.tensor_row = new_row(scene.cluster);
  VectorClock published = warp.release(actor.lanes);
  for (uint32_t m = actor.lanes; m; m &= m - 1) {
    const int lane = first_of(m);
    raise(&published.seen, warp.tensor_row, lane, ++warp.tensor_committed[lane]);
  }
  for (const BarrierId id : barriers) {
    if (CheckedMbarrier* const barrier = find(scene.cluster, id)) {
      barrier->published.join(published);
      note_commit(scene, actor, id, barrier);
    }
  }
}

void Watch::tcgen05_waits(const Actor& actor, bool loads, bool stores) {
  const Scene scene = enter(actor);
  CheckedWarp& warp = scene.warp;
  if (warp.tensor_io_row && loads) warp.learn(actor.lanes, warp.tensor_io_row, kLoads, ++warp.tensor_loads);
  if (warp.tensor_io_row && stores) warp.learn(actor.lanes, warp.tensor_io_row, kStores, ++warp.tensor_stores);
  order_lanes(scene, actor);
}

void Watch::tcgen05_fence(const Actor& actor, bool before) {
  CheckedWarp& warp = enter(actor).warp;
  if (before) {
    warp.tensor_fenced_loads = warp.tensor_loads;
    warp.tensor_fenced_stores = warp.tensor_stores;
  } else {
    warp.tensor_fence(actor.lanes);
  }
}

// If a barrier orders an operation after one of another thread, fences are required on both sides of the barrier.
void Watch::check_tensor_fences(const Scene& scene, const Actor& actor, const Accessor& party, const Site& past) {
  if (past.cta == actor.cta && past.warp == actor.warp) return;
  const CheckedBlock* const block = scene.cluster.find(past.cta);
  const CheckedWarp& other = scene.cluster.warps[block->first_warp + past.warp];
  const ClockEntry done = past.done.load(std::memory_order_relaxed);
  const int32_t group = done.time;
  const bool before = (past.async == AsyncKind::tcgen05_ld && group > other.tensor_fenced_loads) ||
                      (past.async == AsyncKind::tcgen05_st && group > other.tensor_fenced_stores);
  // A barrier after the fence that publishes other operations does not invalidate the fence.
  const uint32_t lanes = done.lane == kTogether ? past.lanes : 1u << done.lane;
  const bool after = (scene.warp.tensor_stale & actor.lanes) != 0 &&
                     !knows(scene.warp.share_of(first_of(actor.lanes)).tensor_seen, done.row, lanes, done.time);
  if (!before && !after) return;
  if (!findings_.counts(
          {Rule::missing_tcgen05_fence, actor.cta, actor.warp, actor.instruction, past.instruction, kNoAddress}))
    return;
  findings_.add(Rule::missing_tcgen05_fence, party,
                {past.cta, past.warp, -1, past.instruction, std::string(name_of(past.async))}, "",
                str_cat("no tcgen05.fence::", after ? "after" : "before", "_thread_sync separates the access from the ",
                        name_of(past.async), " that a barrier orders before the access"));
}

void Watch::tmem_allocates(const Actor& actor, uint32_t column, uint32_t columns, int32_t peer) {
  const Scene scene = enter(actor);
  order_lanes(scene, actor);
  if (peer >= 0) check_begun(scene, actor, peer, "allocates tensor memory together with the block");
  scene.block.columns.push_back({column, columns, actor});
}

void Watch::tmem_frees(const Actor& actor, uint32_t column, uint32_t columns) {
  const Scene scene = enter(actor);
  order_lanes(scene, actor);
  CheckedBlock& block = scene.block;
  std::erase_if(block.columns, [&](const TmemAllocation& a) { return a.column == column && a.columns == columns; });
  // Outstanding accesses to the columns conflict with this access.
  scene.warp.for_each_share(actor.lanes, [&](const LaneGroup& share, uint32_t by) {
    Access access(scene.cluster.sites, scene.cluster.id, actor.cta);
    access.issued_by(scene.warp, share, by);
    access.trusts_relaxed(Relaxed::ordered);
    access.epoch = Epoch(thread_site(scene, actor, by, false), scene.warp.time(), kTogether, kWeak, true);
    access.writes = true;
    block.tensor.touch(uint64_t{column} * kTensorLanes, uint64_t{columns} * kTensorLanes, access,
                       [&](uint64_t page) { access.page = page; });
    report(party_of(actor, -1, "frees tensor memory"), access, Memory::tensor, scene.cluster.sites);
  });
  block.tensor.forget(uint64_t{column} * kTensorLanes, uint64_t{columns} * kTensorLanes);
}

void Watch::check_columns_at_end(const CheckedBlock& block) {
  for (const TmemAllocation& left : block.columns) {
    if (!findings_.counts({Rule::tmem_leak, left.by.cta, left.by.warp, left.by.instruction, -1, left.column})) continue;
    findings_.add(Rule::tmem_leak, party_of(left.by, -1, "allocates"), {block.cta, -1, -1, -1, "block ends"},
                  subject_of(Memory::tensor, uint64_t{left.column} * kTensorLanes),
                  str_cat(left.columns, " columns are never freed"));
  }
}

}  // namespace tandem::vgpu::check
