// Divergence: the fragments of a warp, and their reconvergence.
#include "base/text.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

int32_t new_join(Warp& warp, int32_t pc, uint32_t lanes, int32_t parent) {
  for (size_t i = 0; i < warp.joins.size(); ++i) {
    if (warp.joins[i].lanes != 0) continue;
    warp.joins[i] = {pc, parent, lanes, 0};
    return static_cast<int32_t>(i);
  }
  return parent;  // there cannot be more divergences than lanes
}

void remove(Warp& warp, Fragment& fragment) {
  fragment.mask = 0;
  --warp.fragment_count;
}

}  // namespace

Fragment& new_fragment(Warp& warp, uint32_t mask, int32_t pc, int32_t join) {
  size_t i = 0;
  while (warp.fragments[i].mask != 0) ++i;
  warp.fragments[i] = Fragment();
  warp.fragments[i].mask = mask;
  warp.fragments[i].pc = pc;
  warp.fragments[i].join = join;
  ++warp.fragment_count;
  return warp.fragments[i];
}

void diverge(Warp& warp, Fragment& fragment, uint32_t taken, int32_t target, int32_t join) {
  int32_t record = fragment.join;
  if (join >= 0 && (record < 0 || warp.joins[static_cast<size_t>(record)].pc != join))
    record = new_join(warp, join, fragment.mask, record);
  fragment.mask &= ~taken;
  fragment.join = record;
  ++fragment.pc;
  new_fragment(warp, taken, target, record);
}

Step split_fragment(Context& context, std::span<const uint32_t> groups) {
  for (const uint32_t group : groups.subspan(1)) {
    context.fragment.mask &= ~group;
    new_fragment(context.warp, group, context.fragment.pc, context.fragment.join);
  }
  return Step::jump;
}

bool rejoin(Warp& warp, Fragment& fragment, int32_t pc) {
  while (fragment.join >= 0) {
    Join& join = warp.joins[static_cast<size_t>(fragment.join)];
    if (join.pc != pc) return true;
    join.arrived |= fragment.mask;
    if (join.arrived != join.lanes) {
      remove(warp, fragment);
      return false;
    }
    fragment.mask = join.lanes;
    fragment.join = join.parent;
    join.lanes = 0;
  }
  return true;
}

bool break_joins(Warp& warp) {
  bool any = false;
  for (Join& join : warp.joins) {
    if (join.lanes == 0 || join.arrived == 0) continue;
    int32_t parent = join.parent;  // fragments at the same place do not wait for them either
    for (; parent >= 0 && warp.joins[static_cast<size_t>(parent)].pc == join.pc;
         parent = warp.joins[static_cast<size_t>(parent)].parent)
      warp.joins[static_cast<size_t>(parent)].lanes &= ~join.arrived;
    new_fragment(warp, join.arrived, join.pc + 1, parent);
    join.lanes &= ~join.arrived;
    join.arrived = 0;
    any = true;
  }
  return any;
}

void exit_lanes(Context& context, const Op& op, uint32_t lanes) {
  Warp& warp = context.warp;
  if (context.grid.observer != nullptr) context.grid.observer->exits({context.block.cta, warp.index, lanes, op.source});
  warp.alive &= ~lanes;
  // Threads that have ended count as arrived at the cluster barrier, once each.
  TANDEM_EACH_LANE(lane, lanes & warp.cluster_arrived)
  if (warp.cluster_generation[lane] == context.cluster.barrier_generation) --context.cluster.barrier_arrived;
  warp.cluster_arrived &= ~lanes;
  const int count = __builtin_popcount(lanes);
  context.block.threads_alive -= count;
  context.cluster.threads_alive -= count;
  ++context.cluster.events;
  context.fragment.mask &= ~lanes;
  if (context.fragment.mask == 0) --warp.fragment_count;
  for (Join& join : warp.joins) {
    join.lanes &= ~lanes;
    if (join.lanes == 0 || join.arrived != join.lanes) continue;
    new_fragment(warp, join.arrived, join.pc, join.parent);
    join.lanes = 0;
  }
  if (context.block.threads_alive == 0) end_block(context.block);
}

bool is_whole(Context& context, const Op& op, Exited exited) {
  const Warp& warp = context.warp;
  if (context.mask != warp.alive)
    return context.finds(Rule::divergent_aligned, op, "",
                         str_cat("the instruction needs all threads of the warp, but only lanes ", context.mask,
                                 " (a mask) of ", warp.alive, " execute it together"));
  if (warp.alive == warp.launched || exited == Exited::do_not_matter) return true;
  return context.finds(exited == Exited::matter ? Rule::divergent_aligned : Rule::exited_lanes, op, "",
                       str_cat("the instruction needs all threads of the warp, but lanes ", warp.launched & ~warp.alive,
                               " (a mask) have exited"));
}

bool gather_lanes(Context& context, const Op& op, uint32_t members, bool any_place, uint32_t* present) {
  *present = context.mask;
  members &= context.warp.alive;
  if ((members & ~context.mask) == 0) return true;
  context.fragment.state = members;
  uint32_t there = context.mask;
  for (const Fragment& other : context.warp.fragments) {
    if (other.mask == 0 || &other == &context.fragment || !other.tried) continue;
    const Op& waiting = context.grid.code->ops[static_cast<size_t>(other.pc)];
    const bool same = any_place ? waiting.action.shape == Shape::exec && waiting.action.exec == op.action.exec
                                : other.pc == context.fragment.pc;
    if (same) there |= other.mask;
  }
  *present = there;
  return (members & ~there) == 0;
}

void release_lanes(Context& context, const Op& op, uint32_t lanes) {
  for (Fragment& other : context.warp.fragments) {
    if (other.mask == 0 || &other == &context.fragment || !other.tried || (other.mask & lanes) == 0) continue;
    const Op& waiting = context.grid.code->ops[static_cast<size_t>(other.pc)];
    if (waiting.action.shape != Shape::exec || waiting.action.exec != op.action.exec) continue;
    other.tried = false;
    ++other.pc;
  }
}

}  // namespace tandem::vgpu::machine
