// The table of a kernel that does not end: for each warp its source line and the event that it waits for.
#include <cstdio>
#include <utility>

#include "base/text.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

const Op& op_at(const Code& code, int32_t pc) { return code.ops[static_cast<size_t>(pc)]; }

// Returns the source lines of the smallest loop around an op, by the backward branches of the kernel.
std::string loop_around(const Code& code, int32_t pc) {
  int32_t first = -1, last = -1;
  for (int32_t at = pc; at < static_cast<int32_t>(code.ops.size()); ++at) {
    const Op& op = op_at(code, at);
    if (op.action.shape != Shape::branch || op.d > pc || (first >= 0 && at - op.d >= last - first)) continue;
    first = op.d;
    last = at;
  }
  if (first < 0) return "code at " + code.place(op_at(code, pc).source);
  const std::string from = code.place(op_at(code, first).source), to = code.place(op_at(code, last).source);
  return "the loop " + (from == to ? "at " + from : "from " + from + " to " + to);
}

std::string text_of(const Block& block, const Fragment& fragment) {
  const Wait& wait = fragment.wait;
  char text[160];
  switch (wait.kind) {
    case WaitKind::none: return "executes";
    case WaitKind::lanes:
      std::snprintf(text, sizeof text, "waits for lanes 0x%08x of its warp", static_cast<unsigned>(wait.a));
      break;
    case WaitKind::named: {
      const NamedBarrier& barrier = block.named[wait.a];
      std::snprintf(text, sizeof text, "waits at named barrier %u: %u of %u threads have arrived",
                    static_cast<unsigned>(wait.a), barrier.arrived, barrier.expected);
      break;
    }
    case WaitKind::cluster:
      std::snprintf(text, sizeof text, "waits at the cluster barrier: %d of %d threads have arrived",
                    block.cluster->barrier_arrived, block.cluster->threads_alive);
      break;
    case WaitKind::mbarrier:
      for (const Mbarrier& barrier : block.mbarriers) {
        if (barrier.address != wait.a) continue;
        std::snprintf(text, sizeof text,
                      "waits for parity %u of the mbarrier at 0x%x: phase %llu is open, %u of %u arrivals and %lld "
                      "bytes are missing",
                      static_cast<unsigned>(wait.b), barrier.address, static_cast<unsigned long long>(barrier.phase),
                      barrier.pending, barrier.expected, static_cast<long long>(barrier.bytes));
        return text;
      }
      return "waits for an mbarrier that has been invalidated";
    case WaitKind::wgmma: return "waits for a matrix product that its whole warpgroup has not issued";
    case WaitKind::bulk: return "waits for bulk copies";
    case WaitKind::cp_async: return "waits for cp.async copies";
    case WaitKind::tensor_memory: return "waits for tensor memory loads or stores";
    case WaitKind::registers:
      std::snprintf(text, sizeof text, "waits for %u registers a thread: %u are free in the block",
                    static_cast<unsigned>(wait.a), static_cast<unsigned>(wait.b));
      break;
    case WaitKind::tmem_columns:
      std::snprintf(text, sizeof text, "waits for %u columns of tensor memory", static_cast<unsigned>(wait.a));
      break;
    case WaitKind::pair: return "waits for the other block of its pair";
  }
  return text;
}

}  // namespace

std::string stuck_table(const Cluster& cluster) {
  std::string table;
  for (const Warp* warp : cluster.warps) {
    for (const Fragment& fragment : warp->fragments) {
      if (fragment.mask == 0) continue;
      const Op& op = cluster.grid->code->ops[static_cast<size_t>(fragment.pc)];
      char lanes[32] = "";
      if (fragment.mask != warp->alive) std::snprintf(lanes, sizeof lanes, " lanes 0x%08x", fragment.mask);
      table += "\n  block " + std::to_string(warp->block->cta) + " warp " + std::to_string(warp->index) + lanes + " " +
               text_of(*warp->block, fragment) + "\n    at " + cluster.grid->code->place(op.source);
    }
    for (const Join& join : warp->joins) {
      if (join.lanes == 0 || join.arrived == 0) continue;
      char lanes[64];
      std::snprintf(lanes, sizeof lanes, " lanes 0x%08x wait for lanes 0x%08x", join.arrived,
                    join.lanes & ~join.arrived);
      table += "\n  block " + std::to_string(warp->block->cta) + " warp " + std::to_string(warp->index) + lanes +
               "\n    to meet at " +
               cluster.grid->code->place(cluster.grid->code->ops[static_cast<size_t>(join.pc)].source);
    }
  }
  return table;
}

void report_deadlock(Cluster& cluster) {
  Actor actor{cluster.blocks[0].cta, -1, 0, -1};
  for (const Warp* warp : cluster.warps)  // the first waiting fragment
    for (const Fragment& fragment : warp->fragments)
      if (fragment.mask != 0 && fragment.tried && actor.instruction < 0)
        actor = {warp->block->cta, warp->index, fragment.mask,
                 cluster.grid->code->ops[static_cast<size_t>(fragment.pc)].source};
  report(*cluster.grid, actor, Rule::deadlock, "", "no warp can continue:" + stuck_table(cluster), true);
}

const Fragment* busiest_fragment(const Cluster& cluster, const Warp** warp) {
  const Fragment* best = nullptr;
  for (const Warp* each : cluster.warps)
    for (const Fragment& fragment : each->fragments) {
      if (fragment.mask == 0) continue;
      if (best != nullptr && std::pair(!fragment.tried, each->executed) <= std::pair(!best->tried, (*warp)->executed))
        continue;
      best = &fragment;
      *warp = each;
    }
  return best;
}

void report_endless_loop(Cluster& cluster) {
  const Grid& grid = *cluster.grid;
  const Warp* warp = nullptr;
  const Fragment* const fragment = busiest_fragment(cluster, &warp);
  if (fragment == nullptr) return report_deadlock(cluster);
  const uint64_t blocks = cluster.blocks.size();
  const bool quiet = cluster.executed <= grid.options.max_instructions * blocks;
  const std::string message =
      str_cat("the warp repeats ", loop_around(*grid.code, fragment->pc), ", and its block has executed ",
              (quiet ? cluster.quiet : cluster.executed) / blocks, " warp instructions without ",
              quiet ? "a store, a barrier, a copy or an exit" : "an end", ":");
  report(*cluster.grid, {warp->block->cta, warp->index, fragment->mask, op_at(*grid.code, fragment->pc).source},
         Rule::endless_loop, "", message + stuck_table(cluster), true);
}

}  // namespace tandem::vgpu::machine
