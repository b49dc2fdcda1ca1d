#include "gpu/driver/driver.h"

#include <atomic>
#include <charconv>

#include "base/text.h"
#include "gpu/driver/api.h"
#include "gpu/driver/map_cache.h"

namespace tandem::gpu::cuda {
namespace {

// The retained primary context that the device and its modules share.
struct Owner {
  Api api;
  CUdevice device = 0;
  CUcontext context = nullptr;

  Owner() = default;
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    // At process exit the driver may end first. The driver then reports an error, and no context is left to release.
    if (context != nullptr) (void)api.cuDevicePrimaryCtxRelease(device);
  }
};

// Makes the context current during its lifetime. If the context is current already, the cost is one read of a
// thread-local variable.
class Current {
 public:
  explicit Current(const Owner& owner) : api_(owner.api) {
    CUcontext current = nullptr;
    if (api_.cuCtxGetCurrent(&current) == kSuccess && current == owner.context) [[likely]]
      return;
    result = api_.cuCtxPushCurrent(owner.context);
    pushed_ = result == kSuccess;
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    CUcontext popped = nullptr;
    if (pushed_) (void)api_.cuCtxPopCurrent(&popped);
  }

  CUresult result = kSuccess;

 private:
  const Api& api_;
  bool pushed_ = false;
};

// Calls call(api) under the device's context. `what` names the operation in messages.
template <class Call>
Status in_context(const Owner& owner, const char* what, Call&& call) {
  const Current current(owner);
  if (current.result != kSuccess) return owner.api.check(current.result, "making the GPU's context current");
  return owner.api.check(call(owner.api), what);
}

CUdeviceptr address_of(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }
CUstream handle_of(Stream stream) { return static_cast<CUstream>(stream); }
CUevent handle_of(Event event) { return reinterpret_cast<CUevent>(event); }
CUfunction handle_of(Kernel kernel) { return reinterpret_cast<CUfunction>(kernel); }

std::string text_of(const Dim3& dim) { return str_cat(dim.x, "x", dim.y, "x", dim.z); }

class CudaModule final : public Module {
 public:
  CudaModule(std::shared_ptr<const Owner> owner, CUmodule module) : owner_(std::move(owner)), module_(module) {}
  ~CudaModule() override {
    (void)in_context(*owner_, "unloading kernels", [&](const Api& api) { return api.cuModuleUnload(module_); });
  }

  Status find(const char* name, int32_t dynamic_smem_bytes, Kernel* kernel) override {
    CUfunction function = nullptr;
    Status status = in_context(*owner_, "looking up or preparing a kernel", [&](const Api& api) {
      const CUresult result = api.cuModuleGetFunction(&function, module_, name);
      if (result != kSuccess) return result;
      return api.cuFuncSetAttribute(function, kMaxDynamicSharedSizeBytes, dynamic_smem_bytes);
    });
    if (!status.ok()) {
      status.message += str_cat(": kernel \"", name, "\", ", dynamic_smem_bytes, " bytes of dynamic shared memory");
      return status;
    }
    *kernel = reinterpret_cast<Kernel>(function);
    return {};
  }

  Status attributes(Kernel kernel, KernelAttributes* attributes) override {
    return in_context(*owner_, "reading a kernel's attributes", [&](const Api& api) {
      const auto read = [&](FunctionAttribute attribute, int32_t* value) {
        return api.cuFuncGetAttribute(value, attribute, handle_of(kernel));
      };
      CUresult result = read(kNumRegs, &attributes->registers);
      if (result == kSuccess) result = read(kLocalSizeBytes, &attributes->local_bytes);
      if (result == kSuccess) result = read(kSharedSizeBytes, &attributes->static_smem_bytes);
      if (result == kSuccess) result = read(kMaxThreadsPerBlock, &attributes->max_threads);
      return result;
    });
  }

 private:
  const std::shared_ptr<const Owner> owner_;
  const CUmodule module_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<const Owner> owner, Properties properties)
      : owner_(std::move(owner)), properties_(std::move(properties)) {}

