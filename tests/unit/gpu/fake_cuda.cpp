#include "fake_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#define EXPORTED __attribute__((visibility("default")))

namespace tandem::test {
namespace {

using namespace gpu::cuda;

FakeCuda state;
thread_local CUcontext current = nullptr;
thread_local CUcontext pushed_over = nullptr;

constexpr CUresult kNotFound = static_cast<CUresult>(500);
constexpr CUresult kInvalidContext = static_cast<CUresult>(201);
char contexts[2];  // a context is the address of its device's entry
char function_object;

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&contexts[device]); }
int current_device() { return current == context_of(1) ? 1 : 0; }

// Begins every call that needs a context.
CUresult begin(const char* name) {
  if (state.failing == name) return static_cast<CUresult>(state.failure);
  if (current != nullptr) return kSuccess;
  ++state.wrong_context;
  return kInvalidContext;
}

CUresult cuInit(unsigned) { return static_cast<CUresult>(state.init_result.load()); }
CUresult cuDriverGetVersion(int* version) { return *version = 12080, kSuccess; }
CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : result == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
  return *name != nullptr ? kSuccess : static_cast<CUresult>(1);
}
CUresult cuGetErrorString(CUresult result, const char** text) {
  return *text = result == kOutOfMemory ? "out of memory" : "unspecified launch failure", kSuccess;
}
CUresult cuDeviceGetCount(int* count) { return *count = state.devices, kSuccess; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, kSuccess; }
CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  std::snprintf(name, static_cast<size_t>(bytes), "Fake %d", device);
  return kSuccess;
}
CUresult cuDeviceGetAttribute(int* value, DeviceAttribute attribute, CUdevice) {
  return *value = 1000 + attribute, kSuccess;
}
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) { return *bytes = size_t{80} << 30, kSuccess; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ++state.retained[device];
  return *context = context_of(device), kSuccess;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return --state.retained[device], kSuccess; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, kSuccess; }
CUresult cuCtxPushCurrent(CUcontext context) {
  ++state.pushes;
  pushed_over = current;
  return current = context, kSuccess;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  ++state.pops;
  *context = current;
  return current = pushed_over, kSuccess;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  if (const CUresult result = begin("cuMemAlloc"); result != kSuccess) return result;
  ++state.allocated;
  return *address = reinterpret_cast<CUdeviceptr>(std::malloc(bytes)), kSuccess;
}
CUresult cuMemFree(CUdeviceptr address) {
  --state.allocated;
  return std::free(reinterpret_cast<void*>(address)), begin("cuMemFree");
}
CUresult cuMemAllocHost(void** address, size_t bytes) {
  ++state.allocated;
  return *address = std::malloc(bytes), begin("cuMemAllocHost");
}
CUresult cuMemFreeHost(void* address) {
  --state.allocated;
  return std::free(address), begin("cuMemFreeHost");
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), begin("cuMemcpyHtoDAsync");
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), begin("cuMemcpyDtoHAsync");
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), begin("cuMemcpyDtoDAsync");
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream) {
  return std::memset(reinterpret_cast<void*>(to), value, bytes), begin("cuMemsetD8Async");
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  *stream = reinterpret_cast<CUstream>(std::malloc(1));
  return flags == 1 ? begin("cuStreamCreate") : kNotFound;
}
CUresult cuStreamDestroy(CUstream stream) { return std::free(stream), begin("cuStreamDestroy"); }
CUresult cuStreamSynchronize(CUstream) { return begin("cuStreamSynchronize"); }
CUresult cuStreamIsCapturing(CUstream, int* status) {
  return *status = state.capture_state, begin("cuStreamIsCapturing");
}
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return begin("cuStreamWaitEvent"); }
CUresult cuEventCreate(CUevent* event, unsigned) {
  return *event = reinterpret_cast<CUevent>(std::malloc(1)), begin("cuEventCreate");
}
CUresult cuEventDestroy(CUevent event) { return std::free(event), begin("cuEventDestroy"); }
CUresult cuEventRecord(CUevent, CUstream) { return begin("cuEventRecord"); }
CUresult cuEventSynchronize(CUevent) { return begin("cuEventSynchronize"); }
CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  return *milliseconds = 1.5f, begin("cuEventElapsedTime");
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = reinterpret_cast<CUmodule>(std::malloc(1));
  if (std::memcmp(image, "\177ELF", 4) == 0) return begin("cuModuleLoadData");
  return std::free(*module), kInvalidImage;
}
CUresult cuModuleUnload(CUmodule module) {
  ++state.unloads;
  return std::free(module), begin("cuModuleUnload");
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(&function_object);
  return std::string_view(name) == "known" ? begin("cuModuleGetFunction") : kNotFound;
}
CUresult cuFuncGetAttribute(int* value, FunctionAttribute attribute, CUfunction) {
  return *value = 10 * attribute, begin("cuFuncGetAttribute");
}
CUresult cuFuncSetAttribute(CUfunction, FunctionAttribute attribute, int value) {
  const bool served = attribute == kMaxDynamicSharedSizeBytes && value <= 232448;
  return served ? begin("cuFuncSetAttribute") : static_cast<CUresult>(1);
}
CUresult cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                                const uint64_t* byte_strides, const uint32_t* box, const uint32_t*, int, int swizzle,
                                int promotion, int fill) {
  if (rank < 1 || rank > 5) return static_cast<CUresult>(1);
  const std::lock_guard lock(state.mutex);
  ++state.encoded;
  std::memset(map, 7, 128);
  std::memcpy(map, &address, sizeof address);  // so that tests can distinguish maps
  std::memcpy(static_cast<char*>(map) + 8, &dims[rank - 1], sizeof *dims);
  state.map_type = type, state.map_rank = rank, state.map_swizzle = swizzle;
  state.map_promotion = promotion, state.map_fill = fill;
  std::copy_n(dims, rank, state.map_dims);
  std::copy_n(byte_strides, rank - 1, state.map_byte_strides);
  std::copy_n(box, rank, state.map_box);
  return begin("cuTensorMapEncodeTiled");
}
CUresult cuLaunchKernelEx(const LaunchConfig* config, CUfunction, void** parameters, void**) {
  if (const CUresult result = begin("cuLaunchKernelEx"); result != kSuccess) return result;
  ++state.launches[current_device()];
  const std::lock_guard lock(state.mutex);
  state.config = *config;
  std::copy_n(config->attributes, config->attribute_count, state.attributes);
  state.first_argument = parameters != nullptr ? parameters[0] : nullptr;
  return kSuccess;
}

}  // namespace

extern "C" {

EXPORTED FakeCuda* fake_cuda_state() { return &state; }
EXPORTED int fake_cuda_current() { return current == nullptr ? 0 : 1 + current_device(); }
EXPORTED void fake_cuda_make_current(int context) { current = context == 0 ? nullptr : context_of(context - 1); }

EXPORTED CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t, int*) {
  state.asked_version = version;
  *function = nullptr;
  if (state.missing == name) return kNotFound;
#define TANDEM_MATCH(candidate, parameters) \
  if (std::string_view(name) == #candidate) *function = reinterpret_cast<void*>(&candidate);
  TANDEM_CUDA_FUNCTIONS(TANDEM_MATCH)
#undef TANDEM_MATCH
  return *function != nullptr ? kSuccess : kNotFound;
}

}  // extern "C"

}  // namespace tandem::test
