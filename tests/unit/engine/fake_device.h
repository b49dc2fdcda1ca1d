// A GPU that records its calls, with the properties of a Hopper. Device memory is host memory.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "config/forward.h"
#include "gpu/device.h"
#include "unit/plan/problems.h"

namespace tandem::test {

struct FakeGpu {
  struct Launched {
    std::string kernel;
    gpu::Launch launch;
    ForwardParams params;
    std::vector<gpu::NamedBuffer> buffers;
  };

  std::atomic<bool> capturing{false}, wants_buffers{false};
  std::atomic<int> loads{0}, allocations{0}, synchronisations{0}, captures_asked{0};
  std::mutex mutex;  // guards the members below
  std::vector<Launched> launched;
  std::vector<gpu::TensorMapSpec> maps;
  std::vector<size_t> fills;
};

class FakeDevice final : public gpu::Device {
 public:
  explicit FakeDevice(FakeGpu* record) : record_(*record), properties_(hopper()) {}

  const gpu::Properties& properties() const override { return properties_; }
  Status allocate(size_t bytes, void** address) override {
    ++record_.allocations;
    return *address = std::malloc(bytes), Status{};
  }
  Status free(void* address) override { return std::free(address), Status{}; }
  Status allocate_pinned(size_t bytes, void** address) override { return allocate(bytes, address); }
  Status free_pinned(void* address) override { return free(address); }
  Status copy_to_device(void* to, const void* from, size_t bytes, gpu::Stream) override {
    return copy(to, from, bytes);
  }
  Status copy_to_host(void* to, const void* from, size_t bytes, gpu::Stream) override { return copy(to, from, bytes); }
  Status copy_on_device(void* to, const void* from, size_t bytes, gpu::Stream) override {
    return copy(to, from, bytes);
  }
  Status fill(void* to, unsigned char value, size_t bytes, gpu::Stream) override {
    const std::lock_guard lock(record_.mutex);
    record_.fills.push_back(bytes);
    std::memset(to, value, bytes);
    return {};
  }
  Status create_stream(gpu::Stream*) override { return {}; }
  Status destroy_stream(gpu::Stream) override { return {}; }
  Status synchronize(gpu::Stream) override { return ++record_.synchronisations, Status{}; }
  Status is_capturing(gpu::Stream, bool* capturing) override {
    ++record_.captures_asked;
    return *capturing = record_.capturing, Status{};
  }
  Status create_event(gpu::Event*) override { return {}; }
  Status destroy_event(gpu::Event) override { return {}; }
  Status record(gpu::Event, gpu::Stream) override { return {}; }
  Status wait(gpu::Stream, gpu::Event) override { return {}; }
  Status synchronize_event(gpu::Event) override { return {}; }
  Status elapsed_ms(gpu::Event, gpu::Event, float*) override { return {}; }

  // A kernel handle is the address of its name.
  class FakeModule final : public gpu::Module {
   public:
    Status find(const char* name, int32_t, gpu::Kernel* kernel) override {
      names_.push_back(std::make_unique<std::string>(name));
      *kernel = reinterpret_cast<gpu::Kernel>(names_.back().get());
      return {};
    }
    Status attributes(gpu::Kernel, gpu::KernelAttributes*) override { return {}; }

   private:
    std::vector<std::unique_ptr<std::string>> names_;
  };
  Status load(std::span<const std::byte>, std::unique_ptr<gpu::Module>* module) override {
    ++record_.loads;
    *module = std::make_unique<FakeModule>();
    return {};
  }
  bool wants_buffers() const override { return record_.wants_buffers; }
  Status encode(const gpu::TensorMapSpec& spec, gpu::TensorMap* map) override {
    const std::lock_guard lock(record_.mutex);
    std::memset(map, static_cast<int>(record_.maps.size() + 1), sizeof *map);
    record_.maps.push_back(spec);
    return {};
  }
  Status launch(const gpu::Launch& launch) override {
    const std::lock_guard lock(record_.mutex);
    const std::string& kernel = *reinterpret_cast<std::string*>(launch.kernel);
    const bool is_append = kernel == "append_kv";  // has a shorter parameter
    record_.launched.push_back({kernel,
                                launch,
                                is_append ? ForwardParams{} : *static_cast<const ForwardParams*>(launch.args[0]),
                                {launch.buffers.begin(), launch.buffers.end()}});
    return {};
  }

 private:
  static Status copy(void* to, const void* from, size_t bytes) { return std::memcpy(to, from, bytes), Status{}; }

  FakeGpu& record_;
  const gpu::Properties properties_;
};

}  // namespace tandem::test
