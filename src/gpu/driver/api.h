// The part of the CUDA driver API that Tandem uses, found in libcuda.so.1 at run time. The declarations follow cuda.h
// of CUDA 12.0 and are repeated here so that a build needs no CUDA. Later drivers keep the layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace tandem::gpu::cuda {

using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

enum CUresult : int {
  kSuccess = 0,
  kOutOfMemory = 2,
  kStubLibrary = 34,
  kNoDevice = 100,
  kInvalidImage = 200,
  kNoBinaryForGpu = 209,
  kUnsupportedPtx = 222,
  kNotSupported = 801,
};

enum DeviceAttribute : int {
  kClockRate = 13,
  kMultiprocessorCount = 16,
  kMemoryClockRate = 36,
  kMemoryBusWidth = 37,
  kL2CacheSize = 38,
  kComputeMajor = 75,
  kComputeMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kLocalSizeBytes = 3,
  kNumRegs = 4,
  kMaxDynamicSharedSizeBytes = 8,
};

enum LaunchAttributeId : unsigned { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

// Each function is a member of Api below and has the signature of cuda.h.
#define TANDEM_CUDA_FUNCTIONS(F)                                                                                 \
  F(cuInit, (unsigned flags))                                                                                    \
  F(cuDriverGetVersion, (int* version))                                                                          \
  F(cuGetErrorName, (CUresult result, const char** name))                                                        \
  F(cuGetErrorString, (CUresult result, const char** text))                                                      \
  F(cuDeviceGetCount, (int* count))                                                                              \
  F(cuDeviceGet, (CUdevice * device, int ordinal))                                                               \
  F(cuDeviceGetName, (char* name, int bytes, CUdevice device))                                                   \
  F(cuDeviceGetAttribute, (int* value, DeviceAttribute attribute, CUdevice device))                              \
  F(cuDeviceTotalMem, (size_t * bytes, CUdevice device))                                                         \
  F(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                            \
  F(cuDevicePrimaryCtxRelease, (CUdevice device))                                                                \
  F(cuCtxGetCurrent, (CUcontext * context))                                                                      \
  F(cuCtxPushCurrent, (CUcontext context))                                                                       \
  F(cuCtxPopCurrent, (CUcontext * context))                                                                      \
  F(cuMemAlloc, (CUdeviceptr * address, size_t bytes))                                                           \
  F(cuMemFree, (CUdeviceptr address))                                                                            \
  F(cuMemAllocHost, (void** address, size_t bytes))                                                              \
  F(cuMemFreeHost, (void* address))                                                                              \
  F(cuMemcpyHtoDAsync, (CUdeviceptr to, const void* from, size_t bytes, CUstream stream))                        \
  F(cuMemcpyDtoHAsync, (void* to, CUdeviceptr from, size_t bytes, CUstream stream))                              \
  F(cuMemcpyDtoDAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                        \
  F(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                       \
  F(cuStreamCreate, (CUstream * stream, unsigned flags))                                                         \
  F(cuStreamDestroy, (CUstream stream))                                                                          \
  F(cuStreamSynchronize, (CUstream stream))                                                                      \
  F(cuStreamIsCapturing, (CUstream stream, int* status))                                                         \
  F(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                                         \
  F(cuEventCreate, (CUevent * event, unsigned flags))                                                            \
  F(cuEventDestroy, (CUevent event))                                                                             \
  F(cuEventRecord, (CUevent event, CUstream stream))                                                             \
  F(cuEventSynchronize, (CUevent event))                                                                         \
  F(cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent stop))                                      \
  F(cuModuleLoadData, (CUmodule * module, const void* image))                                                    \
  F(cuModuleUnload, (CUmodule module))                                                                           \
  F(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))                             \
  F(cuFuncGetAttribute, (int* value, FunctionAttribute attribute, CUfunction function))                          \
  F(cuFuncSetAttribute, (CUfunction function, FunctionAttribute attribute, int value))                           \
  F(cuTensorMapEncodeTiled, (void* map, int type, uint32_t rank, void* address, const uint64_t* dims,            \
                             const uint64_t* byte_strides, const uint32_t* box, const uint32_t* element_strides, \
                             int interleave, int swizzle, int l2_promotion, int oob_fill))                       \
  F(cuLaunchKernelEx, (const LaunchConfig* config, CUfunction function, void** parameters, void** extra))

struct Api {
#define TANDEM_DECLARE(name, parameters) CUresult(*name) parameters = nullptr;  // NOLINT(*-macro-parentheses)
  TANDEM_CUDA_FUNCTIONS(TANDEM_DECLARE)
#undef TANDEM_DECLARE

  // The text of an error, such as "out of memory (CUDA_ERROR_OUT_OF_MEMORY)".
  std::string text_of(CUresult result) const;
  // Returns ok, or a device error "<what> failed: <text of the result>".
  Status check(CUresult result, const char* what) const;
};

// Loads the library and initialises the driver. Fills api, or returns the reason why no driver is available. Any thread
// may call this function, repeatedly. The library is never unloaded, because the driver has threads.
Status load(const std::string& library, Api* api);

}  // namespace tandem::gpu::cuda
