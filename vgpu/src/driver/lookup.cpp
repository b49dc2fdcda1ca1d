// The functions by which programs find functions at run time, and the names of errors.
#include <dlfcn.h>

#include <cstring>

#include "vgpu/src/driver/state.h"

namespace tandem::vgpu::driver {
namespace {

struct ErrorName {
  CUresult result;
  const char *name, *text;
};
constexpr ErrorName kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {kInvalidPtx, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {kUnsupportedPtx, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX has something that is not served"},
    {kFileNotFound, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kLaunchOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {kLaunchTimeout, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {kIllegalInstruction, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {kMisalignedAddress, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {kInvalidAddressSpace, "CUDA_ERROR_INVALID_ADDRESS_SPACE",
     "operation not supported on global/shared address space"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kCooperativeLaunchTooLarge, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {kStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kStreamCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {kInvalidClusterSize, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "invalid cluster size"},
    {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorName* find(CUresult result) {
  for (const ErrorName& one : kErrors)
    if (one.result == result) return &one;
  return nullptr;
}

void* symbol(const std::string& name) {
  static void* const self = [] {
    Dl_info info{};
    return dladdr(reinterpret_cast<void*>(&DriverState::get), &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                                                                     : nullptr;
  }();
  return self ? dlsym(self, name.c_str()) : nullptr;
}

// Returns the latest form of a function that a program of this version knows.
void* find_function(std::string_view name, int version) {
  struct Since {
    std::string_view name;
    int version;
    const char* form;
  };
  // Functions whose later forms have other arguments.
  constexpr Since forms[] = {
      {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
      {"cuCtxCreate", 11040, "cuCtxCreate_v3"},
      {"cuCtxCreate", 0, "cuCtxCreate_v2"},
      {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
      {"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
      {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
      {"cuGetProcAddress", 0, "cuGetProcAddress"},
  };
  for (const Since& form : forms)
    if (form.name == name && version >= form.version) return symbol(form.form);
  for (const char* suffix : {"_v3", "_v2", ""})
    if (void* const found = symbol(std::string(name) + suffix)) return found;
  return nullptr;
}

}  // namespace

TANDEM_DRIVER(cuGetErrorName, (CUresult result, const char** name)) {
  const ErrorName* const known = find(result);
  *name = known ? known->name : nullptr;
  return known ? kSuccess : kInvalidValue;
}
TANDEM_DRIVER(cuGetErrorString, (CUresult result, const char** text)) {
  const ErrorName* const known = find(result);
  *text = known ? known->text : nullptr;
  return known ? kSuccess : kInvalidValue;
}

// status: 0: found; 1: no such function; 2: newer than the version.
TANDEM_DRIVER(cuGetProcAddress_v2, (const char* name, void** function, int version, uint64_t, int* status)) {
  return serve("cuGetProcAddress", Needs::nothing, [&](DriverState&) {
    if (name == nullptr || function == nullptr) return kInvalidValue;
    *function = find_function(name, version);
    if (status != nullptr) *status = *function != nullptr ? 0 : 1;
    return *function != nullptr ? kSuccess : kNotFound;
  });
}
TANDEM_DRIVER(cuGetProcAddress, (const char* name, void** function, int version, uint64_t flags)) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

}  // namespace tandem::vgpu::driver
