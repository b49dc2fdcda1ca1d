#include "gpu/driver/api.h"

#include <dlfcn.h>

#include "base/text.h"

namespace tandem::gpu::cuda {
namespace {

// The version whose signatures api.h declares. The driver returns each function of that version under its plain name.
// For example, the driver returns cuMemAlloc_v2 as cuMemAlloc, and never a later cuMemAlloc_v3.
constexpr int kInterfaceVersion = 12000;

using GetProcAddress = CUresult (*)(const char* name, void** function, int version, uint64_t flags, int* found);

Status no_driver(const std::string& library, const std::string& why) {
  return Status::unsupported(str_cat("device \"cuda\" needs NVIDIA's driver, and ", library, " cannot be loaded (", why,
                                     "): install the driver, or choose device \"cpu\""));
}

Status check_initialised(const Api& api, CUresult result) {
  switch (result) {
    case kSuccess: return {};
    case kNoDevice:
      return Status::unsupported(
          "device \"cuda\" needs an NVIDIA GPU and the driver sees none: check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
          "choose device \"cpu\"");
    case kStubLibrary:
      return Status::unsupported(
          "device \"cuda\" needs NVIDIA's driver and the loader found the toolkit's stub of libcuda.so.1: take the "
          "stubs "
          "folder out of LD_LIBRARY_PATH");
    default: return api.check(result, "starting NVIDIA's driver (cuInit)");
  }
}

}  // namespace

std::string Api::text_of(CUresult result) const {
  const char *name = nullptr, *text = nullptr;
  if (cuGetErrorName(result, &name) != kSuccess || name == nullptr)
    return str_cat("CUDA error ", static_cast<int>(result));
  if (cuGetErrorString(result, &text) != kSuccess || text == nullptr) return name;
  return str_cat(text, " (", name, ")");
}

Status Api::check(CUresult result, const char* what) const {
  if (result == kSuccess) [[likely]]
    return {};
  return {TANDEM_DEVICE_ERROR, str_cat(what, " failed: ", text_of(result))};
}

Status load(const std::string& library, Api* api) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return no_driver(library, why != nullptr ? why : "no reason given");
  }
  const auto find = reinterpret_cast<GetProcAddress>(dlsym(handle, "cuGetProcAddress_v2"));
  if (find == nullptr) {
    return Status::unsupported(str_cat("device \"cuda\" needs NVIDIA's driver for CUDA 12.0 or newer, and ", library,
                                       " is older: update the driver, or choose device \"cpu\""));
  }
#define TANDEM_FIND(name, parameters)                                                                                 \
  {                                                                                                                   \
    void* address = nullptr;                                                                                          \
    const CUresult result = find(#name, &address, kInterfaceVersion, 0, nullptr);                                     \
    if (result != kSuccess || address == nullptr) return no_driver(library, "the library lacks the function " #name); \
    api->name = reinterpret_cast<decltype(api->name)>(address);                                                       \
  }
  TANDEM_CUDA_FUNCTIONS(TANDEM_FIND)
#undef TANDEM_FIND
  return check_initialised(*api, api->cuInit(0));
}

}  // namespace tandem::gpu::cuda
