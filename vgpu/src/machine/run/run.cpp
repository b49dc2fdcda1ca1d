// run(): executes a whole grid on the host's threads.
#include <algorithm>
#include <chrono>
#include <list>
#include <thread>

#include "base/text.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/warpgroup.h"
#include "vgpu/src/units/tensor_memory.h"

namespace tandem::vgpu {
namespace machine {
namespace {

constexpr int64_t kTurn = 400'000;  // ops of a cluster before another cluster's turn
// Turn lengths under random placement: short, for clusters that begin together.
constexpr uint32_t kShortTurn = 40'000, kBeside = 8;
// Ops without an event after which a cluster is probably waiting for another one, and its turns from then on.
constexpr int64_t kWaiting = 10'000, kWaitingTurn = 2'000;

int64_t product(const gpu::Dim3& d) { return int64_t{d.x} * d.y * d.z; }

std::string text(const gpu::Dim3& d) {
  return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
}

// An error of the launching code, as a driver reports it, instead of an invalid argument of a user's call.
Status refuse(const std::string& why) { return {TANDEM_DEVICE_ERROR, "vgpu: " + why}; }

Status check_cluster(const LaunchDescription& launch, const Model& model, const ptx::Function& f, gpu::Dim3 cluster) {
  const int64_t blocks = product(cluster);
  const uint32_t required[3] = {static_cast<uint32_t>(f.required_cluster[0]),
                                static_cast<uint32_t>(f.required_cluster[1]),
                                static_cast<uint32_t>(f.required_cluster[2])};
  if (required[0] != 0 &&
      (cluster.x != required[0] || cluster.y != std::max(required[1], 1u) || cluster.z != std::max(required[2], 1u)))
    return refuse("the kernel requires clusters of " +
                  text({required[0], std::max(required[1], 1u), std::max(required[2], 1u)}) + " blocks, not " +
                  text(cluster) + ": launch such clusters");
  if (blocks < 1 || blocks > model.max_cluster)
    return refuse("a cluster of " + text(cluster) + " blocks is beyond the " + std::to_string(model.max_cluster) +
                  " that " + model.name + " has: launch a smaller cluster");
  if (launch.grid.x % cluster.x != 0 || launch.grid.y % cluster.y != 0 || launch.grid.z % cluster.z != 0)
    return refuse("the grid of " + text(launch.grid) + " blocks must be a multiple of the cluster, " + text(cluster) +
                  ": correct the grid");
  return {};
}

Status check_launch(const LaunchDescription& launch, const Model& model, const Code& code) {
  const ptx::Function& f = *code.function;
  const int64_t threads = product(launch.block);
  if (product(launch.grid) < 1 || threads < 1)
    return refuse("a grid of " + text(launch.grid) + " blocks of " + text(launch.block) +
                  " threads must not be empty: launch at least one block of one thread");
  if (product(launch.grid) > INT32_MAX)
    return refuse("a grid of " + text(launch.grid) + " blocks must have fewer than 2^31 blocks: launch fewer");
  if (threads > model.max_threads_per_block)
    return refuse(std::to_string(threads) + " threads in a block are beyond the " +
                  std::to_string(model.max_threads_per_block) + " that " + model.name + " has: launch fewer threads");
  int64_t most = 1, required = 1;
  for (int i = 0; i < 3; ++i) {
    most *= std::max(f.max_threads[i], 1);
    required *= std::max(f.required_threads[i], 1);
  }
  if (f.max_threads[0] != 0 && threads > most)
    return refuse("the kernel is compiled for at most " + std::to_string(most) +
                  " threads in a block (.maxntid): launch fewer than " + std::to_string(threads));
  if (f.required_threads[0] != 0 && threads != required)
    return refuse("the kernel is compiled for " + std::to_string(required) + " threads in a block (.reqntid), not " +
                  std::to_string(threads) + ": correct the block");
  const int64_t shared = int64_t{code.dynamic_shared_at} - kReservedShared + launch.dynamic_shared_bytes;
  if (shared > model.shared_bytes_per_block)
    return refuse(std::to_string(shared) + " bytes of shared memory in a block are beyond the " +
                  std::to_string(model.shared_bytes_per_block) + " that " + model.name + " has: request less");
  if (static_cast<int64_t>(launch.parameters.size()) != code.parameter_bytes)
    return refuse("the kernel has " + std::to_string(code.parameter_bytes) + " bytes of parameters, not " +
                  std::to_string(launch.parameters.size()) + ": correct the arguments");
  return {};
}

// Registers of a thread at launch: the maximum of ptxas, which it uses if setmaxnreg moves registers.
int32_t launch_registers(const ptx::Function& f, const Model& model, int64_t threads) {
  if (f.max_registers != 0) return f.max_registers;
  const int64_t rounded = (threads + 127) / 128 * 128 * std::max(f.min_ctas, 1);
  return static_cast<int32_t>(std::min<int64_t>(255, model.registers_per_sm / rounded / 8 * 8));
}

// Passes a run that takes long to the options' function. All workers share it.
class Watch {
 public:
  explicit Watch(const RunOptions& options) : wanted_(options.on_long_run), next_(options.long_run_seconds) {}

