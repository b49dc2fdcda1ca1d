#include "support/gpu.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>

#include "engine/gpu.h"
#include "gpu/driver/driver.h"
#include "gpu/virtual.h"
#include "jit/compiler.h"
#include "problem/operands.h"
#include "reference/reference.h"
#include "vgpu/src/device.h"

namespace tandem::test {
namespace {

// Bytes before and after a workspace that must not change. A virtual GPU reports every store outside an allocation; a
// real GPU needs a band as wide as a wrong offset.
size_t guard_of(const Gpu& gpu) { return gpu.is_virtual() ? 256 : size_t{8} << 20; }

void require(tandem_status status) {
  if (status != TANDEM_OK) throw std::runtime_error(tandem_last_error());
}

// Ends the process after a timeout, because nothing else stops a kernel that waits forever.
class Watchdog {
 public:
  explicit Watchdog(std::string what) : what_(std::move(what)), thread_([this] { watch(); }) {}
  Watchdog(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::minutes(2), [this] { return done_; })) return;
    std::printf("FAILED: the GPU has not finished for two minutes\n  repeat: %s\n", what_.c_str());
    std::fflush(stdout);
    std::_Exit(1);
  }

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

DeviceMemory::DeviceMemory(gpu::Device& device, size_t bytes) : device_(device), bytes_(bytes) {
  require(device.allocate(std::max<size_t>(bytes, 1), &address_));
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_), address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}

DeviceMemory::~DeviceMemory() {
  if (address_ != nullptr) (void)device_.free(address_);  // an earlier, reported error would fail here again
}

Gpu::Gpu(const std::string& name, int schedule, const Placement& placement)
    : name_(name), virtual_(gpu::is_virtual(name)) {
  if (virtual_) {
    open_virtual(schedule, placement);
    return;
  }
  test::require(gpu::cuda::open(name, &device_));
  tandem_context_options options{};
  options.size = sizeof options;
  options.device = name.c_str();
  require(tandem_context_create(&options, &context_));
  test::require(device_->create_stream(&stream_));
}

// One thread for each call, because checks run concurrently.
void Gpu::open_virtual(int schedule, const Placement& placement) {
  const vgpu::Options options{.run = {.schedule = vgpu::Schedule::nth(schedule),
                                      .threads = 1,
                                      .max_instructions = 0,
                                      .placement = placement.seed},
                              .sm_count = placement.sm_count,
                              .check = true,
                              .observe = nullptr,
                              .report = [](const vgpu::Outcome&) {}};  // the failed call's sentence is enough
  std::unique_ptr<gpu::Device> working;
  test::require(vgpu::open(name_, options, &device_));
  test::require(vgpu::open(name_, options, &working));
  const Env& env = Env::get();
  auto engine = std::make_unique<GpuEngine>(name_, std::move(working), env, jit::Cache::options(env));
  context_ = new tandem_context(std::move(engine), {TANDEM_CPU, 0});
}

Gpu::~Gpu() {
  if (stream_ != nullptr) (void)device_->destroy_stream(stream_);
  tandem_context_destroy(context_);
}

void Gpu::set_tuning(const plan::Tuning& tuning) const {
  static_cast<GpuEngine&>(*context_->engine).set_tuning(tuning);
}

DeviceCall::DeviceCall(const Gpu& gpu, Instance& instance, tandem_pass pass, Outputs& outputs, Data data)
    : args(instance.args(pass, &outputs)), gpu_(gpu), pass_(pass), outputs_(outputs.all()) {
  std::vector<Tensor*> all = instance.inputs();
  all.insert(all.end(), outputs_.begin(), outputs_.end());
  tensors_.reserve(kOperandCount + 20);  // args point into this struct
  for (const OperandInfo& operand : kOperands) copy(args.*operand.field, all, data);
  size_t n = 0;
  for (const tandem_mod** mod : {&args.score_mod, &args.mask_mod}) {
    if (*mod == nullptr) continue;
    mods_[n] = **mod;
    captured_[n].assign(mods_[n].tensors, mods_[n].tensors + mods_[n].tensor_count);
    for (tandem_mod_tensor& captured : captured_[n]) {
      copy(captured.tensor, all, data);
      copy(captured.gradient, all, data);
    }
    mods_[n].tensors = captured_[n].data();
    *mod = &mods_[n++];
  }
  for (const uint64_t** number : {&args.dropout_seed_ptr, &args.dropout_offset_ptr}) {
    if (*number == nullptr || data != Data::copied) continue;
    const DeviceMemory& there = numbers_.emplace_back(gpu.device(), sizeof **number);
    test::require(gpu.device().copy_to_device(there.at(0), *number, sizeof **number, gpu.stream()));
    *number = reinterpret_cast<const uint64_t*>(there.at(0));
  }
  if (data == Data::copied) test::require(gpu.device().synchronize(gpu.stream()));
}

