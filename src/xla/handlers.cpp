#include "xla/handlers.h"

#include <algorithm>
#include <cfenv>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>

#include "base/text.h"
#include "xla/custom_call.h"

namespace tandem::xla {
namespace {

constexpr size_t kMaxKept = 4 << 20;  // bytes

XlaErrorCode code_of(tandem_status status) {
  switch (status) {
    case TANDEM_INVALID_ARGUMENT: return kXlaInvalidArgument;
    case TANDEM_UNSUPPORTED: return kXlaUnimplemented;
    case TANDEM_WORKSPACE_TOO_SMALL: return kXlaResourceExhausted;
    case TANDEM_COLD_KERNEL:
    case TANDEM_NO_COMPILER: return kXlaFailedPrecondition;
    default: return kXlaInternal;
  }
}

Status last_failure(tandem_status status) { return {status, status == TANDEM_OK ? "" : tandem_last_error()}; }

// XLA's interface. A function that a runtime does not have lies beyond its struct.
class Interface {
 public:
  explicit Interface(const XlaFrame& frame) : api_(*frame.api), context_(frame.context) {}

  XlaError* error(const Status& status) const {
    XlaNewError args{sizeof args, nullptr, status.message.c_str(), code_of(status.code)};
    return api_.new_error(&args);
  }

  Status stream(void** stream) const {
    XlaStream args{sizeof args, nullptr, context_, nullptr};
    TANDEM_TRY(status_of(api_.stream(&args)));
    *stream = args.stream;
    return {};
  }

  Status ordinal(int32_t* ordinal) const {
    if (api_.struct_size < offsetof(XlaApi, ordinal) + sizeof api_.ordinal) {
      return Status::unsupported("jaxlib (no device ordinals in its XLA FFI) must be newer: upgrade jax");
    }
    XlaOrdinal args{sizeof args, nullptr, context_, 0};
    TANDEM_TRY(status_of(api_.ordinal(&args)));
    *ordinal = args.ordinal;
    return {};
  }

  Status allocate(size_t bytes, void** data) const {
    XlaAllocation args{sizeof args, nullptr, context_, bytes, 1, nullptr};
    TANDEM_TRY(status_of(api_.allocate(&args)));
    *data = args.data;
    return {};
  }

  Status release(size_t bytes, void* data) const {
    XlaRelease args{sizeof args, nullptr, context_, bytes, data};
    return status_of(api_.release(&args));
  }

 private:
  Status status_of(XlaError* error) const {
    if (error == nullptr) return {};
    XlaErrorMessage message{sizeof message, nullptr, error, nullptr};
    api_.error_message(&message);
    Status status{TANDEM_DEVICE_ERROR, str_cat("XLA: ", message.message == nullptr ? "" : message.message)};
    XlaOldError old{sizeof old, nullptr, error};
    api_.delete_error(&old);
    return status;
  }