  const Properties& properties() const override { return properties_; }

  Status allocate(size_t bytes, void** address) override {
    CUdeviceptr pointer = 0;
    Status status = in_context(*owner_, "allocating device memory",
                               [&](const Api& api) { return api.cuMemAlloc(&pointer, bytes); });
    if (!status.ok()) status.message += str_cat(": ", bytes, " bytes");
    *address = reinterpret_cast<void*>(pointer);
    return status;
  }
  Status free(void* address) override {
    return in_context(*owner_, "freeing device memory",
                      [&](const Api& api) { return api.cuMemFree(address_of(address)); });
  }
  Status allocate_pinned(size_t bytes, void** address) override {
    *address = nullptr;
    Status status = in_context(*owner_, "allocating pinned host memory",
                               [&](const Api& api) { return api.cuMemAllocHost(address, bytes); });
    if (!status.ok()) status.message += str_cat(": ", bytes, " bytes");
    return status;
  }
  Status free_pinned(void* address) override {
    return in_context(*owner_, "freeing pinned host memory",
                      [&](const Api& api) { return api.cuMemFreeHost(address); });
  }
  Status copy_to_device(void* to, const void* from, size_t bytes, Stream stream) override {
    return in_context(*owner_, "copying to the device", [&](const Api& api) {
      return api.cuMemcpyHtoDAsync(address_of(to), from, bytes, handle_of(stream));
    });
  }
  Status copy_to_host(void* to, const void* from, size_t bytes, Stream stream) override {
    return in_context(*owner_, "copying to the host", [&](const Api& api) {
      return api.cuMemcpyDtoHAsync(to, address_of(from), bytes, handle_of(stream));
    });
  }
  Status copy_on_device(void* to, const void* from, size_t bytes, Stream stream) override {
    return in_context(*owner_, "copying on the device", [&](const Api& api) {
      return api.cuMemcpyDtoDAsync(address_of(to), address_of(from), bytes, handle_of(stream));
    });
  }
  Status fill(void* to, unsigned char value, size_t bytes, Stream stream) override {
    return in_context(*owner_, "filling device memory", [&](const Api& api) {
      return api.cuMemsetD8Async(address_of(to), value, bytes, handle_of(stream));
    });
  }

  Status create_stream(Stream* stream) override {
    constexpr unsigned non_blocking = 1;
    CUstream handle = nullptr;
    TANDEM_TRY(in_context(*owner_, "creating a stream",
                          [&](const Api& api) { return api.cuStreamCreate(&handle, non_blocking); }));
    *stream = handle;
    return {};
  }
  Status destroy_stream(Stream stream) override {
    return in_context(*owner_, "destroying a stream",
                      [&](const Api& api) { return api.cuStreamDestroy(handle_of(stream)); });
  }
  Status synchronize(Stream stream) override {
    return in_context(*owner_, "waiting for a stream",
                      [&](const Api& api) { return api.cuStreamSynchronize(handle_of(stream)); });
  }
  Status is_capturing(Stream stream, bool* capturing) override {
    int state = 0;  // 0: no; 1: yes; 2: yes, but the capture has failed
    TANDEM_TRY(in_context(*owner_, "reading the capture state of a stream",
                          [&](const Api& api) { return api.cuStreamIsCapturing(handle_of(stream), &state); }));
    *capturing = state != 0;
    return {};
  }

