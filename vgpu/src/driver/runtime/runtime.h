// Shared declarations of the library that replaces the CUDA runtime (libcudart.so.13). The library's functions make the
// device's primary context current and call the virtual driver (libcuda.so.1), to which it is linked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vgpu/src/driver/cuda.h"

namespace tandem::vgpu::driver::runtime {

// cudaError_t has the driver's numbers, except for these errors, which only the runtime returns.
inline constexpr CUresult kInvalidConfiguration{9}, kInvalidSymbol{13}, kInvalidCopyDirection{21},
    kInvalidDeviceFunction{98};

struct Dim3 {
  unsigned x, y, z;
};

// The driver's functions that this library uses, with handles in the form that programs see.
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

// Calls cuInit and selects the primary context, for a thread without a context.
CUresult make_ready();
// Records the result of a function for cudaGetLastError.
CUresult remember(CUresult result);
// Prints "tandem vgpu: cudaMalloc: <sentence>" to standard error, and returns the function's result.
CUresult refuse(const char* function, CUresult result, const char* sentence);

// Returns the driver's function of a kernel, and the address and size of a variable, by their addresses in the program.
CUresult find_kernel(const void* symbol, void** function);
CUresult find_variable(const void* symbol, CUdeviceptr* address, size_t* bytes);

// A function that the library exports; its body is an expression of the driver's functions.
#define TANDEM_RUNTIME(name, parameters, ...)                                        \
  extern "C" [[gnu::visibility("default")]] CUresult name parameters {               \
    const CUresult ready = make_ready();                                             \
    return remember(ready != kSuccess ? ready : static_cast<CUresult>(__VA_ARGS__)); \
  }                                                                                  \
  static_assert(true)
// The same under the name for code compiled with a default stream per thread. Streams order nothing here.
#define TANDEM_RUNTIME_ALIAS(alias, name)                                                  \
  __asm__(".globl " #alias "\n.type " #alias ", @function\n.set " #alias ", " #name "\n"); \
  static_assert(true)

}  // namespace tandem::vgpu::driver::runtime
