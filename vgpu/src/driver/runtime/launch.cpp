// Kernels: their attributes, occupancy, launches; streams and events, which order nothing here.
#include <algorithm>
#include <cstdint>

#include "vgpu/src/driver/runtime/runtime.h"

namespace tandem::vgpu::driver::runtime {

extern "C" {
CUresult cuFuncGetAttribute(int* value, int attribute, void* function);
CUresult cuFuncSetAttribute(void* function, int attribute, int value);
CUresult cuFuncGetName(const char** name, void* function);
CUresult cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* bytes);
CUresult cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                        void** extra);
CUresult cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void** extra);
CUresult cuLaunchCooperativeKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                                   void** parameters);
CUresult cuLaunchHostFunc(void* stream, void (*function)(void*), void* data);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t dynamic_bytes);
CUresult cuOccupancyMaxPotentialClusterSize(int* blocks, void* function, const LaunchConfig* config);
CUresult cuOccupancyMaxActiveClusters(int* clusters, void* function, const LaunchConfig* config);
CUresult cuStreamCreateWithPriority(void** stream, unsigned flags, int priority);
CUresult cuStreamDestroy_v2(void* stream);
CUresult cuStreamSynchronize(void* stream);
CUresult cuStreamQuery(void* stream);
CUresult cuStreamWaitEvent(void* stream, void* event, unsigned flags);
CUresult cuStreamIsCapturing(void* stream, int* capturing);
CUresult cuStreamGetCaptureInfo_v3(void* stream, int* capturing, uint64_t* id, void** graph, void* after, void* edges,
                                   size_t* count);
CUresult cuStreamGetFlags(void* stream, unsigned* flags);
CUresult cuStreamGetPriority(void* stream, int* priority);
CUresult cuStreamGetId(void* stream, unsigned long long* id);
CUresult cuThreadExchangeStreamCaptureMode(int* mode);
CUresult cuEventCreate(void** event, unsigned flags);
CUresult cuEventDestroy_v2(void* event);
CUresult cuEventRecord(void* event, void* stream);
CUresult cuEventSynchronize(void* event);
CUresult cuEventQuery(void* event);
CUresult cuEventElapsedTime(float* milliseconds, void* begin, void* end);
}

namespace {

// The legacy default stream and a thread's default stream have the driver's handles, 1 and 2.
template <class Use>
CUresult with_kernel(const void* symbol, Use&& use) {
  void* function = nullptr;
  const CUresult result = find_kernel(symbol, &function);
  return result != kSuccess ? result : use(function);
}

// cudaFuncAttributes of CUDA 13.
struct FunctionAttributes {
  size_t shared_bytes, const_bytes, local_bytes;
  int max_threads, registers, ptx_version, binary_version, cache_mode, max_dynamic_bytes, carveout;
  int cluster_must_be_set, cluster_width, cluster_height, cluster_depth, cluster_policy, non_portable_cluster;
  int reserved[16];
};
static_assert(sizeof(FunctionAttributes) == 144);

CUresult attributes_of(void* function, FunctionAttributes* all) {
  *all = {};
  int shared = 0, constant = 0, local = 0;
  const struct {
    int attribute;
    int* to;
  } wanted[] = {{kSharedSizeBytes, &shared},
                {kConstSizeBytes, &constant},
                {kLocalSizeBytes, &local},
                {kMaxThreadsPerBlock, &all->max_threads},
                {kNumRegs, &all->registers},
                {kPtxVersion, &all->ptx_version},
                {kBinaryVersion, &all->binary_version},
                {kCacheModeCa, &all->cache_mode},
                {kMaxDynamicSharedSizeBytes, &all->max_dynamic_bytes},
                {kPreferredSharedMemoryCarveout, &all->carveout},
                {kClusterSizeMustBeSet, &all->cluster_must_be_set},
                {kRequiredClusterWidth, &all->cluster_width},
                {kRequiredClusterHeight, &all->cluster_height},
                {kRequiredClusterDepth, &all->cluster_depth},
                {kClusterSchedulingPolicyPreference, &all->cluster_policy},
                {kNonPortableClusterSizeAllowed, &all->non_portable_cluster}};
  for (const auto& [attribute, to] : wanted)
    if (const CUresult result = cuFuncGetAttribute(to, attribute, function); result != kSuccess) return result;
  all->shared_bytes = static_cast<size_t>(shared);
  all->const_bytes = static_cast<size_t>(constant);
  all->local_bytes = static_cast<size_t>(local);
  return kSuccess;
}

CUresult launch(void* function, Dim3 grid, Dim3 block, void** parameters, size_t shared_bytes, void* stream) {
  return cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                        static_cast<unsigned>(shared_bytes), stream, parameters, nullptr);
}

}  // namespace

