// Memory: device memory, pinned and managed memory, copies, fills. All kinds of memory differ only in their attributes.
// Addresses are the host's. Asynchronous work is executed when it is submitted.
#include <algorithm>
#include <cstring>
#include <utility>

#include "vgpu/src/driver/state.h"

namespace tandem::vgpu::driver {
namespace {

void* pointer_of(CUdeviceptr address) { return reinterpret_cast<void*>(address); }
CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

CUresult allocate(const char* name, size_t bytes, Memory::Kind kind, CUdeviceptr* address) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (address == nullptr || bytes == 0) return kInvalidValue;
    void* pointer = nullptr;
    if (!state.device().allocate(bytes, &pointer).ok()) return kOutOfMemory;
    // The host may write there without a call, so that the memory counts as written.
    if (kind != Memory::Kind::device) (void)state.device().fill(pointer, 0, bytes, nullptr);
    const std::lock_guard lock(state.mutex);
    *address = address_of(pointer);
    state.memory[*address] = {kind, bytes, state.next_id++, false};
    return kSuccess;
  });
}

CUresult release(const char* name, CUdeviceptr address, bool of_host) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (address == 0) return kSuccess;
    const std::lock_guard lock(state.mutex);
    const auto found = state.memory.find(address);
    if (found == state.memory.end() || (found->second.kind == Memory::Kind::host) != of_host ||
        found->second.is_registered)
      return refuse(
          name, kInvalidValue,
          str_cat("address ", address, " must be an allocation that has not been freed: correct the address"));
    state.memory.erase(found);
    return result_of(name, state.device().free(pointer_of(address)));
  });
}

// Refuses a range that begins in an allocation and ends after it.
CUresult copy(const char* name, void* to, const void* from, size_t bytes) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (bytes == 0) return kSuccess;
    if (to == nullptr || from == nullptr) return kInvalidValue;
    return result_of(name, state.device().copy_on_device(to, from, bytes, nullptr));
  });
}

// Fills count elements of `bytes` each, in rows of `width` elements with a pitch of `pitch` bytes.
CUresult fill(const char* name, CUdeviceptr to, size_t pitch, uint32_t value, size_t bytes, size_t width,
              size_t height) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (to % bytes != 0 || (height > 1 && pitch < width * bytes)) return kInvalidValue;
    std::vector<unsigned char> row(width * bytes);
    for (size_t i = 0; i < width; ++i) std::memcpy(row.data() + i * bytes, &value, bytes);
    for (size_t y = 0; y < height && width > 0; ++y) {
      const CUresult result =
          result_of(name, state.device().copy_to_device(pointer_of(to + y * pitch), row.data(), row.size(), nullptr));
      if (result != kSuccess) return result;
    }
    return kSuccess;
  });
}

CUresult copy_rows(const char* name, const Copy2D* how) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (how == nullptr) return kInvalidValue;
    const auto base = [](const Copy2D::Side& side) {
      return side.memory == 1 ? reinterpret_cast<uintptr_t>(side.host) : static_cast<uintptr_t>(side.device);
    };
    if (how->from.memory == 3 || how->to.memory == 3)
      return refuse(name, kNotSupported, "copies from and to arrays are not served: use linear memory");
    const auto pitch = [&](const Copy2D::Side& side) { return side.pitch != 0 ? side.pitch : how->width; };
    if (how->height > 1 && (pitch(how->from) < how->width || pitch(how->to) < how->width)) return kInvalidValue;
    for (size_t y = 0; y < how->height && how->width > 0; ++y) {
      const auto at = [&](const Copy2D::Side& side) {
        return reinterpret_cast<void*>(base(side) + (side.y + y) * pitch(side) + side.x);
      };
      const CUresult result =
          result_of(name, state.device().copy_on_device(at(how->to), at(how->from), how->width, nullptr));
      if (result != kSuccess) return result;
    }
    return kSuccess;
  });
}

}  // namespace

