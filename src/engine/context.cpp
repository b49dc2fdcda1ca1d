#include "engine/context.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "base/env.h"
#include "base/text.h"
#include "engine/cpu.h"
#include "engine/gpu.h"
#include "engine/guard.h"
#include "gpu/driver/driver.h"
#include "gpu/virtual.h"
#include "problem/struct_size.h"

namespace tandem {
namespace {

constexpr int32_t kMaxThreads = 1024;

thread_local char last_error[1024];  // a fixed array, so that storing an error cannot fail

std::string_view device_name(const tandem_context_options& options) {
  return options.device == nullptr ? "cpu" : options.device;
}

Status check_device(std::string_view device) {
  if (device == "cpu" || device == "cpu:0" || gpu::cuda::is_cuda(device) || gpu::is_virtual(device)) return {};
  return Status::invalid(str_cat("options.device (\"", device,
                                 "\") must be \"cpu\", \"cuda\", \"cuda:N\" or \"vgpu:MODEL\": choose one of them"));
}

Status read_options(const tandem_context_options* from, tandem_context_options* options) {
  TANDEM_TRY(read_struct("options", "tandem_context_options", from, sizeof(tandem_context_options), options));
  if (options->threads < 0 || options->threads > kMaxThreads) {
    return Status::invalid(str_cat("options.threads (", options->threads, ") must be 0 to ", kMaxThreads,
                                   ": pass 0 for one thread per core of the process"));
  }
  return check_device(device_name(*options));
}

// Opens a device. place: the device of its tensors. Tensors of a virtual GPU are in host memory.
Status open_device(std::string_view name, std::unique_ptr<gpu::Device>* device, tandem_device* place) {
  *place = {TANDEM_CPU, 0};
  if (gpu::is_virtual(name)) return gpu::open_virtual(name, device);
  TANDEM_TRY(gpu::cuda::open(name, device));
  const size_t colon = name.find(':');
  const int32_t index = colon == std::string_view::npos ? 0 : std::atoi(name.data() + colon + 1);
  *place = {TANDEM_CUDA, index};
  return {};
}

Status make_context(const tandem_context_options& options, std::unique_ptr<tandem_context>* context) {
  TANDEM_TRY(check(Env::get()));
  const std::string_view name = device_name(options);
  if (!gpu::cuda::is_cuda(name) && !gpu::is_virtual(name)) {
    *context = std::make_unique<tandem_context>(options);
    return {};
  }
  std::unique_ptr<gpu::Device> device;
  tandem_device place;
  TANDEM_TRY(open_device(name, &device, &place));
  const Env& env = Env::get();
  auto engine =
      std::make_unique<GpuEngine>(device->properties().opened_as, std::move(device), env, jit::Cache::options(env));
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

// The context is never destroyed, because another library's static destructor may still call.
Status context_or_default(tandem_context* handle, tandem_context** context) {
  if (handle == nullptr) {
    static const Status& sound = *new Status(check(Env::get()));
    if (!sound.ok()) return sound;
    static tandem_context& process_default = *new tandem_context(default_options());
    handle = &process_default;
  }
  *context = handle;
  return {};
}

gpu::Device& device_of(tandem_context& context) { return *context.engine->device(); }

}  // namespace tandem

tandem_context::tandem_context(const tandem_context_options& options)
    : threads(options.threads, options.parallel_for, options.parallel_for_data),
      engine(std::make_unique<tandem::CpuEngine>(threads)),
      float64(std::make_unique<tandem::OracleEngine>(threads)),
      description(engine->description()) {}

tandem_context::tandem_context(std::unique_ptr<tandem::Engine> gpu, tandem_device place)
    : device(place),
      threads(1, nullptr, nullptr),
      engine(std::move(gpu)),
      pool(std::make_unique<tandem::DevicePool>(*engine->device())),
      description(engine->description()) {}

extern "C" {

const char* tandem_last_error(void) { return tandem::last_error; }

tandem_status tandem_context_create(const tandem_context_options* options, tandem_context** context) {
  return tandem::guarded([&]() -> tandem::Status {
    if (context == nullptr) {
      return tandem::Status::invalid("context (NULL) must point to a variable for the new context: pass its address");
    }
    *context = nullptr;
    tandem_context_options read = tandem::default_options();
    if (options != nullptr) TANDEM_TRY(tandem::read_options(options, &read));
    std::unique_ptr<tandem_context> made;
    TANDEM_TRY(tandem::make_context(read, &made));
    *context = made.release();
    return {};
  });
}

void tandem_context_destroy(tandem_context* context) { delete context; }

const char* tandem_context_description(tandem_context* context) {
  const char* description = "";
  (void)tandem::guarded([&]() -> tandem::Status {
    TANDEM_TRY(tandem::context_or_default(context, &context));
    description = context->description.c_str();
    return {};
  });
  return description;
}

int32_t tandem_context_threads(tandem_context* context) {
  int32_t count = 0;
  (void)tandem::guarded([&]() -> tandem::Status {
    TANDEM_TRY(tandem::context_or_default(context, &context));
    count = context->threads.count();
    return {};
  });
  return count;
}

}  // extern "C"