TANDEM_RUNTIME(cudaFuncGetAttributes, (FunctionAttributes * all, const void* symbol),
               with_kernel(symbol, [&](void* function) { return attributes_of(function, all); }));
TANDEM_RUNTIME(cudaFuncSetAttribute, (const void* symbol, int attribute, int value),
               with_kernel(symbol, [&](void* function) { return cuFuncSetAttribute(function, attribute, value); }));
TANDEM_RUNTIME(cudaFuncSetCacheConfig, (const void*, int), kSuccess);
TANDEM_RUNTIME(cudaFuncGetName, (const char** name, const void* symbol),
               with_kernel(symbol, [&](void* function) { return cuFuncGetName(name, function); }));
TANDEM_RUNTIME(cudaFuncGetParamInfo, (const void* symbol, size_t index, size_t* offset, size_t* bytes),
               with_kernel(symbol, [&](void* function) { return cuFuncGetParamInfo(function, index, offset, bytes); }));

TANDEM_RUNTIME(cudaLaunchKernel,
               (const void* symbol, Dim3 grid, Dim3 block, void** parameters, size_t shared_bytes, void* stream),
               with_kernel(symbol, [&](void* function) {
                 return launch(function, grid, block, parameters, shared_bytes, stream);
               }));
TANDEM_RUNTIME(__cudaLaunchKernel,
               (void* kernel, Dim3 grid, Dim3 block, void** parameters, size_t shared_bytes, void* stream),
               launch(kernel, grid, block, parameters, shared_bytes, stream));
// cudaLaunchConfig_t has the layout of the driver's CUlaunchConfig, attributes included, but shared_bytes has 64 bits.
TANDEM_RUNTIME(cudaLaunchKernelExC, (const LaunchConfig* config, const void* symbol, void** parameters),
               with_kernel(symbol,
                           [&](void* function) { return cuLaunchKernelEx(config, function, parameters, nullptr); }));
TANDEM_RUNTIME(cudaLaunchCooperativeKernel,
               (const void* symbol, Dim3 grid, Dim3 block, void** parameters, size_t shared_bytes, void* stream),
               with_kernel(symbol, [&](void* function) {
                 return cuLaunchCooperativeKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                                  static_cast<unsigned>(shared_bytes), stream, parameters);
               }));
TANDEM_RUNTIME(cudaLaunchHostFunc, (void* stream, void (*function)(void*), void* data),
               cuLaunchHostFunc(stream, function, data));

TANDEM_RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessor,
               (int* blocks, const void* symbol, int threads, size_t dynamic_bytes),
               with_kernel(symbol, [&](void* function) {
                 return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, dynamic_bytes);
               }));
TANDEM_RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
               (int* blocks, const void* symbol, int threads, size_t dynamic_bytes, unsigned),
               with_kernel(symbol, [&](void* function) {
                 return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, dynamic_bytes);
               }));
TANDEM_RUNTIME(cudaOccupancyMaxPotentialClusterSize, (int* blocks, const void* symbol, const LaunchConfig* config),
               with_kernel(symbol, [&](void* function) {
                 return cuOccupancyMaxPotentialClusterSize(blocks, function, config);
               }));
TANDEM_RUNTIME(cudaOccupancyMaxActiveClusters, (int* clusters, const void* symbol, const LaunchConfig* config),
               with_kernel(symbol,
                           [&](void* function) { return cuOccupancyMaxActiveClusters(clusters, function, config); }));

TANDEM_RUNTIME(cudaStreamCreate, (void** stream), cuStreamCreateWithPriority(stream, 0, 0));
TANDEM_RUNTIME(cudaStreamCreateWithFlags, (void** stream, unsigned flags),
               cuStreamCreateWithPriority(stream, flags, 0));