TANDEM_DRIVER(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes)) {
  return allocate("cuMemAlloc", bytes, Memory::Kind::device, address);
}
TANDEM_DRIVER(cuMemAllocPitch_v2, (CUdeviceptr * address, size_t* pitch, size_t width, size_t height, unsigned)) {
  if (pitch == nullptr) return kInvalidValue;
  *pitch = (width + 511) / 512 * 512;
  return allocate("cuMemAllocPitch", *pitch * height, Memory::Kind::device, address);
}
TANDEM_DRIVER(cuMemAllocManaged, (CUdeviceptr * address, size_t bytes, unsigned)) {
  return allocate("cuMemAllocManaged", bytes, Memory::Kind::managed, address);
}
TANDEM_DRIVER(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, void*)) {
  return allocate("cuMemAllocAsync", bytes, Memory::Kind::device, address);
}
TANDEM_DRIVER(cuMemAllocFromPoolAsync, (CUdeviceptr * address, size_t bytes, void*, void*)) {
  return allocate("cuMemAllocFromPoolAsync", bytes, Memory::Kind::device, address);
}
TANDEM_DRIVER(cuMemAllocHost_v2, (void** address, size_t bytes)) {
  return allocate("cuMemAllocHost", bytes, Memory::Kind::host, reinterpret_cast<CUdeviceptr*>(address));
}
TANDEM_DRIVER(cuMemHostAlloc, (void** address, size_t bytes, unsigned)) {
  return allocate("cuMemHostAlloc", bytes, Memory::Kind::host, reinterpret_cast<CUdeviceptr*>(address));
}
TANDEM_DRIVER(cuMemFree_v2, (CUdeviceptr address)) { return release("cuMemFree", address, false); }
// A captured release frees nothing, because the graph may be launched again with the same address.
TANDEM_DRIVER(cuMemFreeAsync, (CUdeviceptr address, void* stream)) {
  return is_capturing(stream) ? kSuccess : release("cuMemFreeAsync", address, false);
}
TANDEM_DRIVER(cuMemFreeHost, (void* address)) { return release("cuMemFreeHost", address_of(address), true); }

TANDEM_DRIVER(cuMemHostRegister_v2, (void* host, size_t bytes, unsigned)) {
  return serve("cuMemHostRegister", Needs::context, [&](DriverState& state) {
    if (host == nullptr || bytes == 0) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    const CUdeviceptr begin = address_of(host);
    const auto next = state.memory.lower_bound(begin);
    const bool overlaps = next != state.memory.end() && next->first < begin + bytes;
    if (overlaps || state.around(begin) != state.memory.end()) return kHostMemoryAlreadyRegistered;
    adopt(state.device(), host, bytes);
    state.memory[begin] = {Memory::Kind::host, bytes, state.next_id++, true};
    return kSuccess;
  });
}
TANDEM_DRIVER(cuMemHostUnregister, (void* host)) {
  return serve("cuMemHostUnregister", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    const auto found = state.memory.find(address_of(host));
    if (found == state.memory.end() || !found->second.is_registered) return kHostMemoryNotRegistered;
    state.memory.erase(found);
    return result_of("cuMemHostUnregister", state.device().free(host));
  });
}

TANDEM_DRIVER(cuMemHostGetDevicePointer_v2, (CUdeviceptr * address, void* host, unsigned)) {
  return serve("cuMemHostGetDevicePointer", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (address == nullptr || state.around(address_of(host)) == state.memory.end()) return kInvalidValue;
    *address = address_of(host);
    return kSuccess;
  });
}
TANDEM_DRIVER(cuMemHostGetFlags, (unsigned* flags, void*)) {
  return serve("cuMemHostGetFlags", Needs::context, [&](DriverState&) { return *flags = 0, kSuccess; });
}

