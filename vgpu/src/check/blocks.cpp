// The events at the begin and end of blocks.
#include <algorithm>
#include <iterator>
#include <tuple>

#include "base/text.h"
#include "vgpu/src/check/names.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu {

std::unique_ptr<Checker> Checker::create(const LaunchDescription& launch, const Model& model,
                                         std::span<const Buffer> buffers, CheckerOptions options) {
  std::vector<Buffer> all(buffers.begin(), buffers.end());
  if (!all.empty()) std::ranges::copy(launch.program->variables(), std::back_inserter(all));
  return std::make_unique<check::Watch>(launch, model, all, options);
}

namespace check {
namespace {

size_t count(gpu::Dim3 size) { return size_t{size.x} * size.y * size.z; }

}  // namespace

Watch::Watch(const LaunchDescription& launch, const Model& model, std::span<const Buffer> buffers,
             CheckerOptions options)
    : launch_(launch),
      global_(buffers),
      findings_(*launch.program, options.max_findings, options.letter),
      alone_(count(launch.cluster) == count(launch.grid)),
      clusters_(std::make_unique<std::atomic<CheckedCluster*>[]>(count(launch.grid))) {
  check_limits(model);
}

Watch::~Watch() = default;

std::vector<Finding> Watch::findings() const {
  std::vector<Finding> all = findings_.all();
  const auto place = [&](const Finding& f) {
    const int32_t instruction = f.party.instruction;
    if (instruction < 0) return std::tuple(-1, 0, 0, instruction);
    const ptx::Location& at = launch_.program->source(instruction).location;
    return std::tuple(at.file, at.line, at.ptx_line, instruction);
  };
  std::stable_sort(all.begin(), all.end(), [&](const Finding& a, const Finding& b) { return place(a) < place(b); });
  return all;
}

void Watch::finds(Finding finding) {
  if (finding.rule == Rule::tmem_leak) return;  // reported with the allocation when the block ends
  const Accessor& by = finding.party;
  if (findings_.counts({finding.rule, by.cta, by.warp, by.instruction, finding.other.instruction, kNoAddress}))
    findings_.add(std::move(finding));
}

void Watch::block_begins(int32_t cta, int32_t cluster, int32_t threads, uint32_t shared_bytes) {
  CheckedCluster* home = nullptr;
  {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<CheckedCluster>& found = running_[cluster];
    if (!found) {
      found = std::make_unique<CheckedCluster>();
      found->id = cluster;
    }
    home = found.get();
  }
  clusters_[static_cast<size_t>(cta)].store(home, std::memory_order_release);
  ++home->running;
  CheckedBlock& block = home->blocks.emplace_back();
  block.cta = cta;
  block.threads = threads;
  block.shared_end = shared_bytes;
  block.first_row = home->rows;
  block.first_warp = home->warps.size();
  for (int32_t w = 0; w * kLanes < threads; ++w) {
    CheckedWarp& warp = home->warps.emplace_back();
    warp.cta = cta;
    warp.index = w;
    warp.row = new_row(*home);
    const int32_t existing = std::min(kLanes, threads - w * kLanes);
    warp.begin(existing == kLanes ? kAllLanes : (1u << existing) - 1);
  }
  block.local.resize((static_cast<size_t>(threads) + kLanes - 1) / kLanes);
  begin_block(*home, block);
}

Watch::Scene Watch::enter(const Actor& actor) {
  CheckedCluster& cluster = cluster_of(actor.cta);
  CheckedBlock& block = *cluster.find(actor.cta);
  CheckedWarp& warp = cluster.warps[block.first_warp + static_cast<size_t>(actor.warp)];
  for (const CheckedWarp::Read& read : warp.reads) {
    VectorClock published;
    const uint64_t known = warp.versions_beyond.find(read.address, read.lanes, read.acquires);
    const uint64_t version = syncs_.learn(read.address, known, &published, cluster.id);
    if (version == known) continue;
    warp.versions_beyond.learn(read.address, read.lanes, read.acquires, version);
    if (read.acquires) {
      warp.acquire(read.lanes, published);
    } else {
      warp.acquire_relaxed(read.lanes, published);
    }
  }
  warp.reads.clear();
  ++warp.events;
  return {cluster, block, warp};
}

void Watch::exits(const Actor& actor) {
  const Scene scene = enter(actor);
  check_groups_at_exit(scene, actor);
  scene.block.at_exit.join(scene.warp.release(actor.lanes));
}

// After the exit no thread can wait for the operations that this thread leaves outstanding.
void Watch::check_groups_at_exit(const Scene& scene, const Actor& actor) {
  const auto left = [&](Rule rule, int32_t lane, int32_t by, std::string message) {
    if (!findings_.counts({rule, actor.cta, actor.warp, by, actor.instruction, kNoAddress})) return;
    Finding finding;
    finding.rule = rule;
    finding.party = {actor.cta, actor.warp, lane, by, str_cat(source_of(by).opcode, " is issued")};
    finding.other = {actor.cta, actor.warp, lane, actor.instruction, "thread exits"};
    finding.message = std::move(message);
    findings_.add(std::move(finding));
  };
  const CheckedWarp& warp = scene.warp;
  if (warp.wgmma_open >= 0) {
    left(Rule::uncommitted, -1, warp.wgmma_open,
         "the warp issues a matrix product without a commit, so that no wait can cover the product");
  } else if (warp.wgmma_done < warp.wgmma_committed) {
    left(Rule::uncommitted, -1, warp.wgmma_last,
         "a matrix product is committed, but the warp exits without a wait for it");
  }
  if (!warp.bulk) return;
  for (uint32_t m = actor.lanes; m; m &= m - 1) {
    const int lane = first_of(m);
    if (warp.bulk->open >> lane & 1) {
      left(Rule::unwaited_store, lane, warp.bulk->last[lane],
           "the thread exits while its bulk store, which is not committed, may still read shared memory");
    } else if (warp.bulk->reads_done[lane] < warp.bulk->committed[lane]) {
      left(Rule::unwaited_store, lane, warp.bulk->last[lane],
           "the thread exits while its bulk store may still read shared memory: no wait covers the store");
    }
  }
}

void Watch::block_ends(int32_t cta) {
  CheckedCluster& cluster = cluster_of(cta);
  CheckedBlock& block = *cluster.find(cta);
  check_left_under_way(cluster, block);
  check_commits_of_peers(cluster, block);
  check_columns_at_end(block);
  if (--cluster.running > 0) return;
  for (const CheckedBlock& each : cluster.blocks) clusters_[static_cast<size_t>(each.cta)].store(nullptr);
  const std::lock_guard lock(mutex_);
  running_.erase(cluster.id);
}

// The shared memory ends with the block, so no access to it may be outstanding.
void Watch::check_left_under_way(CheckedCluster& cluster, CheckedBlock& block) {
  if (cluster.blocks.size() == 1 && !cluster.async_in_shared) return;  // only its threads use it, and they have exited
  // The checker only requires that the access has happened, so that a relaxed barrier suffices.
  const auto happened = [&](uint16_t row, uint32_t lanes, int32_t time) {
    return knows(block.at_exit.seen, row, lanes, time) || knows(block.at_exit.relaxed, row, lanes, time);
  };
  const auto known = [&](const Site& site, Epoch epoch) {
    if (site.kind == SiteKind::thread) {
      return site.cta == block.cta || happened(site.row, epoch.lanes(site.lanes), epoch.time());
    }
    const ClockEntry done = site.done.load(std::memory_order_relaxed);
    const uint32_t lanes = done.lane == kTogether ? site.lanes : 1u << done.lane;
    return done.time != 0 && happened(done.row, lanes, done.time);
  };
  block.shared.for_each([&](Epoch epoch, uint64_t at) {
    const Site& site = cluster.sites[epoch.site()];
    if (known(site, epoch) || !cluster.reported.insert(epoch.site()).second) return;
    if (site.kind == SiteKind::async && waits_by_group(site.async)) return;  // the thread's own exit has reported it
    if (!findings_.counts({Rule::live_at_exit, site.cta, site.warp, site.instruction, -1, at})) return;
    Finding finding;
    finding.rule = Rule::live_at_exit;
    finding.party = party_of(site, epoch);
    finding.subject = subject_of(Memory::shared, at);
    finding.other = {block.cta, -1, -1, -1, "block ends"};
    finding.message =
        site.kind == SiteKind::async
            ? str_cat("the block ends before any of its threads has seen the ", name_of(site.async), " complete")
            : "the block ends, but nothing makes the block wait until another block has used its memory";
    findings_.add(std::move(finding));
  });
}

}  // namespace check
}  // namespace tandem::vgpu
