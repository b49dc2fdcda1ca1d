// Registers that an asynchronous operation reads or writes until a wait. PTX ISA, "wgmma.wait_group", "tcgen05.wait".
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/warpgroup.h"

namespace tandem::vgpu::machine {
namespace {

size_t row_of(int32_t at) { return static_cast<size_t>(at) / (4 * kLanes); }

struct Holder {
  bool mma_write = false, mma_read = false, tmem_load = false;
};

Holder holder_of(const Warp& warp, int32_t at) {
  Holder h;
  const size_t row = row_of(at);
  if (!warp.mma_writes.empty()) {
    h.mma_write = warp.mma_writes[row] > warp.groups_waited;
    h.mma_read = warp.mma_reads[row] > warp.groups_waited;
  }
  h.tmem_load = !warp.tmem_loads.empty() && warp.tmem_loads[row] > warp.loads_waited;
  return h;
}

void check(Context& context, const Op& op, int32_t at, bool writes) {
  if (at < 0) return;
  const Holder h = holder_of(context.warp, at);
  if (h.mma_write) write_sums(context.block, static_cast<size_t>(context.warp.index / 4));
  if (h.mma_write || (writes && h.mma_read)) {
    context.finds(Rule::pending_register, op, "",
                  std::string(writes ? "the instruction writes a register that an outstanding wgmma "
                                     : "the instruction reads a register that an outstanding wgmma ") +
                      (h.mma_write ? "writes" : "reads") + ": no wgmma.wait_group covers that wgmma yet");
    return;
  }
  if (!h.tmem_load) return;
  // The compiler orders the write, so that the values are available. A finding by the letter reports it.
  for (const auto& load : context.warp.tmem_pending_ops) context.cluster.async.finish(load);
  context.warp.loads_waited = context.warp.loads_issued;
  context.finds(Rule::pending_load, op, "",
                writes ? "the instruction writes a register that a tcgen05.ld also writes, before the wait::ld"
                       : "the instruction reads the result of a tcgen05.ld before the wait::ld");
  if (context.grid.observer != nullptr) context.grid.observer->tcgen05_waits(context.actor(op), true, false);
}

bool is_row(const Op& op) {
  return op.action.shape != Shape::exec && op.action.shape != Shape::branch && op.action.shape != Shape::join;
}

}  // namespace

void check_held(Context& context, const Op& op) {
  if (context.mask == 0) return;
  if (is_row(op)) {
    const int32_t inputs[] = {op.a, op.b, op.c, op.e};
    for (const int32_t at : inputs) check(context, op, at, false);
    if (op.width != 0) check(context, op, op.d, true);
    return;
  }
  if (op.detail == nullptr) return;
  for (const int32_t at : op.detail->in) check(context, op, at, false);
  for (const int32_t at : op.detail->out) check(context, op, at, true);
}

bool rename_held(Context& context, const Op& op) {
  Warp& warp = context.warp;
  if (warp.mma_writes.empty() || !holder_of(warp, op.a).mma_write) return false;
  const size_t from = row_of(op.a), to = row_of(op.d);
  warp.mma_writes[to] = warp.mma_writes[from];
  Warpgroup& group = *warp.block->warpgroups[static_cast<size_t>(warp.index / 4)];
  const int member = warp.index % 4;
  // The newest outstanding wgmma that writes the register, or a copy of it.
  for (auto at = group.under_way.rbegin(); at != group.under_way.rend(); ++at) {
    if ((at->issued_by >> member & 1) == 0) continue;
    bool writes = writes_register(*at, op.a);
    for (const LateCopy& copy : at->copies) writes = writes || (copy.warp == member && copy.to == op.a);
    if (!writes) continue;
    at->copies.push_back({member, op.a, op.d, context.mask});
    return true;
  }
  // The product is complete.
  write_sums(*warp.block, static_cast<size_t>(warp.index / 4));
  const uint32_t* a = context.row(op.a);
  uint32_t* d = context.row(op.d);
  TANDEM_EACH_LANE(lane, context.mask) d[lane] = a[lane];
  return true;
}

}  // namespace tandem::vgpu::machine
