// Calls of the C interface on a GPU, with tensors that lie in its memory as they lie on the host: whole buffers, with
// their guards and poison.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/device.h"
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

// A GPU, a context of ours on it, and a stream.
class Gpu {
 public:
  // name: "cuda" or "cuda:N". Throws std::runtime_error with the sentence when there is none.
  explicit Gpu(const std::string& name);
  Gpu(const Gpu&) = delete;
  ~Gpu();

  gpu::Device& device() const { return *device_; }
  tandem_context* context() const { return context_; }
  gpu::Stream stream() const { return stream_; }
  const std::string& name() const { return name_; }
  tandem_device where() const { return where_; }

 private:
  const std::string name_;
  std::unique_ptr<gpu::Device> device_;
  tandem_context* context_ = nullptr;
  gpu::Stream stream_ = nullptr;
  tandem_device where_{TANDEM_CUDA, 0};
};

// The arguments of a call with tensors of the GPU. Copies of the host's when they are to be used; without, a check's.
class DeviceCall {
 public:
  enum class Data { none, copied };
  DeviceCall(const Gpu& gpu, Instance& instance, tandem_pass pass, Outputs& outputs, Data data = Data::copied);
  DeviceCall(const DeviceCall&) = delete;

  tandem_attention_args args;

  // Each throws std::runtime_error with the sentence of a call that fails.
  void allocate_workspace();  // exactly the bytes asked for, poisoned, between guards, at an odd address
  void prepare();
  void forward(gpu::Stream stream);  // launches; the workspace must be there
  void poison_outputs();             // as they were before the call
  // Waits, then copies all tensors to the host's. Throws std::logic_error when the workspace's guards have changed.
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
  std::vector<tandem_tensor> tensors_;
  std::vector<Copy> copies_;
  std::vector<Tensor*> outputs_;
  std::unique_ptr<DeviceMemory> workspace_;
  size_t workspace_bytes_ = 0;
};

// The GPU as an engine for the judge, which may ask from several threads: kernels are then compiled at once and run one
// after the other. One that does not end within two minutes ends the process with the flags of its case.
NamedEngine cuda_engine(const std::shared_ptr<const Gpu>& gpu);

}  // namespace tandem::test
