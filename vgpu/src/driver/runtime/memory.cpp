// Memory, copies and fills.
#include <cstring>

#include "vgpu/src/driver/runtime/runtime.h"

namespace tandem::vgpu::driver::runtime {

extern "C" {
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes);
CUresult cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width, size_t height, unsigned element);
CUresult cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned flags);
CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host, unsigned flags);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemFreeHost(void* address);
CUresult cuMemGetInfo_v2(size_t* left, size_t* all);
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes);
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream);
CUresult cuMemcpy2D_v2(const Copy2D* how);
CUresult cuMemcpy2DAsync_v2(const Copy2D* how, void* stream);
CUresult cuMemHostRegister_v2(void* host, size_t bytes, unsigned flags);
CUresult cuMemHostUnregister(void* host);
CUresult cuMemHostGetFlags(unsigned* flags, void* host);
CUresult cuMemFreeAsync(CUdeviceptr address, void* stream);
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, void* stream);
CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                           void* stream);
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count);
CUresult cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height);
CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address);
CUresult cuDeviceGetDefaultMemPool(void** pool, CUdevice device);
CUresult cuMemPoolSetAttribute(void* pool, int attribute, void* value);
CUresult cuMemPoolTrimTo(void* pool, size_t bytes);
}

namespace {

enum CopyKind : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kByAddress = 4 };

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

CUresult copy(void* to, const void* from, size_t bytes, int kind) {
  switch (kind) {
    case kHostToHost: return bytes > 0 ? (std::memmove(to, from, bytes), kSuccess) : kSuccess;
    case kHostToDevice: return cuMemcpyHtoD_v2(address_of(to), from, bytes);
    case kDeviceToHost: return cuMemcpyDtoH_v2(to, address_of(from), bytes);
    case kDeviceToDevice: return cuMemcpyDtoD_v2(address_of(to), address_of(from), bytes);
    case kByAddress: return cuMemcpy(address_of(to), address_of(from), bytes);
    default: return kInvalidCopyDirection;
  }
}

CUresult copy_async(void* to, const void* from, size_t bytes, int kind, void* stream) {
  if (kind < kHostToHost || kind > kByAddress) return kInvalidCopyDirection;
  return cuMemcpyAsync(address_of(to), address_of(from), bytes, stream);
}

struct Rows {
  const void* at;
  size_t pitch;
};

// stream: null for a copy that no stream captures.
CUresult copy_rows(Rows to, Rows from, size_t width, size_t height, int kind, void* stream = nullptr) {
  if (kind < kHostToHost || kind > kByAddress) return kInvalidCopyDirection;
  constexpr unsigned kHost = 1, kDevice = 2, kUnified = 4;
  const auto side = [&](Rows rows, bool device) {
    Copy2D::Side made{};
    made.memory = kind == kByAddress ? kUnified : device ? kDevice : kHost;
    made.host = rows.at;
    made.device = address_of(rows.at);
    made.pitch = rows.pitch;
    return made;
  };
  Copy2D how{};
  how.from = side(from, kind == kDeviceToHost || kind == kDeviceToDevice);
  how.to = side(to, kind == kHostToDevice || kind == kDeviceToDevice);
  how.width = width;
  how.height = height;
  return stream == nullptr ? cuMemcpy2D_v2(&how) : cuMemcpy2DAsync_v2(&how, stream);
}

CUresult copy_symbol(const void* symbol, size_t offset, size_t bytes, void* other, bool to_symbol, int kind,
                     void* stream = nullptr) {
  CUdeviceptr address = 0;
  size_t size = 0;
  if (const CUresult result = find_variable(symbol, &address, &size); result != kSuccess) return result;
  if (offset > size || bytes > size - offset) return kInvalidValue;
  void* const variable = reinterpret_cast<void*>(address + offset);
  void* const to = to_symbol ? variable : other;
  const void* const from = to_symbol ? other : variable;
  return stream == nullptr ? copy(to, from, bytes, kind) : copy_async(to, from, bytes, kind, stream);
}

// cudaPointerAttributes of CUDA 13; type: 0 not allocated, 1 host, 2 device, 3 managed.
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
  long reserved[8];
};

