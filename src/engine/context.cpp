#include "engine/context.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "cpu/cpu.h"
#include "engine/guard.h"
#include "gpu/driver/driver.h"
#include "problem/text.h"
#include "vgpu/device.h"

namespace tandem {
namespace {

constexpr int32_t kMaxThreads = 1024;

thread_local char last_error[1024];  // no allocation, so that it cannot fail

std::string_view device_name(const tandem_context_options& options) {
  return options.device == nullptr ? "cpu" : options.device;
}

Status check_device(std::string_view device) {
  if (device == "cpu" || device == "cpu:0" || gpu::cuda::is_cuda(device) || vgpu::is_vgpu(device)) return {};
  return Status::invalid(say("options.device (\"", device,
                             "\") must be \"cpu\", \"cuda\", \"cuda:N\" or "
                             "\"vgpu:MODEL\": no device has this name"));
}

Status check_options(const tandem_context_options& options) {
  constexpr int64_t known = sizeof(tandem_context_options);
  constexpr int64_t wild = 1 << 16;  // a size that no version will reach
  if (options.size < known || options.size > wild) {
    return Status::invalid(say("options.size (", options.size, ") must be sizeof(tandem_context_options), ", known,
                               " in this version: set it first; it tells which struct the caller was compiled with"));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(&options);
  for (int64_t i = known; i < options.size; ++i) {
    if (bytes[i] == 0) continue;
    return Status::unsupported(say("options byte ", i, " (", bytes[i], ") must be 0: it is an option beyond the ",
                                   known, " bytes this version knows; zero it or use a newer library"));
  }
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return Status::invalid(say("options.threads (", options.threads, ") must be 0 to ", kMaxThreads,
                               ": 0 takes one per core this process may run on"));
  }
  return check_device(device_name(options));
}

// A device with its full name, and where the tensors of its calls are: those of a virtual GPU in the host's memory.
Status open_device(std::string_view name, std::unique_ptr<gpu::Device>* device, std::string* full_name,
                   tandem_device* place) {
  if (vgpu::is_vgpu(name)) {
    const vgpu::Model* model = nullptr;
    TANDEM_TRY(vgpu::find_model(name, &model));
    *full_name = say("vgpu:", model->name);
    *place = {TANDEM_CPU, 0};
    return vgpu::open(name, device);
  }
  TANDEM_TRY(gpu::cuda::open(name, device));
  const size_t colon = name.find(':');
  const int32_t index = colon == std::string_view::npos ? 0 : std::atoi(name.data() + colon + 1);  // opened: a number
  *full_name = say("cuda:", index);
  *place = {TANDEM_CUDA, index};
  return {};
}

Status make_context(const tandem_context_options& options, std::unique_ptr<tandem_context>* context) {
  const std::string_view name = device_name(options);
  if (!gpu::cuda::is_cuda(name) && !vgpu::is_vgpu(name)) {
    *context = std::make_unique<tandem_context>(options);
    return {};
  }
  std::unique_ptr<gpu::Device> device;
  std::string full_name;
  tandem_device place;
  TANDEM_TRY(open_device(name, &device, &full_name, &place));
  const jit::Env& env = jit::Env::get();
  auto engine = std::make_unique<GpuEngine>(full_name, std::move(device), env, jit::Cache::options(env));
  *context = std::make_unique<tandem_context>(std::move(engine), place);
  return {};
}

tandem_context_options default_options() {
  tandem_context_options options{};
  options.size = sizeof options;
  return options;
}

}  // namespace

tandem_status report(tandem_status code, const char* sentence) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", sentence);
  return code;
}

// Never destroyed: a call may come as late as another library's static destructor.
tandem_context& context_or_default(tandem_context* context) {
  if (context != nullptr) return *context;
  static tandem_context& process_default = *new tandem_context(default_options());
  return process_default;
}

gpu::Device& device_of(tandem_context& context) { return context.gpu->device(); }

}  // namespace tandem

tandem_context::tandem_context(const tandem_context_options& options)
    : threads(options.threads, options.parallel_for, options.parallel_for_data) {
  const int count = threads.count();
  description = tandem::say("cpu, ", count, count == 1 ? " thread, " : " threads, ", tandem::cpu::target_description());
}

tandem_context::tandem_context(std::unique_ptr<tandem::GpuEngine> engine, tandem_device place)
    : device(place), threads(1, nullptr, nullptr), description(engine->description()), gpu(std::move(engine)) {}

extern "C" {

const char* tandem_last_error(void) { return tandem::last_error; }

tandem_status tandem_context_create(const tandem_context_options* options, tandem_context** context) {
  return tandem::guarded([&]() -> tandem::Status {
    if (context == nullptr) {
      return tandem::Status::invalid("context (NULL) must point to where the new context shall be put");
    }
    *context = nullptr;
    if (options != nullptr) TANDEM_TRY(tandem::check_options(*options));
    std::unique_ptr<tandem_context> made;
    TANDEM_TRY(tandem::make_context(options != nullptr ? *options : tandem::default_options(), &made));
    *context = made.release();
    return {};
  });
}

void tandem_context_destroy(tandem_context* context) { delete context; }

const char* tandem_context_description(tandem_context* context) {
  const char* description = "";
  (void)tandem::guarded([&]() -> tandem::Status {
    description = tandem::context_or_default(context).description.c_str();
    return {};
  });
  return description;
}

int32_t tandem_context_threads(tandem_context* context) {
  int32_t count = 0;
  (void)tandem::guarded([&]() -> tandem::Status {
    count = tandem::context_or_default(context).threads.count();
    return {};
  });
  return count;
}

}  // extern "C"
