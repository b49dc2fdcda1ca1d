// The scheduler: warps of a cluster take turns, their fragments take turns, and asynchronous operations complete in
// between.
#include <algorithm>
#include <utility>

#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

constexpr int64_t kSlice = 2000;  // ops that a fragment executes before another has its turn
// Limits of ops executed without an event. Above the first limit a fragment is probably waiting, above the second one
// certainly.
constexpr int64_t kIdle = 40'000, kStarving = 1'000'000;
constexpr uint64_t kQuietPart = 4;  // part of max_instructions that may have no event
constexpr int kHopelessRounds = 3;  // rounds in which waits have ended by their time limit

int64_t slice_length(Cluster& cluster) {
  if (cluster.grid->options.schedule.seed == 0) return kSlice;
  // Some slices are short, because races hide between neighbouring instructions.
  return cluster.random.below(4) == 0 ? 1 + cluster.random.below(16) : 1 + cluster.random.below(2 * kSlice);
}

// Executes one slice of every fragment of the warp. Returns true if an op was executed.
bool run_warp(Cluster& cluster, Warp& warp, int64_t* executed) {
  bool any = false;
  const int count = warp.fragment_count;
  for (int n = 0, seen = 0; n < kLanes && seen < count; ++n) {
    const auto at = static_cast<size_t>(warp.next_fragment = (warp.next_fragment + 1) % kLanes);
    Fragment& fragment = warp.fragments[at];
    if (fragment.mask == 0) continue;
    ++seen;
    const int64_t slice = slice_length(cluster);
    int64_t left = slice;
    const Step step = execute(*cluster.grid, warp, fragment, &left);
    *executed += slice - left;
    warp.executed += static_cast<uint64_t>(slice - left);
    any = any || left < slice || step == Step::gone;
    if (step == Step::end) return true;
    cluster.async.advance(&cluster.random);
  }
  return any;
}

bool end_waits(Cluster& cluster) {
  bool any = false;
  for (Warp* warp : cluster.warps)
    for (Fragment& fragment : warp->fragments) {
      if (fragment.mask == 0 || fragment.wait.kind != WaitKind::mbarrier || !fragment.tried) continue;
      fragment.time_is_up = true;
      any = true;
    }
  return any;
}

// Handles a cluster whose fragments cannot proceed. Returns false if the cluster is deadlocked.
bool unstick(Cluster& cluster) {
  if (cluster.async.force(&cluster.random)) return true;
  bool any = false;
  for (Warp* warp : cluster.warps) any = break_joins(*warp) || any;
  if (any) return true;
  return ++cluster.hopeless <= kHopelessRounds && end_waits(cluster);
}

// Counts executed ops. Returns true if the cluster exceeds the limit of the options.
bool over_bound(Cluster& cluster, uint64_t executed, bool any_event) {
  Grid& grid = *cluster.grid;
  const uint64_t bound = grid.options.max_instructions * cluster.blocks.size();
  const uint64_t progress = any_event ? grid.progress.fetch_add(1) + 1 : grid.progress.load();
  const bool others_proceed = !any_event && progress != cluster.seen_progress;
  cluster.seen_progress = progress;
  if (others_proceed) {  // the cluster may have waited for them
    cluster.executed -= std::exchange(cluster.quiet, 0);
    return false;
  }
  cluster.executed += executed;
  cluster.quiet = any_event ? 0 : cluster.quiet + executed;
  const uint64_t quiet_bound = std::max<uint64_t>(bound / kQuietPart, 2 * kStarving);
  return bound != 0 && (cluster.executed > bound || cluster.quiet > quiet_bound);
}

}  // namespace

Turn take_turn(Cluster& cluster, int64_t budget) {
  const auto count = cluster.warps.size();
  const bool in_order = cluster.grid->options.schedule.seed == 0;
  while (budget > 0) {
    const uint64_t events = cluster.events;
    bool any = false;
    int64_t executed = 0;
    if (!in_order) cluster.next_warp = cluster.random.below(static_cast<uint32_t>(count));
    for (size_t n = 0; n < count; ++n) {
      Warp& warp = *cluster.warps[cluster.next_warp];
      cluster.next_warp = (cluster.next_warp + 1) % count;
      if (warp.fragment_count != 0) any = run_warp(cluster, warp, &executed) || any;
      if (cluster.grid->stopped.load(std::memory_order_relaxed)) return Turn::stopped;
    }
    budget -= executed + 1;
    cluster.grid->executed.fetch_add(static_cast<uint64_t>(executed), std::memory_order_relaxed);
    if (cluster.threads_alive == 0) {
      while (cluster.async.force(&cluster.random)) {
      }
      return Turn::done;
    }
    if (cluster.events != events) cluster.idle = cluster.starving = cluster.hopeless = 0;
    if (!any && cluster.events == events && !unstick(cluster)) {
      report_deadlock(cluster);
      return Turn::stopped;
    }
    if (over_bound(cluster, static_cast<uint64_t>(executed), cluster.events != events)) {
      report_endless_loop(cluster);
      return Turn::stopped;
    }
    if (cluster.events != events) continue;
    cluster.idle += executed;
    if (cluster.idle < kIdle) continue;
    cluster.starving += std::exchange(cluster.idle, 0);
    if (cluster.async.force(&cluster.random)) continue;
    if (cluster.starving < kStarving) return Turn::idle;
    cluster.starving = 0;
    for (Warp* warp : cluster.warps) break_joins(*warp);
  }
  return Turn::active;
}

}  // namespace tandem::vgpu::machine