void DeviceCall::copy(const tandem_tensor*& tensor, const std::vector<Tensor*>& all, Data data) {
  if (tensor == nullptr) return;
  tandem_tensor& there = tensors_.emplace_back(*tensor);
  there.device = gpu_.where();
  there.data = nullptr;
  if (data == Data::copied) {
    Tensor* host = *std::ranges::find_if(all, [&](Tensor* t) { return t->describe() == tensor; });
    const std::span<const std::byte> bytes = host->storage();
    Copy& copy = copies_.emplace_back(host, DeviceMemory(gpu_.device(), bytes.size()));
    test::require(gpu_.device().copy_to_device(copy.memory.at(0), bytes.data(), bytes.size(), gpu_.stream()));
    there.data = copy.memory.at(0);
  }
  tensor = &there;
}

void DeviceCall::allocate_workspace() {
  require(tandem_workspace_size(gpu_.context(), pass_, &args, &workspace_bytes_));
  workspace_ = std::make_unique<DeviceMemory>(gpu_.device(), workspace_bytes_ + 2 * guard_of(gpu_) + 1);
  test::require(gpu_.device().fill(workspace_->at(0), 0xff, workspace_->bytes(), gpu_.stream()));
  test::require(gpu_.device().synchronize(gpu_.stream()));
}

void* DeviceCall::workspace() const { return workspace_->at(guard_of(gpu_) + 1); }

void DeviceCall::prepare() { require(tandem_prepare(gpu_.context(), pass_, &args)); }

void DeviceCall::forward(gpu::Stream stream) {
  const auto call = pass_ == TANDEM_FORWARD ? tandem_forward : tandem_backward;
  switch (call(gpu_.context(), &args, workspace(), workspace_bytes_, stream)) {
    case TANDEM_OK: return;
    case TANDEM_INVALID_ARGUMENT:
    case TANDEM_UNSUPPORTED: throw Refused(tandem_last_error());
    default: throw std::runtime_error(tandem_last_error());
  }
}

void DeviceCall::poison_outputs() {
  for (const Copy& copy : copies_) {
    if (std::ranges::find(outputs_, copy.host) == outputs_.end()) continue;
    test::require(gpu_.device().fill(copy.memory.at(0), 0xff, copy.memory.bytes(), gpu_.stream()));
  }
  test::require(gpu_.device().synchronize(gpu_.stream()));
}

void DeviceCall::fetch(gpu::Stream stream) {
  gpu::Device& device = gpu_.device();
  test::require(device.synchronize(stream));
  for (Copy& copy : copies_) {
    const std::span<std::byte> bytes = copy.host->storage();
    test::require(device.copy_to_host(bytes.data(), copy.memory.at(0), bytes.size(), stream));
  }
  std::vector<std::byte> workspace(workspace_->bytes());
  test::require(device.copy_to_host(workspace.data(), workspace_->at(0), workspace.size(), stream));
  test::require(device.synchronize(stream));
  const auto intact = [](std::span<const std::byte> guard) {
    return std::ranges::all_of(guard, [](std::byte b) { return b == std::byte{0xff}; });
  };
  const std::span<const std::byte> whole = workspace;
  if (!intact(whole.first(guard_of(gpu_) + 1)) || !intact(whole.last(guard_of(gpu_)))) {
    throw std::logic_error("the engine wrote outside its workspace");
  }
}