TANDEM_DRIVER(cuMemGetInfo_v2, (size_t * left, size_t* all)) {
  return serve("cuMemGetInfo", Needs::context, [&](DriverState& state) {
    if (left == nullptr || all == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    *all = *left = static_cast<size_t>(state.model().memory_bytes);
    for (const auto& [address, memory] : state.memory) *left -= std::min(*left, memory.bytes);
    return kSuccess;
  });
}

TANDEM_DRIVER(cuMemGetAddressRange_v2, (CUdeviceptr * begin, size_t* bytes, CUdeviceptr address)) {
  return serve("cuMemGetAddressRange", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    const auto found = state.around(address);
    if (found == state.memory.end()) return kNotFound;
    if (begin != nullptr) *begin = found->first;
    if (bytes != nullptr) *bytes = found->second.bytes;
    return kSuccess;
  });
}

// ---- copies ----

TANDEM_DRIVER(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes)) {
  return copy("cuMemcpy", pointer_of(to), pointer_of(from), bytes);
}
TANDEM_DRIVER(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream)) {
  return submit("cuMemcpyAsync", stream, GraphNode::copy,
                [=] { return copy("cuMemcpyAsync", pointer_of(to), pointer_of(from), bytes); });
}
TANDEM_DRIVER(cuMemcpyHtoD_v2, (CUdeviceptr to, const void* from, size_t bytes)) {
  return copy("cuMemcpyHtoD", pointer_of(to), from, bytes);
}
TANDEM_DRIVER(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void* from, size_t bytes, void* stream)) {
  return submit("cuMemcpyHtoDAsync", stream, GraphNode::copy,
                [=] { return copy("cuMemcpyHtoDAsync", pointer_of(to), from, bytes); });
}
TANDEM_DRIVER(cuMemcpyDtoH_v2, (void* to, CUdeviceptr from, size_t bytes)) {
  return copy("cuMemcpyDtoH", to, pointer_of(from), bytes);
}
TANDEM_DRIVER(cuMemcpyDtoHAsync_v2, (void* to, CUdeviceptr from, size_t bytes, void* stream)) {
  return submit("cuMemcpyDtoHAsync", stream, GraphNode::copy,
                [=] { return copy("cuMemcpyDtoHAsync", to, pointer_of(from), bytes); });
}
TANDEM_DRIVER(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes)) {
  return copy("cuMemcpyDtoD", pointer_of(to), pointer_of(from), bytes);
}
TANDEM_DRIVER(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream)) {
  return submit("cuMemcpyDtoDAsync", stream, GraphNode::copy,
                [=] { return copy("cuMemcpyDtoDAsync", pointer_of(to), pointer_of(from), bytes); });
}
TANDEM_DRIVER(cuMemcpy2D_v2, (const Copy2D* how)) { return copy_rows("cuMemcpy2D", how); }
TANDEM_DRIVER(cuMemcpy2DUnaligned_v2, (const Copy2D* how)) { return copy_rows("cuMemcpy2DUnaligned", how); }
TANDEM_DRIVER(cuMemcpy2DAsync_v2, (const Copy2D* how, void* stream)) {
  if (how == nullptr) return kInvalidValue;
  return submit("cuMemcpy2DAsync", stream, GraphNode::copy,
                [how = *how] { return copy_rows("cuMemcpy2DAsync", &how); });
}

TANDEM_DRIVER(cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t count)) {
  return fill("cuMemsetD8", to, 0, value, 1, count, 1);
}
TANDEM_DRIVER(cuMemsetD16_v2, (CUdeviceptr to, unsigned short value, size_t count)) {
  return fill("cuMemsetD16", to, 0, value, 2, count, 1);
}
TANDEM_DRIVER(cuMemsetD32_v2, (CUdeviceptr to, unsigned value, size_t count)) {
  return fill("cuMemsetD32", to, 0, value, 4, count, 1);
}
TANDEM_DRIVER(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, void* stream)) {
  return submit("cuMemsetD8Async", stream, GraphNode::fill,
                [=] { return fill("cuMemsetD8Async", to, 0, value, 1, count, 1); });
}
TANDEM_DRIVER(cuMemsetD16Async, (CUdeviceptr to, unsigned short value, size_t count, void* stream)) {
  return submit("cuMemsetD16Async", stream, GraphNode::fill,
                [=] { return fill("cuMemsetD16Async", to, 0, value, 2, count, 1); });
}
TANDEM_DRIVER(cuMemsetD32Async, (CUdeviceptr to, unsigned value, size_t count, void* stream)) {
  return submit("cuMemsetD32Async", stream, GraphNode::fill,
                [=] { return fill("cuMemsetD32Async", to, 0, value, 4, count, 1); });
}
TANDEM_DRIVER(cuMemsetD2D8_v2, (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height)) {
  return fill("cuMemsetD2D8", to, pitch, value, 1, width, height);
}
TANDEM_DRIVER(cuMemsetD2D16_v2, (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height)) {
  return fill("cuMemsetD2D16", to, pitch, value, 2, width, height);
}
TANDEM_DRIVER(cuMemsetD2D32_v2, (CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t height)) {
  return fill("cuMemsetD2D32", to, pitch, value, 4, width, height);
}
TANDEM_DRIVER(cuMemsetD2D8Async,
              (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height, void* stream)) {
  return submit("cuMemsetD2D8Async", stream, GraphNode::fill,
                [=] { return fill("cuMemsetD2D8Async", to, pitch, value, 1, width, height); });
}