  // cluster: one that has not ended.
  void look(const Cluster& cluster) {
    if (!wanted_) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    if (seconds < next_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(mutex_);
    if (seconds < next_.load()) return;
    next_.store(2 * next_.load());
    const Warp* warp = nullptr;
    const Fragment* const fragment = busiest_fragment(cluster, &warp);
    if (fragment == nullptr) return;
    const Code& code = *cluster.grid->code;
    wanted_({code.function->name, code.place(code.ops[static_cast<size_t>(fragment->pc)].source), seconds,
             cluster.grid->executed.load(), warp->block->cta, warp->index});
  }

 private:
  using Clock = std::chrono::steady_clock;
  const std::function<void(const LongRun&)>& wanted_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<double> next_;
  std::mutex mutex_;
};

// A host thread whose resident clusters take turns. Clusters beyond the placement's number become resident only if the
// present ones wait for others.
class Worker {
 public:
  Worker(Grid* grid, Watch& watch, int32_t most, int32_t index)
      : grid_(grid),
        watch_(watch),
        most_(most),
        random_(grid->options.placement, static_cast<uint64_t>(index)),
        wanted_(grid->options.placement == 0 ? 1 : std::min(most, 1 + static_cast<int32_t>(random_.below(kBeside)))) {}

  void run() {
    for (;;) {
      if (grid_->stopped.load()) return;
      if (wants_more_ && static_cast<int32_t>(resident_.size()) < most_) start();
      while (static_cast<int32_t>(resident_.size()) < wanted_ && start()) {
      }
      wants_more_ = false;
      if (resident_.empty()) return;
      bool all_idle = true;
      for (auto at = resident_.begin(); at != resident_.end();) {
        const Turn turn = take_turn(**at, turn_length(**at));
        if (turn == Turn::active || turn == Turn::idle) watch_.look(**at);
        if (turn == Turn::stopped) return;
        all_idle = all_idle && (turn == Turn::idle || is_waiting(**at));
        if (turn != Turn::done) {
          ++at;
          continue;
        }
        spare_.splice(spare_.end(), resident_, at++);
      }
      if (!all_idle) continue;
      wants_more_ = true;
      if (static_cast<int32_t>(resident_.size()) >= most_ || !more_left()) std::this_thread::yield();
    }
  }

 private:
  bool more_left() const { return grid_->begun.load() < grid_->cluster_count; }
  static bool is_waiting(const Cluster& cluster) { return cluster.idle + cluster.starving > kWaiting; }
  int64_t turn_length(const Cluster& cluster) {
    const int64_t length = grid_->options.placement == 0 ? kTurn : 1 + random_.below(kShortTurn);
    return is_waiting(cluster) ? std::min(length, kWaitingTurn) : length;
  }

