// The begin and end of clusters, blocks and warps.
#include <algorithm>
#include <cstring>

#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/warpgroup.h"
#include "vgpu/src/units/tensor_memory.h"

namespace tandem::vgpu::machine {
namespace {

constexpr std::byte kNobodysData{0xff};  // shared memory before the first write: NaN in every format

uint64_t workspace_of(const Grid& grid) { return reinterpret_cast<uintptr_t>(grid.code->workspace.get()); }

uint64_t value_of(const Initial& initial, const Block& block, const Warp& warp, uint32_t lane) {
  const Grid& g = *block.cluster->grid;
  const uint32_t thread = static_cast<uint32_t>(warp.index) * kLanes + lane;
  const uint32_t c[3] = {g.cluster.x, g.cluster.y, g.cluster.z}, n[3] = {g.grid.x, g.grid.y, g.grid.z};
  switch (initial.special) {
    case Special::constant: return initial.value;
    case Special::shared_address: return initial.value | static_cast<uint64_t>(block.rank) << kRankShift;
    case Special::tid_x: return thread % g.block.x;
    case Special::tid_y: return thread / g.block.x % g.block.y;
    case Special::tid_z: return thread / (g.block.x * g.block.y);
    case Special::ntid_x: return g.block.x;
    case Special::ntid_y: return g.block.y;
    case Special::ntid_z: return g.block.z;
    case Special::ctaid_x: return block.ctaid[0];
    case Special::ctaid_y: return block.ctaid[1];
    case Special::ctaid_z: return block.ctaid[2];
    case Special::nctaid_x: return n[0];
    case Special::nctaid_y: return n[1];
    case Special::nctaid_z: return n[2];
    case Special::laneid: return lane;
    case Special::warpid: return static_cast<uint64_t>(warp.index);
    case Special::nwarpid: return static_cast<uint64_t>(g.warps);
    case Special::smid: return static_cast<uint64_t>(block.cta % g.model->sm_count);
    case Special::nsmid: return static_cast<uint64_t>(g.model->sm_count);
    case Special::gridid: return 1;
    case Special::clusterid_x: return block.ctaid[0] / c[0];
    case Special::clusterid_y: return block.ctaid[1] / c[1];
    case Special::clusterid_z: return block.ctaid[2] / c[2];
    case Special::nclusterid_x: return n[0] / c[0];
    case Special::nclusterid_y: return n[1] / c[1];
    case Special::nclusterid_z: return n[2] / c[2];
    case Special::cluster_ctaid_x: return block.ctaid[0] % c[0];
    case Special::cluster_ctaid_y: return block.ctaid[1] % c[1];
    case Special::cluster_ctaid_z: return block.ctaid[2] % c[2];
    case Special::cluster_nctaid_x: return c[0];
    case Special::cluster_nctaid_y: return c[1];
    case Special::cluster_nctaid_z: return c[2];
    case Special::cluster_ctarank: return static_cast<uint64_t>(block.rank);
    case Special::cluster_nctarank: return static_cast<uint64_t>(g.cluster_blocks);
    case Special::is_explicit_cluster: return g.cluster_blocks > 1 || g.code->function->explicit_cluster;
    case Special::lanemask_eq: return 1u << lane;
    case Special::lanemask_le: return (2u << lane) - 1;
    case Special::lanemask_lt: return (1u << lane) - 1;
    case Special::lanemask_ge: return kAllLanes << lane;
    case Special::lanemask_gt: return static_cast<uint32_t>(uint64_t{kAllLanes} << (lane + 1));
    case Special::dynamic_smem_size: return g.dynamic_shared;
    case Special::total_smem_size: return g.window_bytes - kReservedShared;
    case Special::workspace_low: return g.cooperative ? static_cast<uint32_t>(workspace_of(g)) : 0;
    case Special::workspace_high: return g.cooperative ? workspace_of(g) >> 32 : 0;
  }
  return 0;
}

bool is_uniform(Special special) {  // the same in all lanes of a warp
  switch (special) {
    case Special::tid_x:
    case Special::tid_y:
    case Special::tid_z:
    case Special::laneid:
    case Special::lanemask_eq:
    case Special::lanemask_le:
    case Special::lanemask_lt:
    case Special::lanemask_ge:
    case Special::lanemask_gt: return false;
    default: return true;
  }
}

void fill_registers(const Block& block, const Warp& warp) {
  for (const Initial& initial : block.cluster->grid->code->initials) {
    std::byte* const to = warp.registers + initial.at;
    if (is_uniform(initial.special) && initial.width == 4) {
      std::fill_n(reinterpret_cast<uint32_t*>(to), kLanes, static_cast<uint32_t>(value_of(initial, block, warp, 0)));
      continue;
    }
    if (is_uniform(initial.special) && initial.width == 8) {
      std::fill_n(reinterpret_cast<uint64_t*>(to), kLanes, value_of(initial, block, warp, 0));
      continue;
    }
    if (initial.width == 0) {
      uint32_t bits = 0;
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        bits |= value_of(initial, block, warp, lane) != 0 ? 1u << lane : 0u;
      std::memcpy(to, &bits, 4);
      continue;
    }
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t value = value_of(initial, block, warp, lane);
      std::memcpy(to + initial.width * lane, &value, std::min<size_t>(initial.width, 8));
    }
  }
}

void begin_warp(Block& block, Warp& warp, int32_t index, std::byte* registers) {
  const Grid& grid = *block.cluster->grid;
  warp = Warp();
  warp.block = &block;
  warp.index = index;
  const int32_t threads = std::min(grid.threads - index * kLanes, kLanes);
  warp.alive = warp.launched = threads == kLanes ? kAllLanes : (1u << threads) - 1;
  warp.registers = registers;
  warp.thread_registers = grid.launch_registers;
  warp.local.assign(static_cast<size_t>(grid.code->local_bytes) * kLanes, kNobodysData);
  new_fragment(warp, warp.alive, 0, -1);
  const auto rows = static_cast<size_t>(grid.code->register_bytes) / (4 * kLanes) + 1;
  if (grid.code->uses_wgmma) {
    warp.mma_writes.assign(rows, 0);
    warp.mma_reads.assign(rows, 0);
    warp.touched.assign(rows, 0);
  }
  if (grid.code->uses_tcgen05) warp.tmem_loads.assign(rows, 0);
  warp.written.assign(grid.code->may_be_unwritten.size(), 0);
  fill_registers(block, warp);
}

void begin_block(Block& block) {
  const Grid& grid = *block.cluster->grid;
  block.shared.assign(grid.window_bytes, kNobodysData);
  block.named = {};
  block.mbarriers.clear();
  block.threads_alive = grid.threads;
  block.warpgroups.clear();
  for (int32_t i = 0; i < (grid.warps + 3) / 4; ++i) block.warpgroups.push_back(std::make_unique<Warpgroup>());
  block.register_pool = 0;
  block.tmem_used = {};
  block.tmem_relinquished = false;
  block.cta_group = 0;
  block.pair_steps = 0;
  block.tmem_given.clear();
  block.tensor_ops.clear();
  if (grid.code->uses_tcgen05) {
    if (!block.tensor_memory) block.tensor_memory = std::make_unique<units::TensorMemory>();
    std::memset(block.tensor_memory.get(), 0xff, sizeof(units::TensorMemory));
  }
  const auto bytes = static_cast<size_t>(grid.code->register_bytes + 63) / 64 * 64;
  block.register_memory.assign(bytes * static_cast<size_t>(grid.warps) + 64, std::byte{0});
  auto at = reinterpret_cast<uintptr_t>(block.register_memory.data());
  auto* registers = reinterpret_cast<std::byte*>((at + 63) / 64 * 64);
  block.warps.resize(static_cast<size_t>(grid.warps));
  for (int32_t w = 0; w < grid.warps; ++w, registers += bytes)
    begin_warp(block, block.warps[static_cast<size_t>(w)], w, registers);
}

// Reports setmaxnreg that only some warps of a warpgroup have executed.
void report_uneven_registers(Block& block) {
  for (size_t group = 0; group < block.warpgroups.size(); ++group) {
    const auto first = static_cast<int32_t>(4 * group);
    const uint32_t all = (1u << std::min<size_t>(4, block.warps.size() - 4 * group)) - 1;
    for (const Reallocation& r : block.warpgroups[group]->reallocations) {
      if (r.warps == all) continue;
      const Actor actor{block.cta, first + first_lane(r.warps), 0, r.source};
      report(*block.cluster->grid, actor, Rule::uneven_registers, "",
             "only " + std::to_string(__builtin_popcount(r.warps)) + " of the " +
                 std::to_string(__builtin_popcount(all)) + " warps of the warpgroup executed the setmaxnreg");
    }
  }
}

void place_block(Block& block, const Grid& g, int32_t cluster, int32_t rank) {
  const uint32_t across = g.grid.x / g.cluster.x, down = g.grid.y / g.cluster.y;
  const auto index = static_cast<uint32_t>(cluster), r = static_cast<uint32_t>(rank);
  block.rank = rank;
  block.ctaid[0] = index % across * g.cluster.x + r % g.cluster.x;
  block.ctaid[1] = index / across % down * g.cluster.y + r / g.cluster.x % g.cluster.y;
  block.ctaid[2] = index / (across * down) * g.cluster.z + r / (g.cluster.x * g.cluster.y);
  block.cta = static_cast<int32_t>((block.ctaid[2] * g.grid.y + block.ctaid[1]) * g.grid.x + block.ctaid[0]);
}

}  // namespace

