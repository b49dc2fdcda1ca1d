// libtandem_vgpu.so exports one function, which opens a device. No exception leaves that device or its modules, because
// the calling library may use another C++ runtime.
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "base/text.h"
#include "gpu/virtual_library.h"
#include "vgpu/src/device.h"

namespace tandem::vgpu {
namespace {

// Runs body(), which returns a Status.
template <class Body>
Status guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return {TANDEM_INTERNAL_ERROR, "the host is out of memory: free memory, or split the call over heads"};
  } catch (const std::exception& error) {
    return {TANDEM_INTERNAL_ERROR, error.what()};
  } catch (...) {
    return {TANDEM_INTERNAL_ERROR, "the library threw an unknown exception: report the call as a defect"};
  }
}

class GuardedModule final : public gpu::Module {
 public:
  explicit GuardedModule(std::unique_ptr<gpu::Module> module) : module_(std::move(module)) {}

  Status find(const char* name, int32_t dynamic_smem_bytes, gpu::Kernel* kernel) override {
    return guarded([&] { return module_->find(name, dynamic_smem_bytes, kernel); });
  }
  Status attributes(gpu::Kernel kernel, gpu::KernelAttributes* attributes) override {
    return guarded([&] { return module_->attributes(kernel, attributes); });
  }

 private:
  const std::unique_ptr<gpu::Module> module_;
};

class GuardedDevice final : public gpu::Device {
 public:
  explicit GuardedDevice(std::unique_ptr<gpu::Device> device) : device_(std::move(device)) {}

  const gpu::Properties& properties() const override { return device_->properties(); }
  bool wants_buffers() const override { return device_->wants_buffers(); }

  Status allocate(size_t bytes, void** address) override {
    return guarded([&] { return device_->allocate(bytes, address); });
  }
  Status free(void* address) override {
    return guarded([&] { return device_->free(address); });
  }
  Status allocate_pinned(size_t bytes, void** address) override {
    return guarded([&] { return device_->allocate_pinned(bytes, address); });
  }
  Status free_pinned(void* address) override {
    return guarded([&] { return device_->free_pinned(address); });
  }
  Status copy_to_device(void* to, const void* from, size_t bytes, gpu::Stream stream) override {
    return guarded([&] { return device_->copy_to_device(to, from, bytes, stream); });
  }
  Status copy_to_host(void* to, const void* from, size_t bytes, gpu::Stream stream) override {
    return guarded([&] { return device_->copy_to_host(to, from, bytes, stream); });
  }
  Status copy_on_device(void* to, const void* from, size_t bytes, gpu::Stream stream) override {
    return guarded([&] { return device_->copy_on_device(to, from, bytes, stream); });
  }
  Status fill(void* to, unsigned char value, size_t bytes, gpu::Stream stream) override {
    return guarded([&] { return device_->fill(to, value, bytes, stream); });
  }

  Status create_stream(gpu::Stream* stream) override {
    return guarded([&] { return device_->create_stream(stream); });
  }
  Status destroy_stream(gpu::Stream stream) override {
    return guarded([&] { return device_->destroy_stream(stream); });
  }
  Status synchronize(gpu::Stream stream) override {
    return guarded([&] { return device_->synchronize(stream); });
  }
  Status is_capturing(gpu::Stream stream, bool* capturing) override {
    return guarded([&] { return device_->is_capturing(stream, capturing); });
  }
  Status create_event(gpu::Event* event) override {
    return guarded([&] { return device_->create_event(event); });
  }
  Status destroy_event(gpu::Event event) override {
    return guarded([&] { return device_->destroy_event(event); });
  }
  Status record(gpu::Event event, gpu::Stream stream) override {
    return guarded([&] { return device_->record(event, stream); });
  }
  Status wait(gpu::Stream stream, gpu::Event event) override {
    return guarded([&] { return device_->wait(stream, event); });
  }
  Status synchronize_event(gpu::Event event) override {
    return guarded([&] { return device_->synchronize_event(event); });
  }
  Status elapsed_ms(gpu::Event start, gpu::Event stop, float* milliseconds) override {
    return guarded([&] { return device_->elapsed_ms(start, stop, milliseconds); });
  }

  Status load(std::span<const std::byte> image, std::unique_ptr<gpu::Module>* module) override {
    return guarded([&]() -> Status {
      std::unique_ptr<gpu::Module> loaded;
      TANDEM_TRY(device_->load(image, &loaded));
      *module = std::make_unique<GuardedModule>(std::move(loaded));
      return {};
    });
  }
  Status encode(const gpu::TensorMapSpec& spec, gpu::TensorMap* map) override {
    return guarded([&] { return device_->encode(spec, map); });
  }
  Status launch(const gpu::Launch& launch) override {
    return guarded([&] { return device_->launch(launch); });
  }

 private:
  const std::unique_ptr<gpu::Device> device_;
};

Status open_guarded(const char* tag, const char* name, gpu::Device** device) {
  if (std::strcmp(tag, gpu::kVirtualLibraryTag) != 0) {
    return Status::unsupported(str_cat("this library of the virtual GPU belongs to Tandem ", gpu::kVirtualLibraryTag,
                                       ", and Tandem ", tag, " has opened it: install both from one build"));
  }
  if (name == nullptr) return {};
  std::unique_ptr<gpu::Device> opened;
  TANDEM_TRY(open(name, &opened));
  *device = new GuardedDevice(std::move(opened));
  return {};
}

}  // namespace
}  // namespace tandem::vgpu

extern "C" [[gnu::visibility("default")]] tandem::gpu::VirtualLibraryEntry tandem_vgpu_open;

int tandem_vgpu_open(const char* tag, const char* name, tandem::gpu::Device** device, char* sentence,
                     size_t sentence_bytes) {
  const tandem::Status status = tandem::vgpu::guarded([&] { return tandem::vgpu::open_guarded(tag, name, device); });
  std::snprintf(sentence, sentence_bytes, "%s", status.message.c_str());
  return status.code;
}