  // Returns false if no cluster remains.
  bool start() {
    const int32_t index = grid_->take_cluster();
    if (index < 0) return false;
    if (spare_.empty()) spare_.push_back(std::make_unique<Cluster>());
    resident_.splice(resident_.end(), spare_, spare_.begin());
    begin_cluster(*resident_.back(), *grid_, index);
    return true;
  }

  Grid* grid_;
  Watch& watch_;
  int32_t most_;
  Random random_;
  int32_t wanted_;  // clusters that run concurrently without a need
  bool wants_more_ = false;
  std::list<std::unique_ptr<Cluster>> resident_, spare_;
};

// Returns a random order; all orders have the same probability.
std::vector<int32_t> order_of(int32_t clusters, uint64_t placement) {
  std::vector<int32_t> order;
  if (placement == 0) return order;
  Random random(placement, UINT64_MAX);
  for (int32_t n = 0; n < clusters; ++n) {
    const auto at = random.below(static_cast<uint32_t>(n) + 1);
    order.push_back(n);
    std::swap(order.back(), order[at]);
  }
  return order;
}

}  // namespace

int32_t Grid::take_cluster() {
  const int32_t n = begun.fetch_add(1);
  if (n < cluster_count) return order.empty() ? n : order[static_cast<size_t>(n)];
  begun.store(cluster_count);
  return -1;
}

}  // namespace machine

std::string LongRun::text() const {
  return str_cat("kernel \"", kernel, "\" has run for ", static_cast<int64_t>(seconds), " s: ", instructions,
                 " warp instructions; block ", block, ", warp ", warp, " is at ", place);
}

Status run(const LaunchDescription& launch, const Model& model, const RunOptions& options, Observer* observer) {
  using namespace machine;
  const Code& code = code_of(*launch.program);
  const ptx::Function& f = *code.function;
  gpu::Dim3 cluster = launch.cluster;
  if (product(cluster) == 1 && f.required_cluster[0] != 0) {
    cluster = {static_cast<uint32_t>(f.required_cluster[0]), static_cast<uint32_t>(std::max(f.required_cluster[1], 1)),
               static_cast<uint32_t>(std::max(f.required_cluster[2], 1))};
  }
  TANDEM_TRY(check_launch(launch, model, code));
  TANDEM_TRY(check_cluster(launch, model, f, cluster));

  Grid grid;
  grid.code = &code;
  grid.model = &model;
  grid.options = options;
  grid.observer = observer;
  grid.traced = observer != nullptr && observer->wants_instructions();
  grid.grid = launch.grid;
  grid.block = launch.block;
  grid.cluster = cluster;
  grid.dynamic_shared = launch.dynamic_shared_bytes;
  grid.cooperative = launch.cooperative;
  if (code.workspace) std::fill_n(code.workspace.get(), Code::kWorkspaceBytes, std::byte{0});
  grid.window_bytes = code.dynamic_shared_at + launch.dynamic_shared_bytes;
  grid.parameters.assign(launch.parameters.begin(), launch.parameters.end());
  grid.threads = static_cast<int32_t>(product(launch.block));
  grid.warps = (grid.threads + kLanes - 1) / kLanes;
  grid.launch_registers = launch_registers(f, model, grid.threads);
  grid.cluster_blocks = static_cast<int32_t>(product(cluster));
  grid.cluster_count = static_cast<int32_t>(product(launch.grid) / grid.cluster_blocks);

  grid.order = order_of(grid.cluster_count, options.placement);

  const int32_t cores =
      options.threads > 0 ? options.threads : static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  const int32_t count = std::min(cores, grid.cluster_count);
  const int32_t most = std::max(1, model.sm_count / grid.cluster_blocks / count);
  std::vector<std::thread> threads;
  Watch watch(grid.options);
  for (int32_t n = 1; n < count; ++n)
    threads.emplace_back([&grid, &watch, most, n] { Worker(&grid, watch, most, n).run(); });
  Worker(&grid, watch, most, 0).run();
  for (std::thread& thread : threads) thread.join();
  return grid.status;
}

}  // namespace tandem::vgpu
