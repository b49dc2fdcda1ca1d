// The part of the CUDA driver's interface that the replacement library serves. The declarations are copied so that a
// build needs no CUDA: values and layouts follow cuda.h of CUDA 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::vgpu::driver {

using CUdevice = int;
using CUdeviceptr = uint64_t;

enum CUresult : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidPtx = 218,
  kUnsupportedPtx = 222,
  kFileNotFound = 301,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kContextIsDestroyed = 709,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kLaunchFailed = 719,
  kCooperativeLaunchTooLarge = 720,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureUnmatched = 903,
  kInvalidClusterSize = 912,
  kUnknown = 999,
};

struct LaunchAttribute {
  enum Id : unsigned {
    ignore = 0,
    access_policy_window = 1,
    cooperative = 2,
    synchronization_policy = 3,
    cluster_dimension = 4,
    cluster_scheduling_policy = 5,
    programmatic_stream_serialization = 6,
    programmatic_event = 7,
    priority = 8,
    memory_domain_map = 9,
    memory_domain = 10,
    preferred_cluster_dimension = 11,
    launch_completion_event = 12,
    shared_carveout = 14,
  };
  Id id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int flag;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

// CUDA_MEMCPY2D; memory: 1 host, 2 device, 3 array, 4 unified.
struct Copy2D {
  struct Side {
    size_t x, y;
    unsigned memory;
    const void* host;
    CUdeviceptr device;
    void* array;
    size_t pitch;
  };
  Side from, to;
  size_t width, height;
};
static_assert(sizeof(Copy2D) == 128 && offsetof(Copy2D, to) == 56 && offsetof(Copy2D, width) == 112);

enum FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kConstSizeBytes = 2,
  kLocalSizeBytes = 3,
  kNumRegs = 4,
  kPtxVersion = 5,
  kBinaryVersion = 6,
  kCacheModeCa = 7,
  kMaxDynamicSharedSizeBytes = 8,
  kPreferredSharedMemoryCarveout = 9,
  kClusterSizeMustBeSet = 10,
  kRequiredClusterWidth = 11,
  kRequiredClusterHeight = 12,
  kRequiredClusterDepth = 13,
  kNonPortableClusterSizeAllowed = 14,
  kClusterSchedulingPolicyPreference = 15,
};

}  // namespace tandem::vgpu::driver