  Status create_event(Event* event) override {
    CUevent handle = nullptr;
    TANDEM_TRY(in_context(*owner_, "creating an event", [&](const Api& api) { return api.cuEventCreate(&handle, 0); }));
    *event = reinterpret_cast<Event>(handle);
    return {};
  }
  Status destroy_event(Event event) override {
    return in_context(*owner_, "destroying an event",
                      [&](const Api& api) { return api.cuEventDestroy(handle_of(event)); });
  }
  Status record(Event event, Stream stream) override {
    return in_context(*owner_, "recording an event",
                      [&](const Api& api) { return api.cuEventRecord(handle_of(event), handle_of(stream)); });
  }
  Status wait(Stream stream, Event event) override {
    return in_context(*owner_, "letting a stream wait for an event",
                      [&](const Api& api) { return api.cuStreamWaitEvent(handle_of(stream), handle_of(event), 0); });
  }
  Status synchronize_event(Event event) override {
    return in_context(*owner_, "waiting for an event",
                      [&](const Api& api) { return api.cuEventSynchronize(handle_of(event)); });
  }
  Status elapsed_ms(Event start, Event stop, float* milliseconds) override {
    return in_context(*owner_, "reading the time between two events", [&](const Api& api) {
      return api.cuEventElapsedTime(milliseconds, handle_of(start), handle_of(stop));
    });
  }

  Status load(std::span<const std::byte> image, std::unique_ptr<Module>* module) override;
  Status encode(const TensorMapSpec& spec, TensorMap* map) override;
  Status launch(const Launch& launch) override;

 private:
  static uint64_t next_number() {
    static std::atomic<uint64_t> last = 0;
    return ++last;
  }

  const std::shared_ptr<const Owner> owner_;
  const Properties properties_;
  const uint64_t number_ = next_number();  // index among the devices opened in this process
};

Status CudaDevice::load(std::span<const std::byte> image, std::unique_ptr<Module>* module) {
  CUmodule handle = nullptr;
  CUresult result = kSuccess;
  Status status = in_context(*owner_, "loading kernels",
                             [&](const Api& api) { return result = api.cuModuleLoadData(&handle, image.data()); });
  if (result == kInvalidImage || result == kNoBinaryForGpu || result == kUnsupportedPtx) {
    const int32_t version = properties_.driver_version;
    status.message += str_cat(": the driver, for CUDA ", version / 1000, ".", version % 1000 / 10,
                              ", may be older than the compiler; update it or install an NVRTC of its version");
  }
  if (status.ok()) *module = std::make_unique<CudaModule>(owner_, handle);
  return status;
}

std::string text_of(const TensorMapSpec& spec) {
  std::string text = str_cat("type ", static_cast<int>(spec.type), ", rank ", spec.rank, ", swizzle ",
                             static_cast<int>(spec.swizzle), ", address modulo 16 ", address_of(spec.address) % 16);
  for (int32_t i = 0; i < spec.rank && i < kMaxTensorRank; ++i) {
    text += str_cat("; dimension ", i, ": size ", spec.dims[i], ", box ", spec.box[i]);
    if (i > 0) text += str_cat(", byte stride ", spec.byte_strides[i]);
  }
  return text;
}

Status CudaDevice::encode(const TensorMapSpec& spec, TensorMap* map) {
  constexpr int no_interleave = 0;
  thread_local MapCache cache;
  MapCache::MapEntry& cached = cache.place(number_, spec);
  if (cached.holds(number_, spec)) {
    *map = cached.map;
    return {};
  }
  Status status = in_context(*owner_, "encoding a tensor map", [&](const Api& api) {
    return api.cuTensorMapEncodeTiled(map, static_cast<int>(spec.type), static_cast<uint32_t>(spec.rank), spec.address,
                                      spec.dims, spec.byte_strides + 1, spec.box, spec.element_strides, no_interleave,
                                      static_cast<int>(spec.swizzle), static_cast<int>(spec.l2_promotion),
                                      static_cast<int>(spec.oob_fill));
  });
  if (!status.ok()) [[unlikely]] {
    status.message += str_cat(": ", text_of(spec));
  } else {
    cached = {number_, spec, *map};
  }
  return status;
}

