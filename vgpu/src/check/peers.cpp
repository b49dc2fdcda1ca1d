// Blocks of a cluster run at the same time, but they do not begin and end at the same time. A block must know that a
// peer has begun before it accesses the peer. A block must not end before arrivals of a peer's tensor core. A barrier
// of the cluster proves that peers have begun, and so does synchronisation with a thread that has passed one.
#include <algorithm>

#include "base/text.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu::check {

// Every thread knows that its own block has begun.
void Watch::begin_block(CheckedCluster& cluster, const CheckedBlock& block) {
  if (cluster.blocks.size() == 1) cluster.begun_row = new_row(cluster);
  const auto lane = static_cast<int>(cluster.blocks.size()) - 1;
  for (size_t w = block.first_warp; w < cluster.warps.size(); ++w)
    cluster.warps[w].learn(kAllLanes, cluster.begun_row, lane, 1);
}

void Watch::learn_begun(const Scene& scene, const Actor& actor) {
  for (size_t i = 0; i < scene.cluster.blocks.size(); ++i)
    scene.warp.learn(actor.lanes, scene.cluster.begun_row, static_cast<int>(i), 1);
}

void Watch::check_begun(const Scene& scene, const Actor& actor, int32_t cta, std::string_view does) {
  if (cta == actor.cta) return;
  const std::deque<CheckedBlock>& blocks = scene.cluster.blocks;
  int lane = 0;
  while (lane < static_cast<int>(blocks.size()) && blocks[static_cast<size_t>(lane)].cta != cta) ++lane;
  if (lane == static_cast<int>(blocks.size())) return;  // the machine reports a block that does not exist
  for (uint32_t m = actor.lanes; m; m &= m - 1) {
    const ClockRef& seen = scene.warp.share_of(first_of(m)).known.seen;
    if (knows(seen, scene.cluster.begun_row, 1u << lane, 1)) continue;
    if (findings_.counts({Rule::unstarted_peer, actor.cta, actor.warp, actor.instruction}))
      findings_.add(Rule::unstarted_peer, party_of(actor, first_of(m), does), {cta, -1, -1, -1, "may not have begun"},
                    "", str_cat("nothing makes the thread wait until block ", cta, " of its cluster has begun"));
    return;
  }
}

void Watch::check_begun(const Scene& scene, const Actor& actor, std::span<const vgpu::Span> spans,
                        std::string_view does) {
  int32_t last = actor.cta;
  for (const vgpu::Span& span : spans) {
    if (span.memory == Memory::global || span.cta == last) continue;
    last = span.cta;
    check_begun(scene, actor, span.cta, does);
  }
}

void Watch::check_begun(const Scene& scene, const Actor& actor, const LaneAccess& access, uint32_t lanes) {
  if (access.memory != Memory::shared || !access.cta) return;
  for (uint32_t m = lanes; m; m &= m - 1) {
    Actor one = actor;
    one.lanes = m & -m;
    check_begun(scene, one, access.cta[first_of(m)], access.writes ? "writes" : "reads");
  }
}

// The tensor core arrives at any time. At a barrier with one arrival, this arrival is in the phase after the preceding
// commit's.
void Watch::note_commit(const Scene& scene, const Actor& actor, BarrierId id, CheckedMbarrier* barrier) {
  const int lane = first_of(actor.lanes);
  barrier->commit = {scene.warp.tensor_row, static_cast<uint16_t>(lane), scene.warp.tensor_committed[lane]};
  barrier->commit_by = actor;
  const int32_t begun = barrier->completion_entry().time;
  barrier->any_committed = barrier->count == 1 ? std::max(begun, barrier->any_committed + 1) : begun;
  if (id.cta == actor.cta) return;
  barrier->committed = barrier->any_committed;
  barrier->committed_by = actor;
}

// A late arrival comes to a barrier that does not exist any more.
void Watch::check_commit_to_invalidated(const Scene& scene, const Actor& actor, BarrierId id,
                                        const CheckedMbarrier& barrier) {
  const ClockRef& seen = scene.warp.share_of(first_of(actor.lanes)).known.seen;
  const ClockEntry& commit = barrier.commit;
  if (barrier.any_committed == 0 || knows(seen, barrier.row, 1u << barrier.lane, barrier.any_committed)) return;
  if (!knows(seen, commit.row, 1u << commit.lane, commit.time + 1)) return;  // the machine reports the late arrival
  const Actor& by = barrier.commit_by;
  if (!findings_.counts({Rule::unwaited_commit, by.cta, by.warp, by.instruction, actor.instruction})) return;
  findings_.add(Rule::unwaited_commit, party_of(by, first_of(by.lanes), "commits to the barrier"),
                party_of(actor, -1, "invalidates the barrier"),
                str_cat("barrier ", subject_of(Memory::shared, id.address)),
                "the thread invalidates the barrier without a wait for the arrival of the tcgen05.commit; a wait "
                "covers only a later commit of the thread");
}

// The arrival must not reach a block that has ended. Hardware delivers arrivals in the order of the commits, so that a
// wait for a later commit of the same thread suffices there. PTX defines no such order.
void Watch::check_commits_of_peers(const CheckedCluster& cluster, const CheckedBlock& block) {
  for (const auto& [key, barrier] : cluster.mbarriers) {
    if (!barrier.alive || barrier.committed == 0 || static_cast<int32_t>(key >> 32) != block.cta) continue;
    if (knows(block.at_exit.seen, barrier.row, 1u << barrier.lane, barrier.committed)) continue;
    const Actor& by = barrier.committed_by;
    const ClockEntry& commit = barrier.commit;
    const bool knows_later = knows(block.at_exit.seen, commit.row, 1u << commit.lane, commit.time + 1);
    const Rule rule = knows_later ? Rule::unwaited_commit : Rule::live_at_exit;
    if (!findings_.counts({rule, by.cta, by.warp, by.instruction})) continue;
    findings_.add(rule, party_of(by, first_of(by.lanes), "commits to the barrier"),
                  {block.cta, -1, -1, -1, "block ends"},
                  str_cat("barrier ", subject_of(Memory::shared, key & 0xffffffff)),
                  knows_later ? "the block ends without a wait for the arrival of a peer's tcgen05.commit; a wait "
                                "covers only a later commit of the same thread"
                              : "the block ends without a wait of its threads for the arrival of a peer's "
                                "tcgen05.commit");
  }
}

}  // namespace tandem::vgpu::check
