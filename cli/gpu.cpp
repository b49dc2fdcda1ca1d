#include "cli/gpu.h"

#include <algorithm>
#include <cstdlib>

#include "base/text.h"
#include "gpu/driver/api.h"
#include "gpu/driver/driver.h"
#include "gpu/virtual.h"
#include "jit/compiler.h"
#include "vgpu/src/device.h"

namespace tandem::tool {
namespace {

Status read(const gpu::cuda::Api& api, int ordinal, GpuSeen* seen) {
  using namespace gpu::cuda;
  CUdevice device = 0;
  char name[256] = "";
  size_t bytes = 0;
  CUresult result = api.cuDeviceGet(&device, ordinal);
  if (result == kSuccess) result = api.cuDeviceGetName(name, sizeof name, device);
  if (result == kSuccess) result = api.cuDeviceTotalMem(&bytes, device);
  if (result == kSuccess) result = api.cuDeviceGetAttribute(&seen->major, kComputeMajor, device);
  if (result == kSuccess) result = api.cuDeviceGetAttribute(&seen->minor, kComputeMinor, device);
  if (result == kSuccess) result = api.cuDeviceGetAttribute(&seen->sm_count, kMultiprocessorCount, device);
  seen->name = name;
  seen->memory_bytes = static_cast<int64_t>(bytes);
  return api.check(result, "reading a GPU's properties");
}

Status look(const std::string& library, GpusSeen* seen) {
  gpu::cuda::Api api;
  int count = 0;
  TANDEM_TRY(gpu::cuda::load(library, &api));
  TANDEM_TRY(api.check(api.cuDriverGetVersion(&seen->driver_version), "reading the driver's version"));
  TANDEM_TRY(api.check(api.cuDeviceGetCount(&count), "counting GPUs"));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    GpuSeen one;
    TANDEM_TRY(read(api, ordinal, &one));
    seen->gpus.push_back(std::move(one));
  }
  return {};
}

}  // namespace

GpusSeen gpus_seen(const std::string& library) {
  GpusSeen seen;
  if (const Status status = look(library, &seen); !status.ok()) {
    seen.gpus.clear();
    seen.why_none = status.message;
  }
  return seen;
}

DeviceChoice choose_device(const std::string& asked) {
  if (!asked.empty()) return {.name = asked, .why = "", .asked = true};
  DeviceChoice choice{.name = "cpu", .why = "", .asked = false};
  const GpusSeen seen = gpus_seen();
  const auto served = std::ranges::find_if(seen.gpus, &GpuSeen::served);
  if (served == seen.gpus.end()) {
    if (!seen.gpus.empty()) {
      const GpuSeen& first = seen.gpus.front();
      choice.why = str_cat("the ", first.name, " has compute capability ", first.major, ".", first.minor,
                           "; Tandem has kernels for 9.0 (H100, H200)");
    }
    return choice;
  }
  std::unique_ptr<jit::Compiler> compiler;
  const Status status =
      jit::Compiler::open({.site_packages = {}, .newest_major = seen.driver_version / 1000}, Env::get(), &compiler);
  if (status.ok()) {
    choice.name = str_cat("cuda:", served - seen.gpus.begin());
  } else {
    choice.why = status.message;
  }
  return choice;
}

void throw_if_failed(const Status& status) {
  if (!status.ok()) throw Error(status.code, status.message);
}

Gpu::Gpu(const std::string& name, const std::string& library) {
  if (gpu::is_virtual(name)) {
    throw_if_failed(vgpu::open(name, &device_));
    place_ = {TANDEM_CPU, 0};
  } else {
    throw_if_failed(gpu::cuda::open(name, &device_, library));
    if (const size_t colon = name.find(':'); colon != std::string::npos)
      place_.index = std::atoi(name.c_str() + colon + 1);  // open() has checked that this is a number
  }
  throw_if_failed(device_->create_stream(&stream_));
  throw_if_failed(device_->create_event(&start_));
  throw_if_failed(device_->create_event(&stop_));
}

Gpu::~Gpu() {
  if (stop_ != nullptr) (void)device_->destroy_event(stop_);
  if (start_ != nullptr) (void)device_->destroy_event(start_);
  if (stream_ != nullptr) (void)device_->destroy_stream(stream_);
}

Gpu::Memory::Memory(Gpu& gpu, size_t bytes) : gpu_(&gpu), bytes_(bytes) {
  throw_if_failed(gpu.device_->allocate(std::max<size_t>(1, bytes), &data_));
}

Gpu::Memory& Gpu::Memory::operator=(Memory&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Gpu::Memory::~Memory() {
  if (data_ != nullptr) (void)gpu_->device_->free(data_);
}

void Gpu::upload(const Memory& to, const void* from, size_t bytes) {
  if (bytes > 0) throw_if_failed(device_->copy_to_device(to.data(), from, bytes, stream_));
}

void Gpu::download(void* to, const Memory& from, size_t bytes) {
  if (bytes > 0) throw_if_failed(device_->copy_to_host(to, from.data(), bytes, stream_));
}

void Gpu::fill(const Memory& memory, unsigned char value) {
  if (memory.bytes() > 0) throw_if_failed(device_->fill(memory.data(), value, memory.bytes(), stream_));
}

void Gpu::synchronize() { throw_if_failed(device_->synchronize(stream_)); }

double Gpu::time_of(const std::function<void()>& run, int64_t count) {
  throw_if_failed(device_->record(start_, stream_));
  for (int64_t n = 0; n < count; ++n) run();
  throw_if_failed(device_->record(stop_, stream_));
  throw_if_failed(device_->synchronize_event(stop_));
  float milliseconds = 0;
  throw_if_failed(device_->elapsed_ms(start_, stop_, &milliseconds));
  return 1e-3 * static_cast<double>(milliseconds);
}

double Gpu::median_seconds(const std::function<void()>& run, double seconds) {
  run();  // includes all work that happens only once
  synchronize();
  constexpr int rounds = 5;
  const double one = std::max(time_of(run, 1), 1e-6), round = seconds / rounds;
  const auto count = static_cast<int64_t>(std::clamp(round / one, 1.0, 1e4));
  (void)time_of(run, count);
  double times[rounds];
  for (double& time : times) time = time_of(run, count) / static_cast<double>(count);
  std::nth_element(times, times + rounds / 2, times + rounds);
  return times[rounds / 2];
}

}  // namespace tandem::tool