// Managed memory is accessible everywhere.
TANDEM_DRIVER(cuMemPrefetchAsync, (CUdeviceptr, size_t, CUdevice, void*)) {
  return serve("cuMemPrefetchAsync", Needs::context, [](DriverState&) { return kSuccess; });
}
TANDEM_DRIVER(cuMemAdvise, (CUdeviceptr, size_t, int, CUdevice)) {
  return serve("cuMemAdvise", Needs::context, [](DriverState&) { return kSuccess; });
}

// ---- pools: a single pool without settings ----

namespace {
char the_pool;
}
TANDEM_DRIVER(cuDeviceGetDefaultMemPool, (void** pool, CUdevice device)) {
  return serve("cuDeviceGetDefaultMemPool", Needs::device, [&](DriverState&) {
    if (pool == nullptr || device != 0) return kInvalidValue;
    *pool = &the_pool;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuDeviceGetMemPool, (void** pool, CUdevice device)) { return cuDeviceGetDefaultMemPool(pool, device); }
TANDEM_DRIVER(cuMemPoolSetAttribute, (void*, int, void*)) {
  return serve("cuMemPoolSetAttribute", Needs::device, [](DriverState&) { return kSuccess; });
}
TANDEM_DRIVER(cuMemPoolTrimTo, (void*, size_t)) {
  return serve("cuMemPoolTrimTo", Needs::device, [](DriverState&) { return kSuccess; });
}

// ---- attributes of an address ----

namespace {

// value has the type that cuda.h names with each.
CUresult pointer_attribute(DriverState& state, void* value, int attribute, CUdeviceptr address) {
  const auto found = state.around(address);
  const bool known = found != state.memory.end();
  const auto set = [&](auto x) { return std::memcpy(value, &x, sizeof x), kSuccess; };
  if (!known && attribute != 11 && attribute != 12) return kInvalidValue;
  switch (attribute) {
    case 1: return set(static_cast<void*>(&state.primary));                  // context
    case 2: return set(found->second.kind == Memory::Kind::host ? 1u : 2u);  // memory type
    case 3: return set(address);                                             // device pointer
    case 4: return set(pointer_of(address));                                 // host pointer
    case 6: return set(static_cast<unsigned>(1));                            // sync memops
    case 7: return set(static_cast<unsigned long long>(found->second.id));   // buffer
    case 8: return set(static_cast<unsigned>(found->second.kind == Memory::Kind::managed));
    case 9: return set(0);                                         // device
    case 10: return set(static_cast<unsigned>(0));                 // legacy IPC
    case 11: return set(known ? found->first : CUdeviceptr{0});    // begin of the range
    case 12: return set(known ? found->second.bytes : size_t{0});  // size of the range
    case 13: return set(static_cast<unsigned>(1));                 // mapped
    case 14: return set(0u);                                       // handle types
    case 15: return set(0ull);                                     // GPU direct
    case 16: return set(3u);                                       // access: read and write
    case 17: return set(static_cast<void*>(nullptr));              // pool
    default: return kInvalidValue;
  }
}

}  // namespace

TANDEM_DRIVER(cuPointerGetAttribute, (void* value, int attribute, CUdeviceptr address)) {
  return serve("cuPointerGetAttribute", Needs::device, [&](DriverState& state) {
    if (value == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    return pointer_attribute(state, value, attribute, address);
  });
}

// An unknown address is no error, as in the driver: its attributes are 0.
TANDEM_DRIVER(cuPointerGetAttributes, (unsigned count, int* attributes, void** values, CUdeviceptr address)) {
  return serve("cuPointerGetAttributes", Needs::device, [&](DriverState& state) {
    if (attributes == nullptr || values == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    for (unsigned i = 0; i < count; ++i) {
      if (pointer_attribute(state, values[i], attributes[i], address) == kSuccess) continue;
      const bool wide = attributes[i] == 1 || attributes[i] == 3 || attributes[i] == 4 || attributes[i] == 7 ||
                        attributes[i] == 11 || attributes[i] == 12 || attributes[i] == 17;
      std::memset(values[i], 0, wide ? 8 : 4);
      if (attributes[i] == 9) std::memset(values[i], 0xfe, 1), std::memset(static_cast<char*>(values[i]) + 1, 0xff, 3);
    }
    return kSuccess;
  });
}

// The later forms have other arguments, which are ignored too.
TANDEM_DRIVER_ALIAS(cuMemPrefetchAsync_v2, cuMemPrefetchAsync);
TANDEM_DRIVER_ALIAS(cuMemAdvise_v2, cuMemAdvise);

TANDEM_DRIVER_ALIAS(cuMemcpy_ptds, cuMemcpy);
TANDEM_DRIVER_ALIAS(cuMemcpyAsync_ptsz, cuMemcpyAsync);
TANDEM_DRIVER_ALIAS(cuMemcpyHtoD_v2_ptds, cuMemcpyHtoD_v2);
TANDEM_DRIVER_ALIAS(cuMemcpyDtoH_v2_ptds, cuMemcpyDtoH_v2);
TANDEM_DRIVER_ALIAS(cuMemcpyDtoD_v2_ptds, cuMemcpyDtoD_v2);
TANDEM_DRIVER_ALIAS(cuMemcpyHtoDAsync_v2_ptsz, cuMemcpyHtoDAsync_v2);
TANDEM_DRIVER_ALIAS(cuMemcpyDtoHAsync_v2_ptsz, cuMemcpyDtoHAsync_v2);
TANDEM_DRIVER_ALIAS(cuMemcpyDtoDAsync_v2_ptsz, cuMemcpyDtoDAsync_v2);
TANDEM_DRIVER_ALIAS(cuMemcpy2D_v2_ptds, cuMemcpy2D_v2);
TANDEM_DRIVER_ALIAS(cuMemcpy2DUnaligned_v2_ptds, cuMemcpy2DUnaligned_v2);
TANDEM_DRIVER_ALIAS(cuMemcpy2DAsync_v2_ptsz, cuMemcpy2DAsync_v2);
TANDEM_DRIVER_ALIAS(cuMemsetD8_v2_ptds, cuMemsetD8_v2);
TANDEM_DRIVER_ALIAS(cuMemsetD16_v2_ptds, cuMemsetD16_v2);
TANDEM_DRIVER_ALIAS(cuMemsetD32_v2_ptds, cuMemsetD32_v2);
TANDEM_DRIVER_ALIAS(cuMemsetD8Async_ptsz, cuMemsetD8Async);
TANDEM_DRIVER_ALIAS(cuMemsetD16Async_ptsz, cuMemsetD16Async);
TANDEM_DRIVER_ALIAS(cuMemsetD32Async_ptsz, cuMemsetD32Async);
TANDEM_DRIVER_ALIAS(cuMemAllocAsync_ptsz, cuMemAllocAsync);
TANDEM_DRIVER_ALIAS(cuMemFreeAsync_ptsz, cuMemFreeAsync);

}  // namespace tandem::vgpu::driver
