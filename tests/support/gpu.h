// Calls of the C interface on a real or virtual GPU. Whole buffers are copied to its memory, with their guards and
// poison.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/context.h"
#include "gpu/device.h"
#include "plan/tuning.h"
#include "support/engines.h"
#include "support/instance.h"

namespace tandem::test {

// Throws std::runtime_error with the sentence.
void require(const Status& status);

// Memory of a GPU.
class DeviceMemory {
 public:
  DeviceMemory(gpu::Device& device, size_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory();

  std::byte* at(size_t offset) const { return static_cast<std::byte*>(address_) + offset; }
  size_t bytes() const { return bytes_; }

 private:
  gpu::Device& device_;
  void* address_ = nullptr;
  size_t bytes_;
};

// A GPU, a context on it, and a stream.
class Gpu {
 public:
  // A virtual GPU's placement of blocks (vgpu::RunOptions), and its number of multiprocessors; 0: the model's.
  struct Placement {
    uint64_t seed = 0;
    int sm_count = 0;
  };

  // name: "cuda", "cuda:N" or "vgpu:MODEL". schedule: a virtual GPU's order of execution, with its checker on. Throws
  // std::runtime_error with the sentence if the GPU is missing.
  explicit Gpu(const std::string& name, int schedule = 0) : Gpu(name, schedule, {}) {}
  Gpu(const std::string& name, int schedule, const Placement& placement);
  Gpu(const Gpu&) = delete;
  ~Gpu();

  gpu::Device& device() const { return *device_; }
  tandem_context* context() const { return context_; }
  gpu::Stream stream() const { return stream_; }
  const std::string& name() const { return name_; }
  tandem_device where() const { return context_->device; }
  bool is_virtual() const { return virtual_; }

  // Later calls plan with these constants.
  void set_tuning(const plan::Tuning& tuning) const;

 private:
  void open_virtual(int schedule, const Placement& placement);

  const std::string name_;
  const bool virtual_;
  std::unique_ptr<gpu::Device> device_;
  tandem_context* context_ = nullptr;
  gpu::Stream stream_ = nullptr;
};
using Gpus = std::vector<std::shared_ptr<const Gpu>>;

// Returns the GPU of that name, or several virtual GPUs with the schedules from TANDEM_VGPU_SCHEDULE on. Throws
// std::runtime_error if the GPU, or a virtual GPU's compiler, is missing.
Gpus open_gpus(const std::string& name, int schedules = 1);

// The arguments of a call with tensors of the GPU, with or without copies of the host's data.
class DeviceCall {
 public:
  enum class Data { none, copied };
  DeviceCall(const Gpu& gpu, Instance& instance, tandem_pass pass, Outputs& outputs, Data data = Data::copied);
  DeviceCall(const DeviceCall&) = delete;

  tandem_attention_args args;

  // Each function throws std::runtime_error with the sentence of a failed call.
  void allocate_workspace();  // exact size, poisoned, guarded, at an odd address
  void prepare();
  void forward(gpu::Stream stream);  // launches the pass in the allocated workspace
  void poison_outputs();             // restores the state before the call
  // Waits, then copies all tensors to the host. Throws std::logic_error if the workspace's guards have changed.
  void fetch(gpu::Stream stream);

  void* workspace() const;
  size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  struct Copy {
    Tensor* host;
    DeviceMemory memory;
  };

  const Gpu& gpu_;
  const tandem_pass pass_;
  void copy(const tandem_tensor*& tensor, const std::vector<Tensor*>& all, Data data);

  std::vector<tandem_tensor> tensors_;
  tandem_mod mods_[2];
  std::vector<tandem_mod_tensor> captured_[2];
  std::vector<Copy> copies_;
  std::vector<DeviceMemory> numbers_;  // dropout's
  std::vector<Tensor*> outputs_;
  std::unique_ptr<DeviceMemory> workspace_;
  size_t workspace_bytes_ = 0;
};

// GPUs as an engine for several threads: all of them get each call and must return the same bits. Real GPUs compile
// concurrently and run one kernel at a time; after two minutes the process ends with the flags of its case.
NamedEngine gpu_engine(const Gpus& gpus);

// "cpu", `oracle` (the reference in the problem's dtypes), "cuda", "cuda:N" or "vgpu:MODEL". A virtual GPU
// runs every call under `schedules` schedules. Throws std::invalid_argument, or std::runtime_error for a missing GPU.
NamedEngine engine_named(const std::string& device, int schedules = 1);

}  // namespace tandem::test
