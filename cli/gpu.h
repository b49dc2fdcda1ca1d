// The GPUs of this machine, and one opened GPU, which may be virtual: its stream, its memory and its clock.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "problem/problem.h"
#include "tandem/tandem.hpp"

namespace tandem::tool {

inline constexpr const char* kDriver = "libcuda.so.1";

struct GpuSeen {
  std::string name;
  int32_t major = 0, minor = 0, sm_count = 0;
  int64_t memory_bytes = 0;

  bool served() const { return major == 9 && minor == 0; }  // kernels exist for it
};

struct GpusSeen {
  std::vector<GpuSeen> gpus;
  int32_t driver_version = 0;  // 13000 is CUDA 13.0
  std::string why_none;        // a sentence, if no GPU was found
};
// Lists the GPUs without creating a context.
GpusSeen gpus_seen(const std::string& library = kDriver);

struct DeviceChoice {
  std::string name;   // "cpu", "cuda:0"
  std::string why;    // a sentence, if a present GPU is not used
  bool asked = true;  // the user named the device
};
// "" chooses the first supported GPU that has a compiler, else the CPU.
DeviceChoice choose_device(const std::string& asked);

void throw_if_failed(const Status& status);  // throws tandem::Error

class Gpu {
 public:
  explicit Gpu(const std::string& name, const std::string& library = kDriver);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  class Memory {
   public:
    Memory() = default;
    Memory(Gpu& gpu, size_t bytes);
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept;
    ~Memory();

    std::byte* data() const { return static_cast<std::byte*>(data_); }
    size_t bytes() const { return bytes_; }

   private:
    Gpu* gpu_ = nullptr;
    void* data_ = nullptr;
    size_t bytes_ = 0;
  };

  // Copies are queued on the stream. The host may read results after synchronize().
  void upload(const Memory& to, const void* from, size_t bytes);
  void download(void* to, const Memory& from, size_t bytes);
  void fill(const Memory& memory, unsigned char value);
  void synchronize();

  gpu::Stream stream() const { return stream_; }
  tandem_device place() const { return place_; }  // the device in tensors
  const gpu::Properties& properties() const { return device_->properties(); }

  // The median time of one run, which enqueues work on the stream, by the GPU's clock. Runs follow each other without a
  // pause, in five rounds that last about `seconds` together, after a warm-up of a fifth of that time.
  double median_seconds(const std::function<void()>& run, double seconds);

 private:
  double time_of(const std::function<void()>& run, int64_t count);  // total time of all runs

  std::unique_ptr<gpu::Device> device_;
  tandem_device place_{TANDEM_CUDA, 0};
  gpu::Stream stream_ = nullptr;
  gpu::Event start_ = nullptr, stop_ = nullptr;
};

}  // namespace tandem::tool