CUresult describe(PointerAttributes* all, const void* pointer) {
  if (all == nullptr) return kInvalidValue;
  *all = {};
  unsigned kind = 0, managed = 0;
  constexpr int kMemoryType = 2, kIsManaged = 8;
  if (cuPointerGetAttribute(&kind, kMemoryType, address_of(pointer)) != kSuccess) {
    all->device = -2;
    all->host_pointer = const_cast<void*>(pointer);
    return kSuccess;
  }
  cuPointerGetAttribute(&managed, kIsManaged, address_of(pointer));
  all->type = managed != 0 ? 3 : static_cast<int>(kind);
  all->device_pointer = const_cast<void*>(pointer);
  all->host_pointer = all->type == 2 ? nullptr : const_cast<void*>(pointer);
  return kSuccess;
}

}  // namespace

TANDEM_RUNTIME(cudaMalloc, (CUdeviceptr * address, size_t bytes),
               address == nullptr ? kInvalidValue
               : bytes == 0       ? (*address = 0, kSuccess)
                                  : cuMemAlloc_v2(address, bytes));
TANDEM_RUNTIME(cudaMallocAsync, (CUdeviceptr * address, size_t bytes, void*), cudaMalloc(address, bytes));
TANDEM_RUNTIME(cudaMallocFromPoolAsync, (CUdeviceptr * address, size_t bytes, void*, void*),
               cudaMalloc(address, bytes));
TANDEM_RUNTIME(cudaMallocPitch, (CUdeviceptr * address, size_t* pitch, size_t width, size_t height),
               cuMemAllocPitch_v2(address, pitch, width, height, 4));
TANDEM_RUNTIME(cudaMallocManaged, (CUdeviceptr * address, size_t bytes, unsigned flags),
               cuMemAllocManaged(address, bytes, flags));
TANDEM_RUNTIME(cudaMallocHost, (void** address, size_t bytes), cuMemHostAlloc(address, bytes, 0));
TANDEM_RUNTIME(cudaHostAlloc, (void** address, size_t bytes, unsigned flags), cuMemHostAlloc(address, bytes, flags));
TANDEM_RUNTIME(cudaHostGetDevicePointer, (CUdeviceptr * address, void* host, unsigned flags),
               cuMemHostGetDevicePointer_v2(address, host, flags));
TANDEM_RUNTIME(cudaFree, (CUdeviceptr address), address == 0 ? kSuccess : cuMemFree_v2(address));
TANDEM_RUNTIME(cudaFreeAsync, (CUdeviceptr address, void* stream),
               address == 0 ? kSuccess : cuMemFreeAsync(address, stream));
TANDEM_RUNTIME(cudaHostRegister, (void* host, size_t bytes, unsigned flags), cuMemHostRegister_v2(host, bytes, flags));
TANDEM_RUNTIME(cudaHostUnregister, (void* host), cuMemHostUnregister(host));
TANDEM_RUNTIME(cudaHostGetFlags, (unsigned* flags, void* host), cuMemHostGetFlags(flags, host));
TANDEM_RUNTIME(cudaFreeHost, (void* address), address == nullptr ? kSuccess : cuMemFreeHost(address));
TANDEM_RUNTIME(cudaMemGetInfo, (size_t * left, size_t* all), cuMemGetInfo_v2(left, all));
TANDEM_RUNTIME(cudaPointerGetAttributes, (PointerAttributes * all, const void* pointer), describe(all, pointer));

TANDEM_RUNTIME(cudaMemcpy, (void* to, const void* from, size_t bytes, int kind), copy(to, from, bytes, kind));
TANDEM_RUNTIME(cudaMemcpyAsync, (void* to, const void* from, size_t bytes, int kind, void* stream),
               copy_async(to, from, bytes, kind, stream));
TANDEM_RUNTIME(cudaMemcpy2D,
               (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind),
               copy_rows({to, to_pitch}, {from, from_pitch}, width, height, kind));
TANDEM_RUNTIME(cudaMemcpy2DAsync,
               (void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind,
                void* stream),
               copy_rows({to, to_pitch}, {from, from_pitch}, width, height, kind, stream));
TANDEM_RUNTIME(cudaMemcpyToSymbol, (const void* symbol, const void* from, size_t bytes, size_t offset, int kind),
               copy_symbol(symbol, offset, bytes, const_cast<void*>(from), true, kind));
