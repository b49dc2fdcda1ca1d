/* The CUDA driver functions that the examples need, loaded at run time. The examples therefore build without CUDA's
 * headers, and start on machines without a GPU to print a message. Your program includes <cuda.h> or
 * <cuda_runtime.h>: Tandem accepts pointers from cuMemAlloc and cudaMalloc, and streams of either.
 *
 * On a virtual GPU ("vgpu:h200") device memory is host memory, and there are no streams. */
#ifndef TANDEM_EXAMPLES_CUDA_DRIVER_H_
#define TANDEM_EXAMPLES_CUDA_DRIVER_H_

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gpu_memory {
  int (*allocate)(uint64_t* address, size_t bytes); /* NULL: on a virtual GPU */
  int (*release)(uint64_t address);
  int (*to_device)(uint64_t to, const void* from, size_t bytes, void* stream);
  int (*to_host)(void* to, uint64_t from, size_t bytes, void* stream);
  int (*create_stream)(void** stream, unsigned flags);
  int (*synchronize)(void* stream);
} gpu_memory;

static void* gpu_function(void* library, const char* name) {
  void* function = library != NULL ? dlsym(library, name) : NULL;
  if (function != NULL) return function;
  fprintf(stderr, "The CUDA driver (libcuda.so.1) was not found, or lacks %s.\n", name);
  exit(77);
}

static void gpu_must(int result, const char* what) {
  if (result == 0) return;
  fprintf(stderr, "%s: CUDA error %d\n", what, result);
  exit(1);
}

/* Makes the primary context of GPU number `index` current. Tandem works in this context. */
static gpu_memory gpu_open(int index) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  gpu_memory memory;
  int (*init)(unsigned), (*get)(int*, int), (*retain)(void**, int), (*make_current)(void*);
  *(void**)&init = gpu_function(library, "cuInit");
  *(void**)&get = gpu_function(library, "cuDeviceGet");
  *(void**)&retain = gpu_function(library, "cuDevicePrimaryCtxRetain");
  *(void**)&make_current = gpu_function(library, "cuCtxSetCurrent");
  *(void**)&memory.allocate = gpu_function(library, "cuMemAlloc_v2");
  *(void**)&memory.release = gpu_function(library, "cuMemFree_v2");
  *(void**)&memory.to_device = gpu_function(library, "cuMemcpyHtoDAsync_v2");
  *(void**)&memory.to_host = gpu_function(library, "cuMemcpyDtoHAsync_v2");
  *(void**)&memory.create_stream = gpu_function(library, "cuStreamCreate");
  *(void**)&memory.synchronize = gpu_function(library, "cuStreamSynchronize");
  int device;
  void* context;
  if (init(0) != 0 || get(&device, index) != 0) {
    fprintf(stderr, "There is no GPU number %d.\n", index);
    exit(77);
  }
  gpu_must(retain(&context, device), "cuDevicePrimaryCtxRetain");
  gpu_must(make_current(context), "cuCtxSetCurrent");
  return memory;
}

static gpu_memory gpu_open_named(const char* device) {
  if (strncmp(device, "cuda", 4) == 0) return gpu_open(strlen(device) > 5 ? atoi(device + 5) : 0);
  gpu_memory virtual_gpu;
  memset(&virtual_gpu, 0, sizeof virtual_gpu);
  return virtual_gpu;
}

static void* gpu_allocate(const gpu_memory* gpu, size_t bytes) {
  if (gpu->allocate == NULL) return malloc(bytes);
  uint64_t address = 0;
  gpu_must(gpu->allocate(&address, bytes), "cuMemAlloc");
  return (void*)(uintptr_t)address;
}

static void gpu_release(const gpu_memory* gpu, void* memory) {
  if (gpu->release == NULL) {
    free(memory);
  } else {
    gpu_must(gpu->release((uint64_t)(uintptr_t)memory), "cuMemFree");
  }
}

static void* gpu_stream(const gpu_memory* gpu) {
  void* stream = NULL;
  if (gpu->create_stream != NULL) gpu_must(gpu->create_stream(&stream, 1), "cuStreamCreate"); /* 1: not blocking */
  return stream;
}

static void gpu_copy_to(const gpu_memory* gpu, void* to, const void* from, size_t bytes, void* stream) {
  if (gpu->to_device == NULL) {
    memcpy(to, from, bytes);
  } else {
    gpu_must(gpu->to_device((uint64_t)(uintptr_t)to, from, bytes, stream), "cuMemcpyHtoDAsync");
  }
}

/* Copies to the host and waits for the stream. */
static void gpu_copy_back(const gpu_memory* gpu, void* to, const void* from, size_t bytes, void* stream) {
  if (gpu->to_host == NULL) {
    memcpy(to, from, bytes);
    return;
  }
  gpu_must(gpu->to_host(to, (uint64_t)(uintptr_t)from, bytes, stream), "cuMemcpyDtoHAsync");
  gpu_must(gpu->synchronize(stream), "cuStreamSynchronize");
}

#endif /* TANDEM_EXAMPLES_CUDA_DRIVER_H_ */