Status CudaDevice::launch(const Launch& launch) {
  LaunchAttribute attributes[2];
  unsigned count = 0;
  const Dim3 &grid = launch.grid, &block = launch.block, &cluster = launch.cluster;
  if (cluster.x * cluster.y * cluster.z > 1) {
    attributes[count].id = kClusterDimension;
    attributes[count++].value.cluster = {cluster.x, cluster.y, cluster.z};
  }
  if (launch.overlap_previous) {
    attributes[count].id = kProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  const LaunchConfig config{
      grid.x,     grid.y, grid.z, block.x, block.y, block.z, launch.dynamic_smem_bytes, handle_of(launch.stream),
      attributes, count};
  Status status = in_context(*owner_, "launching a kernel", [&](const Api& api) {
    return api.cuLaunchKernelEx(&config, handle_of(launch.kernel), launch.args, nullptr);
  });
  if (!status.ok()) [[unlikely]] {
    status.message += str_cat(": grid ", text_of(grid), ", block ", text_of(block), ", cluster ", text_of(cluster),
                              ", ", launch.dynamic_smem_bytes, " bytes of dynamic shared memory");
  }
  return status;
}

Status read_properties(const Owner& owner, Properties* properties) {
  const Api& api = owner.api;
  char name[256] = "";
  size_t memory_bytes = 0;
  int32_t l2_bytes = 0;
  CUresult result = api.cuDeviceGetName(name, sizeof name, owner.device);
  if (result == kSuccess) result = api.cuDeviceTotalMem(&memory_bytes, owner.device);
  if (result == kSuccess) result = api.cuDriverGetVersion(&properties->driver_version);
  const auto read = [&](DeviceAttribute attribute, int32_t* value) {
    if (result == kSuccess) result = api.cuDeviceGetAttribute(value, attribute, owner.device);
  };
  read(kComputeMajor, &properties->compute_major);
  read(kComputeMinor, &properties->compute_minor);
  read(kMultiprocessorCount, &properties->sm_count);
  read(kClockRate, &properties->clock_khz);
  read(kMemoryClockRate, &properties->memory_clock_khz);
  read(kMemoryBusWidth, &properties->memory_bus_bits);
  read(kMaxSharedMemoryPerBlockOptin, &properties->max_dynamic_smem_bytes);
  read(kL2CacheSize, &l2_bytes);
  properties->name = name;
  properties->memory_bytes = static_cast<int64_t>(memory_bytes);
  properties->l2_bytes = l2_bytes;
  return api.check(result, "reading the GPU's properties");
}

Status parse_ordinal(std::string_view name, int* ordinal) {
  *ordinal = 0;
  if (name == "cuda") return {};
  const std::string_view digits = name.substr(name.find(':') + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), *ordinal);
  if (error == std::errc() && end == digits.data() + digits.size() && *ordinal >= 0) return {};
  return Status::invalid(
      str_cat("device \"", name, "\" must be \"cuda\" or \"cuda:N\": write N as a number from 0 on"));
}

}  // namespace

bool is_cuda(std::string_view name) { return name == "cuda" || name.starts_with("cuda:"); }

Status open(std::string_view name, std::unique_ptr<Device>* device, const std::string& library) {
  int ordinal = 0, count = 0;
  TANDEM_TRY(parse_ordinal(name, &ordinal));
  auto owner = std::make_shared<Owner>();
  const Api& api = owner->api;
  TANDEM_TRY(load(library, &owner->api));
  TANDEM_TRY(api.check(api.cuDeviceGetCount(&count), "counting GPUs"));
  if (ordinal >= count) {
    return Status::unsupported(str_cat("device \"", name, "\" must be below \"cuda:", count, "\": the driver sees ",
                                       count, count == 1 ? " GPU" : " GPUs", "; choose one of them"));
  }
  TANDEM_TRY(api.check(api.cuDeviceGet(&owner->device, ordinal), "finding the GPU"));
  Properties properties;
  properties.opened_as = str_cat("cuda:", ordinal);
  TANDEM_TRY(read_properties(*owner, &properties));
  TANDEM_TRY(api.check(api.cuDevicePrimaryCtxRetain(&owner->context, owner->device), "retaining the GPU's context"));
  *device = std::make_unique<CudaDevice>(std::move(owner), std::move(properties));
  return {};
}

}  // namespace tandem::gpu::cuda
