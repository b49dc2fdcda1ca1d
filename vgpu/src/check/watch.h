// The parts of the checker that share one state. blocks.cpp, accesses.cpp, operations.cpp and barriers.cpp define the
// meaning of each event.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "vgpu/src/check/access.h"
#include "vgpu/src/check/checker.h"
#include "vgpu/src/check/cluster.h"
#include "vgpu/src/check/findings.h"
#include "vgpu/src/check/memory.h"
#include "vgpu/src/check/syncs.h"

namespace tandem::vgpu::check {

// The first address of a span in shadow memory.
uint64_t shadow_address(const Span& span);

// The pattern of a warp's addresses in the block's shared memory or in global memory.
enum class Pattern : uint8_t {
  any,
  same,  // all lanes have the same address
  row,   // 32 lanes, each adjacent to the preceding one
};

class Watch : public Checker {
 public:
  Watch(const LaunchDescription& launch, const Model& model, std::span<const Buffer> buffers, CheckerOptions options);
  ~Watch() override;

  std::vector<Finding> findings() const override;
  void finds(Finding finding) override;

  void block_begins(int32_t cta, int32_t cluster, int32_t threads, uint32_t shared_bytes) override;
  void block_ends(int32_t cta) override;
  void exits(const Actor& actor) override;

  uint32_t access(const Actor& actor, const LaneAccess& access) override;

  bool async_issues(const Actor& actor, AsyncKind kind, AsyncId id, std::span<const Span> reads,
                    std::span<const Span> writes) override;
  void async_signals(AsyncId id, BarrierId barrier, uint32_t bytes) override;
  void group_commits(const Actor& actor, AsyncKind kind) override;
  void group_waits(const Actor& actor, AsyncKind kind, uint32_t pending, bool read_only) override;

  void named_arrives(const Actor& actor, uint32_t barrier) override;
  void named_completes(int32_t cta, uint32_t barrier) override;
  void named_passes(const Actor& actor, uint32_t barrier) override;
  void cluster_arrives(const Actor& actor, Order order) override;
  void cluster_passes(const Actor& actor) override;
  void warp_syncs(const Actor& actor) override;
  void mbarrier_inits(const Actor& actor, BarrierId barrier, uint32_t count) override;
  void mbarrier_invalidates(const Actor& actor, BarrierId barrier) override;
  void mbarrier_arrives(const Actor& actor, BarrierId barrier, uint32_t count, uint32_t expect_bytes, Order order,
                        Scope scope) override;
  void mbarrier_completes(BarrierId barrier, uint64_t phase) override;
  void mbarrier_passes(const Actor& actor, BarrierId barrier, uint64_t phase, Order order, Scope scope) override;

  void tcgen05_commits(const Actor& actor, std::span<const BarrierId> barriers) override;
  void tcgen05_waits(const Actor& actor, bool loads, bool stores) override;
  void tcgen05_fence(const Actor& actor, bool before) override;
  void tmem_allocates(const Actor& actor, uint32_t column, uint32_t columns, int32_t peer) override;
  void tmem_frees(const Actor& actor, uint32_t column, uint32_t columns) override;

  void fence(const Actor& actor, Order order, Scope scope) override;
  void proxy_fence(const Actor& actor, FencedSpaces spaces) override;
  void wgmma_fence(const Actor& actor) override;

 private:
  // The objects that an event concerns.
  struct Scene {
    CheckedCluster& cluster;
    CheckedBlock& block;
    CheckedWarp& warp;
  };
  // Every event of a warp begins here. First, the warp's earlier reads of global memory take effect.
  Scene enter(const Actor& actor);
  // Null: the block has ended. Operations may complete afterwards.
  CheckedCluster* running_cluster(int32_t cta) {
    return clusters_[static_cast<size_t>(cta)].load(std::memory_order_acquire);
  }
  CheckedCluster& cluster_of(int32_t cta) { return *running_cluster(cta); }

  // blocks.cpp
  void check_left_under_way(CheckedCluster& cluster, CheckedBlock& block);
  void check_groups_at_exit(const Scene& scene, const Actor& actor);

  // peers.cpp
  void begin_block(CheckedCluster& cluster, const CheckedBlock& block);
  void learn_begun(const Scene& scene, const Actor& actor);
  void check_begun(const Scene& scene, const Actor& actor, int32_t cta, std::string_view does);
  void check_begun(const Scene& scene, const Actor& actor, std::span<const Span> spans, std::string_view does);
  void check_begun(const Scene& scene, const Actor& actor, const LaneAccess& access, uint32_t lanes);
  static void note_commit(const Scene& scene, const Actor& actor, BarrierId id, CheckedMbarrier* barrier);
  void check_commit_to_invalidated(const Scene& scene, const Actor& actor, BarrierId id,
                                   const CheckedMbarrier& barrier);
  void check_commits_of_peers(const CheckedCluster& cluster, const CheckedBlock& block);