void begin_cluster(Cluster& cluster, Grid& grid, int32_t index) {
  cluster.grid = &grid;
  cluster.index = index;
  cluster.async.clear();
  cluster.async.begin(&grid, &cluster);
  cluster.random = Random(grid.options.schedule.seed, static_cast<uint64_t>(index));
  cluster.next_warp = 0;
  cluster.barrier_generation = 0;
  cluster.barrier_arrived = 0;
  cluster.executed = cluster.quiet = cluster.seen_progress = 0;
  cluster.idle = cluster.starving = cluster.hopeless = 0;
  cluster.blocks.resize(static_cast<size_t>(grid.cluster_blocks));
  cluster.threads_alive = grid.cluster_blocks * grid.threads;
  cluster.warps.clear();
  for (int32_t rank = 0; rank < grid.cluster_blocks; ++rank) {
    Block& block = cluster.blocks[static_cast<size_t>(rank)];
    block.cluster = &cluster;
    place_block(block, grid, index, rank);
    begin_block(block);
    for (Warp& warp : block.warps) cluster.warps.push_back(&warp);
    if (grid.observer != nullptr) grid.observer->block_begins(block.cta, index, grid.threads, grid.window_bytes);
  }
}

void end_block(Block& block) {
  Grid& grid = *block.cluster->grid;
  const Actor actor{block.cta, -1, 0, -1};
  if (const AsyncRef op = block.cluster->async.find(1u << block.rank); op) {
    report(
        grid, op->issuer, Rule::live_at_exit, "",
        "block " + std::to_string(block.cta) + " has ended, but this operation still uses the block's shared memory");
  }
  uint32_t columns = 0;
  for (const bool used : block.tmem_used) columns += used ? 32 : 0;
  if (columns != 0) {
    report(grid, actor, Rule::tmem_leak, "",
           "block " + std::to_string(block.cta) + " ended with " + std::to_string(columns) +
               " columns of tensor memory allocated");
  }
  report_uneven_registers(block);
  if (grid.observer != nullptr) grid.observer->block_ends(block.cta);
}

}  // namespace tandem::vgpu::machine
