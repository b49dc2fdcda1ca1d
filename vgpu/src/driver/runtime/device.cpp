// The device, errors, and the functions by which a program finds the driver's functions.
#include <cstdio>
#include <cstring>
#include <utility>

#include "vgpu/src/driver/runtime/runtime.h"

namespace tandem::vgpu::driver::runtime {

extern "C" {
CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGetName(char* name, int bytes, CUdevice device);
CUresult cuDeviceGetUuid_v2(unsigned char* uuid, CUdevice device);
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device);
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device);
CUresult cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device);
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer);
CUresult cuDriverGetVersion(int* version);
CUresult cuCtxSynchronize();
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest);
CUresult cuCtxGetLimit(size_t* value, int limit);
CUresult cuCtxSetLimit(int limit, size_t value);
}

namespace {

constexpr int kRuntimeVersion = 13000;

thread_local CUresult last_error = kSuccess;

// cudaDeviceProp of CUDA 13.
struct Properties {
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luid_mask;
  size_t total_memory, shared_per_block;
  int registers_per_block, warp_size;
  size_t pitch;
  int max_threads, max_block[3], max_grid[3];
  size_t constant_memory;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  int multiprocessors, integrated, can_map_host;
  int textures[39];
  size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, async_engines, unified_addressing;
  int bus_width, l2_bytes, persisting_l2_bytes, threads_per_sm, stream_priorities, global_l1, local_l1;
  size_t shared_per_sm;
  int registers_per_sm, managed_memory, multi_gpu_board, multi_gpu_group, host_atomics, pageable, concurrent_managed;
  int preemption, host_pointer_registered, cooperative_launch;
  size_t shared_opt_in;
  int page_tables, direct_managed, blocks_per_sm, policy_window;
  size_t reserved_shared;
  int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools, rdma;
  unsigned rdma_flush;
  int rdma_order;
  unsigned pool_handles;
  int deferred_arrays, ipc_events, cluster_launch, unified_functions, numa_config, numa_id, mps, host_numa;
  unsigned pci_ids, pci_subsystem;
  int numa_ipc, reserved[56];
};
static_assert(sizeof(Properties) == 1008 && offsetof(Properties, multiprocessors) == 384 &&
              offsetof(Properties, surface_alignment) == 552 && offsetof(Properties, cluster_launch) == 748);

CUresult describe(Properties* all, int device) {
  if (all == nullptr) return kInvalidValue;
  *all = {};
  if (const CUresult result = cuDeviceGetName(all->name, sizeof all->name, device); result != kSuccess) return result;
  cuDeviceGetUuid_v2(all->uuid, device);
  cuDeviceTotalMem_v2(&all->total_memory, device);
  const auto number = [&](int attribute) {
    int value = 0;
    cuDeviceGetAttribute(&value, attribute, device);
    return value;
  };
  const auto size = [&](int attribute) { return static_cast<size_t>(number(attribute)); };
  all->max_threads = number(1);
  for (int i = 0; i < 3; ++i) all->max_block[i] = number(2 + i), all->max_grid[i] = number(5 + i);
  all->shared_per_block = size(8);
  all->constant_memory = size(9);
  all->warp_size = number(10);
  all->pitch = size(11);
  all->registers_per_block = number(12);
  all->texture_alignment = size(14);
  all->multiprocessors = number(16);
  all->can_map_host = number(19);
  all->concurrent_kernels = number(31);
  all->ecc = number(32);
  all->bus_width = number(37);
  all->l2_bytes = number(38);
  all->threads_per_sm = number(39);
  all->async_engines = number(40);
  all->unified_addressing = number(41);
  all->major = number(75);
  all->minor = number(76);
  all->stream_priorities = number(78);
  all->global_l1 = number(79);
  all->local_l1 = number(80);
  all->shared_per_sm = size(81);
  all->registers_per_sm = number(82);
  all->managed_memory = number(83);
  all->concurrent_managed = number(89);
  all->preemption = number(90);
  all->cooperative_launch = number(95);
  all->shared_opt_in = size(97);
  all->host_register = number(99);
  all->blocks_per_sm = number(106);
  all->reserved_shared = size(111);
  all->memory_pools = number(115);
  all->cluster_launch = number(120);
  return kSuccess;
}

const char* text_of(CUresult error, bool name) {
  struct Own {
    CUresult error;
    const char *name, *text;
  };
  constexpr Own own[] = {
      {kSuccess, "cudaSuccess", "no error"},
      {kInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
      {kOutOfMemory, "cudaErrorMemoryAllocation", "out of memory"},
      {kInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
      {kInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
      {kInvalidCopyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
      {kInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
      {kIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
      {kLaunchFailed, "cudaErrorLaunchFailure", "unspecified launch failure"},
      {kNotSupported, "cudaErrorNotSupported", "operation not supported"},
  };
  for (const Own& one : own)
    if (one.error == error) return name ? one.name : one.text;
  const char* text = nullptr;
  const CUresult found = name ? cuGetErrorName(error, &text) : cuGetErrorString(error, &text);
  return found == kSuccess ? text : "unrecognized error code";
}

CUresult entry_point(const char* name, void** function, int version, uint64_t flags, int* status) {
  return cuGetProcAddress_v2(name, function, version, flags, status);
}

}  // namespace

CUresult make_ready() {
  thread_local bool tried = false;
  if (!tried) {
    if (const CUresult result = cuInit(0); result != kSuccess) return result;
    tried = true;
  }
  void* context = nullptr;
  CUresult result = cuCtxGetCurrent(&context);
  if (result != kSuccess || context != nullptr) return result;
  result = cuDevicePrimaryCtxRetain(&context, 0);
  return result == kSuccess ? cuCtxSetCurrent(context) : result;
}

CUresult remember(CUresult result) {
  if (result != kSuccess) last_error = result;
  return result;
}

CUresult refuse(const char* function, CUresult result, const char* sentence) {
  std::fprintf(stderr, "tandem vgpu: %s: %s\n", function, sentence);
  return remember(result);
}

extern "C" {
[[gnu::visibility("default")]] CUresult cudaGetLastError() { return std::exchange(last_error, kSuccess); }
[[gnu::visibility("default")]] CUresult cudaPeekAtLastError() { return last_error; }
[[gnu::visibility("default")]] const char* cudaGetErrorName(CUresult error) { return text_of(error, true); }
[[gnu::visibility("default")]] const char* cudaGetErrorString(CUresult error) { return text_of(error, false); }
}

TANDEM_RUNTIME(cudaGetDeviceCount, (int* count), cuDeviceGetCount(count));
TANDEM_RUNTIME(cudaGetDevice, (int* device), device == nullptr ? kInvalidValue : (*device = 0, kSuccess));
TANDEM_RUNTIME(cudaSetDevice, (int device), device == 0 ? kSuccess : kInvalidDevice);
TANDEM_RUNTIME(cudaInitDevice, (int device, unsigned, unsigned), device == 0 ? kSuccess : kInvalidDevice);
TANDEM_RUNTIME(cudaSetDeviceFlags, (unsigned), kSuccess);
TANDEM_RUNTIME(cudaGetDeviceFlags, (unsigned* flags), flags == nullptr ? kInvalidValue : (*flags = 0, kSuccess));
TANDEM_RUNTIME(cudaGetDeviceProperties, (Properties * all, int device), describe(all, device));
TANDEM_RUNTIME(cudaDeviceGetAttribute, (int* value, int attribute, int device),
               cuDeviceGetAttribute(value, attribute, device));
TANDEM_RUNTIME(cudaDeviceGetPCIBusId, (char* id, int bytes, int device), cuDeviceGetPCIBusId(id, bytes, device));
TANDEM_RUNTIME(cudaDeviceCanAccessPeer, (int* can, int device, int peer), cuDeviceCanAccessPeer(can, device, peer));
TANDEM_RUNTIME(cudaDeviceSynchronize, (), cuCtxSynchronize());
TANDEM_RUNTIME(cudaDeviceReset, (), kSuccess);
TANDEM_RUNTIME(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest),
               cuCtxGetStreamPriorityRange(least, greatest));
TANDEM_RUNTIME(cudaDeviceGetLimit, (size_t * value, int limit), cuCtxGetLimit(value, limit));
TANDEM_RUNTIME(cudaDeviceSetLimit, (int limit, size_t value), cuCtxSetLimit(limit, value));
TANDEM_RUNTIME(cudaDeviceSetCacheConfig, (int), kSuccess);
TANDEM_RUNTIME(cudaDriverGetVersion, (int* version), cuDriverGetVersion(version));
TANDEM_RUNTIME(cudaRuntimeGetVersion, (int* version),
               version == nullptr ? kInvalidValue : (*version = kRuntimeVersion, kSuccess));
TANDEM_RUNTIME(cudaProfilerStart, (), kSuccess);
TANDEM_RUNTIME(cudaProfilerStop, (), kSuccess);

// status: the same values as cuGetProcAddress. An unknown name is no error of the call.
TANDEM_RUNTIME(cudaGetDriverEntryPoint, (const char* name, void** function, unsigned long long flags, int* status),
               entry_point(name, function, kRuntimeVersion, flags, status) == kInvalidValue ? kInvalidValue : kSuccess);
TANDEM_RUNTIME(cudaGetDriverEntryPointByVersion,
               (const char* name, void** function, unsigned version, unsigned long long flags, int* status),
               entry_point(name, function, static_cast<int>(version), flags, status) == kInvalidValue ? kInvalidValue
                                                                                                      : kSuccess);
TANDEM_RUNTIME_ALIAS(cudaGetDriverEntryPoint_ptsz, cudaGetDriverEntryPoint);
TANDEM_RUNTIME_ALIAS(cudaGetDriverEntryPointByVersion_ptsz, cudaGetDriverEntryPointByVersion);

}  // namespace tandem::vgpu::driver::runtime
