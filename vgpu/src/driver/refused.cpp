// Driver functions that are not served. Every name resolves, so that programs load and link. A call prints a sentence.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "vgpu/src/driver/state.h"
#include "vgpu/src/driver/summary.h"

namespace tandem::vgpu::driver {
namespace {

CUresult not_served(const char* name) {
  return serve(name, Needs::nothing, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    Summary::get().refused(name);
    return kNotSupported;
  });
}

}  // namespace

#define TANDEM_REFUSE(name)                             \
  TANDEM_DRIVER(name, ()) { return not_served(#name); } \
  static_assert(true)

// Programs such as NVRTC work without the driver's private tables, but NVIDIA's runtime crashes. One of its tables
// proves that the driver is NVIDIA's, and this library does not claim to be.
constexpr unsigned char kTableOfTheRuntime[16] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                                  0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
TANDEM_DRIVER(cuGetExportTable, (const void** table, const void* id)) {
  if (table != nullptr) *table = nullptr;
  if (id == nullptr || std::memcmp(id, kTableOfTheRuntime, sizeof kTableOfTheRuntime) != 0) return kNotSupported;
  say("cuGetExportTable",
      "the CUDA runtime of this program needs private tables of NVIDIA's driver: build with "
      "nvcc -cudart shared (CUDA 13) to use the virtual GPU's libcudart.so.13");
  std::fflush(nullptr);
  std::_Exit(2);
}

TANDEM_REFUSE(cuArray3DCreate_v2);
TANDEM_REFUSE(cuArray3DGetDescriptor_v2);
TANDEM_REFUSE(cuArrayCreate_v2);
TANDEM_REFUSE(cuArrayDestroy);
TANDEM_REFUSE(cuArrayGetDescriptor_v2);
TANDEM_REFUSE(cuArrayGetMemoryRequirements);
TANDEM_REFUSE(cuArrayGetPlane);
TANDEM_REFUSE(cuArrayGetSparseProperties);
TANDEM_REFUSE(cuCheckpointProcessCheckpoint);
TANDEM_REFUSE(cuCheckpointProcessGetRestoreThreadId);
TANDEM_REFUSE(cuCheckpointProcessGetState);
TANDEM_REFUSE(cuCheckpointProcessLock);
TANDEM_REFUSE(cuCheckpointProcessRestore);
TANDEM_REFUSE(cuCheckpointProcessUnlock);
TANDEM_REFUSE(cuCoredumpGetAttribute);
TANDEM_REFUSE(cuCoredumpGetAttributeGlobal);
TANDEM_REFUSE(cuCoredumpSetAttribute);
TANDEM_REFUSE(cuCoredumpSetAttributeGlobal);
TANDEM_REFUSE(cuCtxAttach);
TANDEM_REFUSE(cuCtxDetach);
TANDEM_REFUSE(cuCtxDisablePeerAccess);
TANDEM_REFUSE(cuCtxEnablePeerAccess);
TANDEM_REFUSE(cuCtxFromGreenCtx);
TANDEM_REFUSE(cuCtxGetDevResource);
TANDEM_REFUSE(cuCtxGetDevice_v2);
TANDEM_REFUSE(cuCtxGetExecAffinity);
TANDEM_REFUSE(cuCtxGetSharedMemConfig);
TANDEM_REFUSE(cuCtxRecordEvent);
TANDEM_REFUSE(cuCtxResetPersistingL2Cache);
TANDEM_REFUSE(cuCtxSetFlags);
TANDEM_REFUSE(cuCtxSetSharedMemConfig);
TANDEM_REFUSE(cuCtxSynchronize_v2);
TANDEM_REFUSE(cuCtxWaitEvent);
TANDEM_REFUSE(cuDestroyExternalMemory);
TANDEM_REFUSE(cuDestroyExternalSemaphore);
TANDEM_REFUSE(cuDevResourceGenerateDesc);
TANDEM_REFUSE(cuDevSmResourceSplitByCount);
TANDEM_REFUSE(cuDeviceGetByPCIBusId);
TANDEM_REFUSE(cuDeviceGetDevResource);
TANDEM_REFUSE(cuDeviceGetExecAffinitySupport);
TANDEM_REFUSE(cuDeviceGetGraphMemAttribute);
TANDEM_REFUSE(cuDeviceGetHostAtomicCapabilities);
TANDEM_REFUSE(cuDeviceGetLuid);
TANDEM_REFUSE(cuDeviceGetNvSciSyncAttributes);
TANDEM_REFUSE(cuDeviceGetP2PAtomicCapabilities);
TANDEM_REFUSE(cuDeviceGetP2PAttribute);
TANDEM_REFUSE(cuDeviceGetProperties);
TANDEM_REFUSE(cuDeviceGetTexture1DLinearMaxWidth);
TANDEM_REFUSE(cuDeviceGraphMemTrim);
TANDEM_REFUSE(cuDevicePrimaryCtxReset_v2);
TANDEM_REFUSE(cuDeviceRegisterAsyncNotification);
TANDEM_REFUSE(cuDeviceSetGraphMemAttribute);
TANDEM_REFUSE(cuDeviceSetMemPool);
TANDEM_REFUSE(cuDeviceUnregisterAsyncNotification);
TANDEM_REFUSE(cuExternalMemoryGetMappedBuffer);
TANDEM_REFUSE(cuExternalMemoryGetMappedMipmappedArray);
TANDEM_REFUSE(cuFlushGPUDirectRDMAWrites);
TANDEM_REFUSE(cuFuncSetBlockShape);
TANDEM_REFUSE(cuFuncSetSharedMemConfig);
TANDEM_REFUSE(cuFuncSetSharedSize);
TANDEM_REFUSE(cuGraphAddBatchMemOpNode);
TANDEM_REFUSE(cuGraphAddEventRecordNode);
TANDEM_REFUSE(cuGraphAddEventWaitNode);
TANDEM_REFUSE(cuGraphAddExternalSemaphoresSignalNode);
TANDEM_REFUSE(cuGraphAddExternalSemaphoresWaitNode);
TANDEM_REFUSE(cuGraphAddMemAllocNode);
TANDEM_REFUSE(cuGraphAddMemFreeNode);
TANDEM_REFUSE(cuGraphAddNode_v2);
TANDEM_REFUSE(cuGraphBatchMemOpNodeGetParams);
TANDEM_REFUSE(cuGraphBatchMemOpNodeSetParams);
TANDEM_REFUSE(cuGraphChildGraphNodeGetGraph);
TANDEM_REFUSE(cuGraphClone);
TANDEM_REFUSE(cuGraphConditionalHandleCreate);
TANDEM_REFUSE(cuGraphDebugDotPrint);
TANDEM_REFUSE(cuGraphDestroyNode);
TANDEM_REFUSE(cuGraphEventRecordNodeGetEvent);
TANDEM_REFUSE(cuGraphEventRecordNodeSetEvent);
TANDEM_REFUSE(cuGraphEventWaitNodeGetEvent);
TANDEM_REFUSE(cuGraphEventWaitNodeSetEvent);
TANDEM_REFUSE(cuGraphExecBatchMemOpNodeSetParams);
TANDEM_REFUSE(cuGraphExecChildGraphNodeSetParams);
TANDEM_REFUSE(cuGraphExecEventRecordNodeSetEvent);
TANDEM_REFUSE(cuGraphExecEventWaitNodeSetEvent);
TANDEM_REFUSE(cuGraphExecExternalSemaphoresSignalNodeSetParams);
TANDEM_REFUSE(cuGraphExecExternalSemaphoresWaitNodeSetParams);
TANDEM_REFUSE(cuGraphExecGetFlags);
TANDEM_REFUSE(cuGraphExecHostNodeSetParams);
TANDEM_REFUSE(cuGraphExecMemcpyNodeSetParams);
TANDEM_REFUSE(cuGraphExecMemsetNodeSetParams);
TANDEM_REFUSE(cuGraphExecNodeSetParams);
TANDEM_REFUSE(cuGraphExternalSemaphoresSignalNodeGetParams);
TANDEM_REFUSE(cuGraphExternalSemaphoresSignalNodeSetParams);
TANDEM_REFUSE(cuGraphExternalSemaphoresWaitNodeGetParams);
TANDEM_REFUSE(cuGraphExternalSemaphoresWaitNodeSetParams);
TANDEM_REFUSE(cuGraphGetEdges_v2);
TANDEM_REFUSE(cuGraphGetRootNodes);
TANDEM_REFUSE(cuGraphHostNodeGetParams);
TANDEM_REFUSE(cuGraphHostNodeSetParams);
TANDEM_REFUSE(cuGraphKernelNodeCopyAttributes);
TANDEM_REFUSE(cuGraphKernelNodeGetAttribute);
TANDEM_REFUSE(cuGraphKernelNodeGetParams_v2);
TANDEM_REFUSE(cuGraphKernelNodeSetAttribute);
TANDEM_REFUSE(cuGraphKernelNodeSetParams_v2);
TANDEM_REFUSE(cuGraphMemAllocNodeGetParams);
TANDEM_REFUSE(cuGraphMemFreeNodeGetParams);
TANDEM_REFUSE(cuGraphMemcpyNodeGetParams);
TANDEM_REFUSE(cuGraphMemcpyNodeSetParams);
TANDEM_REFUSE(cuGraphMemsetNodeGetParams);
TANDEM_REFUSE(cuGraphMemsetNodeSetParams);
TANDEM_REFUSE(cuGraphNodeFindInClone);
TANDEM_REFUSE(cuGraphNodeGetDependencies_v2);
TANDEM_REFUSE(cuGraphNodeGetDependentNodes_v2);
TANDEM_REFUSE(cuGraphNodeGetEnabled);
TANDEM_REFUSE(cuGraphNodeSetEnabled);
TANDEM_REFUSE(cuGraphNodeSetParams);
TANDEM_REFUSE(cuGraphReleaseUserObject);
TANDEM_REFUSE(cuGraphRemoveDependencies_v2);
TANDEM_REFUSE(cuGraphRetainUserObject);
TANDEM_REFUSE(cuGraphicsMapResources);
TANDEM_REFUSE(cuGraphicsResourceGetMappedMipmappedArray);
TANDEM_REFUSE(cuGraphicsResourceGetMappedPointer_v2);
TANDEM_REFUSE(cuGraphicsResourceSetMapFlags_v2);
TANDEM_REFUSE(cuGraphicsSubResourceGetMappedArray);
TANDEM_REFUSE(cuGraphicsUnmapResources);
TANDEM_REFUSE(cuGraphicsUnregisterResource);
TANDEM_REFUSE(cuGreenCtxCreate);
TANDEM_REFUSE(cuGreenCtxDestroy);
TANDEM_REFUSE(cuGreenCtxGetDevResource);
TANDEM_REFUSE(cuGreenCtxGetId);
TANDEM_REFUSE(cuGreenCtxRecordEvent);
TANDEM_REFUSE(cuGreenCtxStreamCreate);
TANDEM_REFUSE(cuGreenCtxWaitEvent);
TANDEM_REFUSE(cuImportExternalMemory);
TANDEM_REFUSE(cuImportExternalSemaphore);
TANDEM_REFUSE(cuIpcCloseMemHandle);
TANDEM_REFUSE(cuIpcGetEventHandle);
TANDEM_REFUSE(cuIpcGetMemHandle);
TANDEM_REFUSE(cuIpcOpenEventHandle);
TANDEM_REFUSE(cuIpcOpenMemHandle_v2);
TANDEM_REFUSE(cuLaunch);
TANDEM_REFUSE(cuLaunchCooperativeKernelMultiDevice);
TANDEM_REFUSE(cuLaunchGrid);
TANDEM_REFUSE(cuLaunchGridAsync);
TANDEM_REFUSE(cuLibraryGetUnifiedFunction);
TANDEM_REFUSE(cuLinkAddData_v2);
TANDEM_REFUSE(cuLinkAddFile_v2);
TANDEM_REFUSE(cuLinkComplete);
TANDEM_REFUSE(cuLinkCreate_v2);
TANDEM_REFUSE(cuLinkDestroy);
TANDEM_REFUSE(cuLogsCurrent);
TANDEM_REFUSE(cuLogsDumpToFile);
TANDEM_REFUSE(cuLogsDumpToMemory);
TANDEM_REFUSE(cuLogsRegisterCallback);
TANDEM_REFUSE(cuLogsUnregisterCallback);
TANDEM_REFUSE(cuMemAddressFree);
TANDEM_REFUSE(cuMemAddressReserve);
TANDEM_REFUSE(cuMemBatchDecompressAsync);
TANDEM_REFUSE(cuMemCreate);
TANDEM_REFUSE(cuMemDiscardAndPrefetchBatchAsync);
TANDEM_REFUSE(cuMemDiscardBatchAsync);
TANDEM_REFUSE(cuMemExportToShareableHandle);
TANDEM_REFUSE(cuMemGetAccess);
TANDEM_REFUSE(cuMemGetAllocationGranularity);
TANDEM_REFUSE(cuMemGetAllocationPropertiesFromHandle);
TANDEM_REFUSE(cuMemGetDefaultMemPool);
TANDEM_REFUSE(cuMemGetHandleForAddressRange);
TANDEM_REFUSE(cuMemGetMemPool);
TANDEM_REFUSE(cuMemImportFromShareableHandle);
TANDEM_REFUSE(cuMemMap);
TANDEM_REFUSE(cuMemMapArrayAsync);
TANDEM_REFUSE(cuMemPoolCreate);
TANDEM_REFUSE(cuMemPoolDestroy);
TANDEM_REFUSE(cuMemPoolExportPointer);
TANDEM_REFUSE(cuMemPoolExportToShareableHandle);
TANDEM_REFUSE(cuMemPoolGetAccess);
TANDEM_REFUSE(cuMemPoolGetAttribute);
TANDEM_REFUSE(cuMemPoolImportFromShareableHandle);
TANDEM_REFUSE(cuMemPoolImportPointer);
TANDEM_REFUSE(cuMemPoolSetAccess);
TANDEM_REFUSE(cuMemPrefetchBatchAsync);
TANDEM_REFUSE(cuMemRangeGetAttribute);
TANDEM_REFUSE(cuMemRangeGetAttributes);
TANDEM_REFUSE(cuMemRelease);
TANDEM_REFUSE(cuMemRetainAllocationHandle);
TANDEM_REFUSE(cuMemSetAccess);
TANDEM_REFUSE(cuMemSetMemPool);
TANDEM_REFUSE(cuMemUnmap);
TANDEM_REFUSE(cuMemcpy3DAsync_v2);
TANDEM_REFUSE(cuMemcpy3DBatchAsync_v2);
TANDEM_REFUSE(cuMemcpy3DPeer);
TANDEM_REFUSE(cuMemcpy3DPeerAsync);
TANDEM_REFUSE(cuMemcpy3D_v2);
TANDEM_REFUSE(cuMemcpyAtoA_v2);
TANDEM_REFUSE(cuMemcpyAtoD_v2);
TANDEM_REFUSE(cuMemcpyAtoHAsync_v2);
TANDEM_REFUSE(cuMemcpyAtoH_v2);
TANDEM_REFUSE(cuMemcpyBatchAsync_v2);
TANDEM_REFUSE(cuMemcpyDtoA_v2);
TANDEM_REFUSE(cuMemcpyHtoAAsync_v2);
TANDEM_REFUSE(cuMemcpyHtoA_v2);
TANDEM_REFUSE(cuMemcpyPeer);
TANDEM_REFUSE(cuMemcpyPeerAsync);
TANDEM_REFUSE(cuMemsetD2D16Async);
TANDEM_REFUSE(cuMemsetD2D32Async);
TANDEM_REFUSE(cuMipmappedArrayCreate);
TANDEM_REFUSE(cuMipmappedArrayDestroy);
TANDEM_REFUSE(cuMipmappedArrayGetLevel);
TANDEM_REFUSE(cuMipmappedArrayGetMemoryRequirements);
TANDEM_REFUSE(cuMipmappedArrayGetSparseProperties);
TANDEM_REFUSE(cuModuleGetSurfRef);
TANDEM_REFUSE(cuModuleGetTexRef);
TANDEM_REFUSE(cuMulticastAddDevice);
TANDEM_REFUSE(cuMulticastBindAddr);
TANDEM_REFUSE(cuMulticastBindMem);
TANDEM_REFUSE(cuMulticastCreate);
TANDEM_REFUSE(cuMulticastGetGranularity);
TANDEM_REFUSE(cuMulticastUnbind);
TANDEM_REFUSE(cuOccupancyAvailableDynamicSMemPerBlock);
TANDEM_REFUSE(cuParamSetSize);
TANDEM_REFUSE(cuParamSetTexRef);
TANDEM_REFUSE(cuParamSetf);
TANDEM_REFUSE(cuParamSeti);
TANDEM_REFUSE(cuParamSetv);
TANDEM_REFUSE(cuPointerSetAttribute);
TANDEM_REFUSE(cuSignalExternalSemaphoresAsync);
TANDEM_REFUSE(cuStreamBatchMemOp_v2);
TANDEM_REFUSE(cuStreamCopyAttributes);
TANDEM_REFUSE(cuStreamGetAttribute);
TANDEM_REFUSE(cuStreamGetCtx_v2);
TANDEM_REFUSE(cuStreamGetGreenCtx);
TANDEM_REFUSE(cuStreamSetAttribute);
TANDEM_REFUSE(cuStreamUpdateCaptureDependencies_v2);
TANDEM_REFUSE(cuStreamWaitValue32_v2);
TANDEM_REFUSE(cuStreamWaitValue64_v2);
TANDEM_REFUSE(cuStreamWriteValue32_v2);
TANDEM_REFUSE(cuStreamWriteValue64_v2);
TANDEM_REFUSE(cuSurfObjectCreate);
TANDEM_REFUSE(cuSurfObjectDestroy);
TANDEM_REFUSE(cuSurfObjectGetResourceDesc);
TANDEM_REFUSE(cuSurfRefGetArray);
TANDEM_REFUSE(cuSurfRefSetArray);
TANDEM_REFUSE(cuTensorMapEncodeIm2col);
TANDEM_REFUSE(cuTensorMapEncodeIm2colWide);
TANDEM_REFUSE(cuTensorMapReplaceAddress);
TANDEM_REFUSE(cuTexObjectCreate);
TANDEM_REFUSE(cuTexObjectDestroy);
TANDEM_REFUSE(cuTexObjectGetResourceDesc);
TANDEM_REFUSE(cuTexObjectGetResourceViewDesc);
TANDEM_REFUSE(cuTexObjectGetTextureDesc);
TANDEM_REFUSE(cuTexRefCreate);
TANDEM_REFUSE(cuTexRefDestroy);
TANDEM_REFUSE(cuTexRefGetAddressMode);
TANDEM_REFUSE(cuTexRefGetAddress_v2);
TANDEM_REFUSE(cuTexRefGetArray);
TANDEM_REFUSE(cuTexRefGetBorderColor);
TANDEM_REFUSE(cuTexRefGetFilterMode);
TANDEM_REFUSE(cuTexRefGetFlags);
TANDEM_REFUSE(cuTexRefGetFormat);
TANDEM_REFUSE(cuTexRefGetMaxAnisotropy);
TANDEM_REFUSE(cuTexRefGetMipmapFilterMode);
TANDEM_REFUSE(cuTexRefGetMipmapLevelBias);
TANDEM_REFUSE(cuTexRefGetMipmapLevelClamp);
TANDEM_REFUSE(cuTexRefGetMipmappedArray);
TANDEM_REFUSE(cuTexRefSetAddress2D_v2);
TANDEM_REFUSE(cuTexRefSetAddress2D_v3);
TANDEM_REFUSE(cuTexRefSetAddressMode);
TANDEM_REFUSE(cuTexRefSetAddress_v2);
TANDEM_REFUSE(cuTexRefSetArray);
TANDEM_REFUSE(cuTexRefSetBorderColor);
TANDEM_REFUSE(cuTexRefSetFilterMode);
TANDEM_REFUSE(cuTexRefSetFlags);
TANDEM_REFUSE(cuTexRefSetFormat);
TANDEM_REFUSE(cuTexRefSetMaxAnisotropy);
TANDEM_REFUSE(cuTexRefSetMipmapFilterMode);
TANDEM_REFUSE(cuTexRefSetMipmapLevelBias);
TANDEM_REFUSE(cuTexRefSetMipmapLevelClamp);
TANDEM_REFUSE(cuTexRefSetMipmappedArray);
TANDEM_REFUSE(cuUserObjectCreate);
TANDEM_REFUSE(cuUserObjectRelease);
TANDEM_REFUSE(cuUserObjectRetain);
TANDEM_REFUSE(cuWaitExternalSemaphoresAsync);
TANDEM_REFUSE(name);
#undef TANDEM_REFUSE

}  // namespace tandem::vgpu::driver