TANDEM_RUNTIME(cudaMemcpyToSymbolAsync,
               (const void* symbol, const void* from, size_t bytes, size_t offset, int kind, void* stream),
               copy_symbol(symbol, offset, bytes, const_cast<void*>(from), true, kind, stream));
TANDEM_RUNTIME(cudaMemcpyFromSymbol, (void* to, const void* symbol, size_t bytes, size_t offset, int kind),
               copy_symbol(symbol, offset, bytes, to, false, kind));
TANDEM_RUNTIME(cudaMemcpyFromSymbolAsync,
               (void* to, const void* symbol, size_t bytes, size_t offset, int kind, void* stream),
               copy_symbol(symbol, offset, bytes, to, false, kind, stream));

TANDEM_RUNTIME(cudaMemset, (CUdeviceptr to, int value, size_t bytes),
               cuMemsetD8_v2(to, static_cast<unsigned char>(value), bytes));
TANDEM_RUNTIME(cudaMemsetAsync, (CUdeviceptr to, int value, size_t bytes, void* stream),
               cuMemsetD8Async(to, static_cast<unsigned char>(value), bytes, stream));
TANDEM_RUNTIME(cudaMemset2D, (CUdeviceptr to, size_t pitch, int value, size_t width, size_t height),
               cuMemsetD2D8_v2(to, pitch, static_cast<unsigned char>(value), width, height));
TANDEM_RUNTIME(cudaMemset2DAsync, (CUdeviceptr to, size_t pitch, int value, size_t width, size_t height, void* stream),
               cuMemsetD2D8Async(to, pitch, static_cast<unsigned char>(value), width, height, stream));

TANDEM_RUNTIME(cudaDeviceGetDefaultMemPool, (void** pool, int device), cuDeviceGetDefaultMemPool(pool, device));
TANDEM_RUNTIME(cudaDeviceGetMemPool, (void** pool, int device), cuDeviceGetDefaultMemPool(pool, device));
TANDEM_RUNTIME(cudaMemPoolSetAttribute, (void* pool, int attribute, void* value),
               cuMemPoolSetAttribute(pool, attribute, value));
TANDEM_RUNTIME(cudaMemPoolTrimTo, (void* pool, size_t bytes), cuMemPoolTrimTo(pool, bytes));

TANDEM_RUNTIME_ALIAS(cudaMallocAsync_ptsz, cudaMallocAsync);
TANDEM_RUNTIME_ALIAS(cudaMallocFromPoolAsync_ptsz, cudaMallocFromPoolAsync);
TANDEM_RUNTIME_ALIAS(cudaFreeAsync_ptsz, cudaFreeAsync);
TANDEM_RUNTIME_ALIAS(cudaMemcpy_ptds, cudaMemcpy);
TANDEM_RUNTIME_ALIAS(cudaMemcpyAsync_ptsz, cudaMemcpyAsync);
TANDEM_RUNTIME_ALIAS(cudaMemcpy2D_ptds, cudaMemcpy2D);
TANDEM_RUNTIME_ALIAS(cudaMemcpy2DAsync_ptsz, cudaMemcpy2DAsync);
TANDEM_RUNTIME_ALIAS(cudaMemcpyToSymbol_ptds, cudaMemcpyToSymbol);
TANDEM_RUNTIME_ALIAS(cudaMemcpyToSymbolAsync_ptsz, cudaMemcpyToSymbolAsync);
TANDEM_RUNTIME_ALIAS(cudaMemcpyFromSymbol_ptds, cudaMemcpyFromSymbol);
TANDEM_RUNTIME_ALIAS(cudaMemcpyFromSymbolAsync_ptsz, cudaMemcpyFromSymbolAsync);
TANDEM_RUNTIME_ALIAS(cudaMemset_ptds, cudaMemset);
TANDEM_RUNTIME_ALIAS(cudaMemsetAsync_ptsz, cudaMemsetAsync);
TANDEM_RUNTIME_ALIAS(cudaMemset2D_ptds, cudaMemset2D);
TANDEM_RUNTIME_ALIAS(cudaMemset2DAsync_ptsz, cudaMemset2DAsync);

}  // namespace tandem::vgpu::driver::runtime
