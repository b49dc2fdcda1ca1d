// Shared declarations of the library that replaces the CUDA runtime (libcudart.so.13). Its functions make the device's
// primary context current and call the virtual driver (libcuda.so.1), to which it is linked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vgpu/src/driver/cuda.h"

namespace tandem::vgpu::driver::runtime {

// cudaError_t has the driver's numbers; these are the runtime's own.
inline constexpr CUresult kInvalidConfiguration{9}, kInvalidSymbol{13}, kInvalidCopyDirection{21},
    kInvalidDeviceFunction{98};

struct Dim3 {
  unsigned x, y, z;
};

// The driver's functions that are used here, handles as what they are to programs.
extern "C" {
CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(void** context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuCtxGetCurrent(void** context);
CUresult cuCtxSetCurrent(void* context);
CUresult cuGetErrorName(CUresult result, const char** name);
CUresult cuGetErrorString(CUresult result, const char** text);
CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status);
}

// cuInit and the primary context, for a thread that has none.
CUresult make_ready();
// Records the result of a function for cudaGetLastError.
CUresult remember(CUresult result);
// "tandem vgpu: cudaMalloc: <sentence>" on standard error, and what the function returns.
CUresult refuse(const char* function, CUresult result, const char* sentence);

// The driver's function of a kernel, and the address and size of a variable, by their addresses in the program.
CUresult find_kernel(const void* symbol, void** function);
CUresult find_variable(const void* symbol, CUdeviceptr* address, size_t* bytes);

// A function that the library exports; its body is an expression of the driver's functions.
#define TANDEM_RUNTIME(name, parameters, ...)                                        \
  extern "C" [[gnu::visibility("default")]] CUresult name parameters {               \
    const CUresult ready = make_ready();                                             \
    return remember(ready != kSuccess ? ready : static_cast<CUresult>(__VA_ARGS__)); \
  }                                                                                  \
  static_assert(true)
// The same under the name that code compiled for a default stream per thread uses: streams have nothing to order here.
#define TANDEM_RUNTIME_ALIAS(alias, name)                                                  \
  __asm__(".globl " #alias "\n.type " #alias ", @function\n.set " #alias ", " #name "\n"); \
  static_assert(true)

}  // namespace tandem::vgpu::driver::runtime