  // limits.cpp
  void check_limits(const Model& model);

  // accesses.cpp
  bool all_within(const Scene& scene, const Actor& actor, const LaneAccess& access, Pattern pattern) const;
  uint32_t find_out_of_bounds(const Scene& scene, const Actor& actor, const LaneAccess& access, Pattern pattern);
  void touch_lanes(const Scene& scene, const Actor& actor, const LaneAccess& access, uint32_t lanes, Pattern pattern);
  void access_local(const Scene& scene, const Actor& actor, const LaneAccess& access);
  void atomics(const Scene& scene, const Actor& actor, const LaneAccess& access, uint32_t lanes);
  uint32_t thread_site(const Scene& scene, const Actor& actor, uint32_t lanes, bool global, bool is_constant = false);
  uint32_t add_site(CheckedCluster& cluster, const Site& like, bool global);

  // reports.cpp
  Accessor party_of(const Actor& actor, int lane, std::string_view does) const;
  Accessor party_of(const Site& site, Epoch epoch) const;
  std::string subject_of(Memory memory, uint64_t address) const;
  void report(const Accessor& party, const Access& access, Memory memory, const Sites& sites);
  void report_uninitialised(const Accessor& party, Memory memory, uint64_t address);
  void report_bounds(const Actor& actor, int lane, std::string_view does, const Span& span, bool writes);

  // operations.cpp
  uint32_t number_of_copy(const Scene& scene, const Actor& actor, std::span<const Span> reads,
                          std::span<const Span> writes);
  bool in_bounds(const Scene& scene, const Actor& actor, AsyncKind kind, const Span& span, bool writes);
  void touch_spans(const Scene& scene, CheckedOperation* operation, std::span<const Span> spans, bool writes);
  void touch_alike(const Scene& scene, CheckedOperation* operation, std::span<const Span> spans, bool writes,
                   uint32_t by);
  bool all_have_issued(const Scene& scene, const Actor& actor, AsyncId id, std::span<const Span> reads);
  void add_issuers(const Scene& scene, const CheckedOperation& operation, int32_t warp, uint32_t by, Access* access);
  uint32_t site_of(const Scene& scene, CheckedOperation* operation, const Span& span, bool writes, uint32_t by);
  CheckedGroups& groups_of(const Scene& scene, AsyncKind kind);
  ClockEntry completion_entry(const Scene& scene, const CheckedOperation& operation, bool writes, uint32_t by);
  std::pair<uint16_t, uint16_t> warpgroup_entry(const Scene& scene, int32_t warp);
  void count_operation(const Scene& scene, const Actor& actor, AsyncKind kind);
  void collect_sites(CheckedCluster& cluster);
  uint16_t new_row(CheckedCluster& cluster) { return cluster.rows++; }

  // tensor.cpp
  static bool in_tensor_memory(const Span& span);
  void touch_columns(CheckedBlock& block, const Span& span, Access& access);
  ClockEntry tensor_completion_entry(const Scene& scene, const Actor& actor, AsyncKind kind);
  void check_tensor_fences(const Scene& scene, const Actor& actor, const Accessor& party, const Site& past);
  void check_columns_at_end(const CheckedBlock& block);

  // barriers.cpp
  CheckedMbarrier* find(CheckedCluster& cluster, BarrierId barrier);
  void use_barrier(const Scene& scene, const Actor& actor, BarrierId id, bool writes, std::string_view does);
  void check_barrier_visible(CheckedCluster& cluster, const CheckedOperation& operation, BarrierId id,
                             const CheckedMbarrier& barrier);
  void order_lanes(const Scene& scene, const Actor& actor);
  void passes(const Scene& scene, const Actor& actor, const VectorClock& published, Order order);
  const ptx::Instruction& source_of(int32_t instruction) const { return launch_.program->source(instruction); }

  const LaunchDescription launch_;
  GlobalMemory global_;
  GlobalSyncs syncs_;
  Findings findings_;
  const bool alone_;                                          // one cluster is the whole grid
  std::unique_ptr<std::atomic<CheckedCluster*>[]> clusters_;  // by block
  std::mutex mutex_;                                          // guards the members below
  std::map<int32_t, std::unique_ptr<CheckedCluster>> running_;
};

}  // namespace tandem::vgpu::check
