#include "support/cuda.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "gpu/driver/driver.h"
#include "problem/operands.h"

namespace tandem::test {
namespace {

constexpr size_t kGuard = 256;

void require(tandem_status status) {
  if (status != TANDEM_OK) throw std::runtime_error(tandem_last_error());
}

int32_t ordinal_of(const std::string& name) {
  const size_t colon = name.find(':');
  return colon == std::string::npos ? 0 : std::stoi(name.substr(colon + 1));
}

// Ends the process when it lives too long: nothing stops a kernel that waits for ever.
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
  if (address_ != nullptr) (void)device_.free(address_);  // it fails where an earlier error, reported already, stays
}

Gpu::Gpu(const std::string& name) : name_(name) {
  test::require(gpu::cuda::open(name, &device_));
  where_.index = ordinal_of(name);
  tandem_context_options options{};
  options.size = sizeof options;
  options.device = name.c_str();
  require(tandem_context_create(&options, &context_));
  test::require(device_->create_stream(&stream_));
}

Gpu::~Gpu() {
  if (stream_ != nullptr) (void)device_->destroy_stream(stream_);
  tandem_context_destroy(context_);
}

DeviceCall::DeviceCall(const Gpu& gpu, Instance& instance, tandem_pass pass, Outputs& outputs, Data data)
    : args(instance.args(pass, &outputs)), gpu_(gpu), pass_(pass), outputs_(outputs.all()) {
  std::vector<Tensor*> all = instance.inputs();
  all.insert(all.end(), outputs_.begin(), outputs_.end());
  tensors_.reserve(kOperandCount);  // args point into it
  for (const OperandInfo& operand : kOperands) {
    const tandem_tensor*& tensor = args.*operand.field;
    if (tensor == nullptr) continue;
    tandem_tensor& there = tensors_.emplace_back(*tensor);
    there.device = gpu.where();
    there.data = nullptr;
    if (data == Data::copied) {
      Tensor* host = *std::ranges::find_if(all, [&](Tensor* t) { return t->describe() == tensor; });
      const std::span<const std::byte> bytes = host->storage();
      Copy& copy = copies_.emplace_back(host, DeviceMemory(gpu.device(), bytes.size()));
      test::require(gpu.device().copy_to_device(copy.memory.at(0), bytes.data(), bytes.size(), gpu.stream()));
      there.data = copy.memory.at(0);
    }
    tensor = &there;
  }
  if (data == Data::copied) test::require(gpu.device().synchronize(gpu.stream()));
}

void DeviceCall::allocate_workspace() {
  require(tandem_workspace_size(gpu_.context(), pass_, &args, &workspace_bytes_));
  workspace_ = std::make_unique<DeviceMemory>(gpu_.device(), workspace_bytes_ + 2 * kGuard + 1);
  test::require(gpu_.device().fill(workspace_->at(0), 0xff, workspace_->bytes(), gpu_.stream()));
  test::require(gpu_.device().synchronize(gpu_.stream()));
}

void* DeviceCall::workspace() const { return workspace_->at(kGuard + 1); }

void DeviceCall::prepare() { require(tandem_prepare(gpu_.context(), pass_, &args)); }

void DeviceCall::forward(gpu::Stream stream) {
  switch (tandem_forward(gpu_.context(), &args, workspace(), workspace_bytes_, stream)) {
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
  if (!intact(whole.first(kGuard + 1)) || !intact(whole.last(kGuard))) {
    throw std::logic_error("the engine wrote outside its workspace");
  }
}

NamedEngine cuda_engine(const std::shared_ptr<const Gpu>& gpu) {
  const auto one_at_a_time = std::make_shared<std::mutex>();
  return {.run =
              [=](const Call& call) {
                DeviceCall there(*gpu, *call.instance, call.pass, *call.outputs);
                there.prepare();
                there.allocate_workspace();
                const std::lock_guard lock(*one_at_a_time);
                const Watchdog watchdog("tandem_fuzz --device " + gpu->name() + " --case '" +
                                        to_flags(call.instance->c) + "'");
                try {
                  there.forward(gpu->stream());
                } catch (const Refused&) {
                  there.fetch(gpu->stream());  // for the judge to see that nothing was written
                  throw;
                }
                there.fetch(gpu->stream());
              },
          .supports = [=](const Call& call) -> std::string {
            const DeviceCall there(*gpu, *call.instance, call.pass, *call.outputs, DeviceCall::Data::none);
            return tandem_check(gpu->context(), call.pass, &there.args) == TANDEM_OK ? "" : tandem_last_error();
          }};
}

}  // namespace tandem::test