  const XlaApi& api_;
  XlaContext* context_;
};

tandem_status run(tandem_context* context, tandem_pass pass, const tandem_attention_args& args, void* workspace,
                  size_t bytes, void* stream) {
  return pass == TANDEM_FORWARD ? tandem_forward(context, &args, workspace, bytes, stream)
                                : tandem_backward(context, &args, workspace, bytes, stream);
}

// XLA's threads flush subnormal numbers to zero. The library's threads and the calling thread must not flush them.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

// A thread keeps a small workspace for later calls.
Status run_on_cpu(tandem_pass pass, const tandem_attention_args& args) {
  thread_local std::unique_ptr<std::byte[]> kept;
  thread_local size_t kept_bytes = 0;
  tandem_status status = run(nullptr, pass, args, kept.get(), kept_bytes, nullptr);
  if (status != TANDEM_WORKSPACE_TOO_SMALL) return last_failure(status);
  size_t bytes = 0;
  status = tandem_workspace_size(nullptr, pass, &args, &bytes);
  if (status != TANDEM_OK) return last_failure(status);
  std::unique_ptr<std::byte[]> larger(new std::byte[bytes]);
  status = run(nullptr, pass, args, larger.get(), bytes, nullptr);
  if (bytes <= kMaxKept) {
    kept = std::move(larger);
    kept_bytes = bytes;
  }
  return last_failure(status);
}

// XLA may reuse the workspace once the handler returns, because its later work follows the kernels on the stream.
Status run_on_gpu(const Interface& xla, tandem_context* context, tandem_pass pass, const tandem_attention_args& args) {
  void* stream = nullptr;
  TANDEM_TRY(xla.stream(&stream));
  size_t bytes = 0;
  TANDEM_TRY(last_failure(tandem_workspace_size(context, pass, &args, &bytes)));
  void* workspace = nullptr;
  if (bytes > 0) TANDEM_TRY(xla.allocate(bytes, &workspace));
  const Status status = last_failure(run(context, pass, args, workspace, bytes, stream));
  const Status released = bytes > 0 ? xla.release(bytes, workspace) : Status{};
  return status.ok() ? released : status;
}

Status execute(const XlaFrame& frame, tandem_pass pass, Gpus* gpus) {
  const DefaultArithmetic arithmetic;
  const Interface xla(frame);
  tandem_context* context = nullptr;
  tandem_device device{TANDEM_CPU, 0};
  if (gpus != nullptr) {
    int32_t ordinal = 0;
    TANDEM_TRY(xla.ordinal(&ordinal));
    TANDEM_TRY(gpus->find(ordinal, &context, &device));
  }
  CustomCall call(device);
  TANDEM_TRY(call.read(frame));
  return gpus == nullptr ? run_on_cpu(pass, call.args()) : run_on_gpu(xla, context, pass, call.args());
}

// Reports the version of the interface, or the runtime's own where that is older: xla/ffi.h serves both.
bool report_metadata(const XlaFrame& frame) {
  for (XlaExtension* base = frame.extensions; base != nullptr; base = base->next) {
    if (base->type != kXlaMetadata) continue;
    XlaMetadata& metadata = *reinterpret_cast<XlaMetadataExtension*>(base)->metadata;
    metadata.version.major = kXlaMajor;
    metadata.version.minor = frame.api == nullptr ? 1 : std::min<int>(frame.api->version.minor, kXlaMinor);
    metadata.traits = 0;
    return true;
  }
  return false;
}

}  // namespace

Status Gpus::find(int32_t ordinal, tandem_context** context, tandem_device* device) {
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return Status::unsupported(
        str_cat("device ordinal (", ordinal, ") must be below ", kMaxDevices, ": use one of the first devices"));
  }
  *context = contexts_[ordinal].load(std::memory_order_acquire);
  if (*context == nullptr) {
    const std::lock_guard lock(opening_);
    *context = contexts_[ordinal].load(std::memory_order_acquire);
    if (*context == nullptr) {
      TANDEM_TRY(open(ordinal, context, &devices_[ordinal]));
      contexts_[ordinal].store(*context, std::memory_order_release);
    }
  }
  *device = devices_[ordinal];
  return {};
}

Status Gpus::open(int32_t ordinal, tandem_context** context, tandem_device* device) {
  char name[16];
  std::snprintf(name, sizeof name, "cuda:%d", static_cast<int>(ordinal));
  tandem_context_options options{};
  options.size = sizeof options;
  options.device = name;
  *device = {TANDEM_CUDA, ordinal};
  return last_failure(tandem_context_create(&options, context));
}

XlaError* handle(const XlaFrame& frame, tandem_pass pass, Gpus* gpus) noexcept {
  if (report_metadata(frame)) return nullptr;
  Status status;
  try {
    status = execute(frame, pass, gpus);
  } catch (const std::exception& error) {
    status = {TANDEM_INTERNAL_ERROR, error.what()};
  }
  return status.ok() ? nullptr : Interface(frame).error(status);
}

namespace {

// The contexts are never destroyed, because another library's static destructor may still call.
Gpus& cuda_gpus() {
  static Gpus& gpus = *new Gpus;
  return gpus;
}

XLA_FFI_Error* entry(XLA_FFI_CallFrame* frame, tandem_pass pass, Gpus* gpus) {
  return reinterpret_cast<XLA_FFI_Error*>(handle(*reinterpret_cast<const XlaFrame*>(frame), pass, gpus));
}

}  // namespace
}  // namespace tandem::xla

extern "C" {

XLA_FFI_Error* tandem_xla_cpu_forward(XLA_FFI_CallFrame* frame) {
  return tandem::xla::entry(frame, TANDEM_FORWARD, nullptr);
}

XLA_FFI_Error* tandem_xla_cpu_backward(XLA_FFI_CallFrame* frame) {
  return tandem::xla::entry(frame, TANDEM_BACKWARD, nullptr);
}

XLA_FFI_Error* tandem_xla_cuda_forward(XLA_FFI_CallFrame* frame) {
  return tandem::xla::entry(frame, TANDEM_FORWARD, &tandem::xla::cuda_gpus());
}

XLA_FFI_Error* tandem_xla_cuda_backward(XLA_FFI_CallFrame* frame) {
  return tandem::xla::entry(frame, TANDEM_BACKWARD, &tandem::xla::cuda_gpus());
}

}  // extern "C"