Gpus open_gpus(const std::string& name, int schedules) {
  if (!gpu::is_virtual(name)) return {std::make_shared<const Gpu>(name)};
  vgpu::Options options;
  std::unique_ptr<jit::Compiler> compiler;
  test::require(vgpu::options_from_environment(&options));
  test::require(jit::Compiler::open({}, Env::get(), &compiler));
  const int first = std::stoi(options.run.schedule.text());
  Gpus gpus;
  for (int n = 0; n < schedules; ++n) gpus.push_back(std::make_shared<const Gpu>(name, first + n));
  return gpus;
}

namespace {

// The first GPU gets the outputs as the call found them. The other GPUs get poison, unless the call accumulates.
void run_on(const Gpu& gpu, const EngineCall& call, bool first, std::mutex& one_at_a_time) {
  DeviceCall there(gpu, *call.instance, call.pass, *call.outputs);
  there.prepare();
  there.allocate_workspace();
  if (!first && !call.accumulate) there.poison_outputs();
  std::optional<std::lock_guard<std::mutex>> alone;
  std::optional<Watchdog> watchdog;
  if (!gpu.is_virtual()) {
    alone.emplace(one_at_a_time);
    watchdog.emplace("tandem_fuzz --device " + gpu.name() + " --case '" + to_flags(call.instance->c) + "'");
  }
  try {
    there.forward(gpu.stream());
  } catch (const Refused&) {
    there.fetch(gpu.stream());  // so that the check can find writes
    throw;
  }
  there.fetch(gpu.stream());
}

std::vector<std::byte> bytes_of(Outputs& outputs) {
  std::vector<std::byte> bytes;
  for (Tensor* tensor : outputs.all()) bytes.insert(bytes.end(), tensor->storage().begin(), tensor->storage().end());
  return bytes;
}

void give_bytes(std::span<const std::byte> bytes, Outputs& outputs) {
  for (Tensor* tensor : outputs.all()) {
    const std::span<std::byte> to = tensor->storage();
    std::ranges::copy(bytes.first(to.size()), to.begin());
    bytes = bytes.subspan(to.size());
  }
}

}  // namespace

NamedEngine gpu_engine(const Gpus& gpus) {
  const auto one_at_a_time = std::make_shared<std::mutex>();
  return {.run =
              [=](const EngineCall& call) {
                std::vector<std::byte> expected, before;
                if (call.accumulate && gpus.size() > 1) before = bytes_of(*call.outputs);
                for (size_t n = 0; n < gpus.size(); ++n) {
                  if (n > 0 && call.accumulate) give_bytes(before, *call.outputs);
                  run_on(*gpus[n], call, n == 0, *one_at_a_time);
                  if (n == 0 && gpus.size() > 1) expected = bytes_of(*call.outputs);
                  if (n > 0 && bytes_of(*call.outputs) != expected) {
                    throw std::logic_error("the result depends on the schedule: the first one and the one " +
                                           std::to_string(n) + " after it give other bits");
                  }
                }
              },
          .supports = [=](const EngineCall& call) -> std::string {
            const Gpu& gpu = *gpus.front();
            const DeviceCall there(gpu, *call.instance, call.pass, *call.outputs, DeviceCall::Data::none);
            return tandem_check(gpu.context(), call.pass, &there.args) == TANDEM_OK ? "" : tandem_last_error();
          },
          .flags = "--device " + gpus.front()->name() + " " +
                   (gpus.size() > 1 ? "--schedules " + std::to_string(gpus.size()) + " " : "")};
}

NamedEngine engine_named(const std::string& device, int schedules) {
  if (device == "cpu") return cpu_engine(2);
  if (device == "oracle") {
    return {.run =
                [](const Problem& p) {
                  if (p.pass == TANDEM_FORWARD) {
                    reference::forward(p);
                  } else {
                    reference::backward(p);
                  }
                },
            .supports = nullptr};
  }
  if (gpu::cuda::is_cuda(device) || gpu::is_virtual(device)) return gpu_engine(open_gpus(device, schedules));
  throw std::invalid_argument("unknown device: " + device);
}

}  // namespace tandem::test