TANDEM_RUNTIME(cudaStreamCreateWithPriority, (void** stream, unsigned flags, int priority),
               cuStreamCreateWithPriority(stream, flags, priority));
TANDEM_RUNTIME(cudaStreamDestroy, (void* stream), cuStreamDestroy_v2(stream));
TANDEM_RUNTIME(cudaStreamSynchronize, (void* stream), cuStreamSynchronize(stream));
TANDEM_RUNTIME(cudaStreamQuery, (void* stream), cuStreamQuery(stream));
TANDEM_RUNTIME(cudaStreamWaitEvent, (void* stream, void* event, unsigned flags),
               cuStreamWaitEvent(stream, event, flags));
TANDEM_RUNTIME(cudaStreamIsCapturing, (void* stream, int* capturing), cuStreamIsCapturing(stream, capturing));
TANDEM_RUNTIME(cudaStreamGetCaptureInfo,
               (void* stream, int* capturing, uint64_t* id, void** graph, void*, void*, size_t* count),
               cuStreamGetCaptureInfo_v3(stream, capturing, id, graph, nullptr, nullptr, count));
TANDEM_RUNTIME(cudaThreadExchangeStreamCaptureMode, (int* mode), cuThreadExchangeStreamCaptureMode(mode));
TANDEM_RUNTIME(cudaStreamGetFlags, (void* stream, unsigned* flags), cuStreamGetFlags(stream, flags));
TANDEM_RUNTIME(cudaStreamGetPriority, (void* stream, int* priority), cuStreamGetPriority(stream, priority));
TANDEM_RUNTIME(cudaStreamGetId, (void* stream, unsigned long long* id), cuStreamGetId(stream, id));

TANDEM_RUNTIME(cudaEventCreate, (void** event), cuEventCreate(event, 0));
TANDEM_RUNTIME(cudaEventCreateWithFlags, (void** event, unsigned flags), cuEventCreate(event, flags));
TANDEM_RUNTIME(cudaEventDestroy, (void* event), cuEventDestroy_v2(event));
TANDEM_RUNTIME(cudaEventRecord, (void* event, void* stream), cuEventRecord(event, stream));
TANDEM_RUNTIME(cudaEventRecordWithFlags, (void* event, void* stream, unsigned), cuEventRecord(event, stream));
TANDEM_RUNTIME(cudaEventSynchronize, (void* event), cuEventSynchronize(event));
TANDEM_RUNTIME(cudaEventQuery, (void* event), cuEventQuery(event));
TANDEM_RUNTIME(cudaEventElapsedTime, (float* milliseconds, void* begin, void* end),
               cuEventElapsedTime(milliseconds, begin, end));

TANDEM_RUNTIME_ALIAS(cudaLaunchKernel_ptsz, cudaLaunchKernel);
TANDEM_RUNTIME_ALIAS(__cudaLaunchKernel_ptsz, __cudaLaunchKernel);
TANDEM_RUNTIME_ALIAS(cudaLaunchKernelExC_ptsz, cudaLaunchKernelExC);
TANDEM_RUNTIME_ALIAS(cudaLaunchCooperativeKernel_ptsz, cudaLaunchCooperativeKernel);
TANDEM_RUNTIME_ALIAS(cudaLaunchHostFunc_ptsz, cudaLaunchHostFunc);
TANDEM_RUNTIME_ALIAS(cudaStreamSynchronize_ptsz, cudaStreamSynchronize);
TANDEM_RUNTIME_ALIAS(cudaStreamQuery_ptsz, cudaStreamQuery);
TANDEM_RUNTIME_ALIAS(cudaStreamWaitEvent_ptsz, cudaStreamWaitEvent);
TANDEM_RUNTIME_ALIAS(cudaStreamIsCapturing_ptsz, cudaStreamIsCapturing);
TANDEM_RUNTIME_ALIAS(cudaEventRecord_ptsz, cudaEventRecord);
TANDEM_RUNTIME_ALIAS(cudaEventRecordWithFlags_ptsz, cudaEventRecordWithFlags);

}  // namespace tandem::vgpu::driver::runtime
