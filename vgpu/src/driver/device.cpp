// The device: its number, names and attributes; its primary context and other contexts; the current context of a
// thread.
#include <cstring>

#include "vgpu/src/driver/state.h"
#include "vgpu/src/driver/summary.h"

namespace tandem::vgpu::driver {
namespace {

constexpr int kDriverVersion = 13000;
constexpr int kPlainSharedBytes = 48 << 10;  // dynamic shared memory of a block by default

// cuDeviceGetAttribute. Attributes that are not listed are 0, because the device does not have them.
int attribute_of(const Model& m, int attribute) {
  switch (attribute) {
    case 1: return m.max_threads_per_block;
    case 2:
    case 3: return 1024;        // block, x and y
    case 4: return 64;          // z
    case 5: return 0x7fffffff;  // grid, x
    case 6:
    case 7: return 65535;  // y and z
    case 8: return kPlainSharedBytes;
    case 9: return 64 << 10;     // constant memory
    case 10: return 32;          // warp
    case 11: return 0x7fffffff;  // pitch
    case 12: return m.registers_per_sm;
    case 13: return m.clock_khz;
    case 14: return 512;  // texture alignment
    case 16: return m.sm_count;
    case 19: return 1;    // host memory can be mapped
    case 30: return 512;  // surface alignment
    case 31: return 1;    // concurrent kernels
    case 33: return 1;    // PCI bus
    case 36: return m.memory_clock_khz;
    case 37: return m.memory_bus_bits;
    case 38: return static_cast<int>(m.l2_bytes);
    case 39: return kThreadsPerSm;
    case 40: return 3;   // copy engines
    case 41: return 1;   // unified addresses
    case 51: return 32;  // texture pitch alignment
    case 75: return m.compute_major;
    case 76: return m.compute_minor;
    case 78: return 1;  // stream priorities
    case 79:
    case 80: return 1;  // L1 caches
    case 81: return m.shared_bytes_per_block + kReservedSharedBytes;
    case 82: return m.registers_per_sm;
    case 83: return 1;  // managed memory
    case 87: return 2;  // single to double precision
    case 89: return 1;  // concurrent managed access
    case 90: return 1;  // preemption
    case 95: return 1;  // cooperative launches
    case 97: return m.shared_bytes_per_block;
    case 99: return 1;  // host memory that the program registers
    case 106: return kBlocksPerSm;
    case 111: return kReservedSharedBytes;
    case 115: return 1;  // memory pools
    case 120: return 1;  // cluster launches
    case 127: return 1;  // tensor maps
    case 129: return 1;  // unified function pointers
    default: return 0;
  }
}

CUresult with_device(const char* name, CUdevice device, auto&& body) {
  return serve(name, Needs::device, [&](DriverState& state) { return device == 0 ? body(state) : kInvalidDevice; });
}

}  // namespace

TANDEM_DRIVER(cuInit, (unsigned flags)) {
  return serve("cuInit", Needs::nothing,
               [&](DriverState& state) { return flags == 0 ? state.initialise() : kInvalidValue; });
}

TANDEM_DRIVER(cuDriverGetVersion, (int* version)) {
  if (version == nullptr) return kInvalidValue;
  *version = kDriverVersion;
  return kSuccess;
}

TANDEM_DRIVER(cuDeviceGetCount, (int* count)) {
  return serve("cuDeviceGetCount", Needs::device, [&](DriverState&) {
    if (count == nullptr) return kInvalidValue;
    *count = 1;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDeviceGet, (CUdevice * device, int ordinal)) {
  return serve("cuDeviceGet", Needs::device, [&](DriverState&) {
    if (device == nullptr) return kInvalidValue;
    if (ordinal != 0) return kInvalidDevice;
    *device = 0;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDeviceGetName, (char* name, int bytes, CUdevice device)) {
  return with_device("cuDeviceGetName", device, [&](DriverState& state) {
    if (name == nullptr || bytes <= 0) return kInvalidValue;
    std::snprintf(name, static_cast<size_t>(bytes), "%s", state.model().marketing_name.c_str());
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDeviceGetUuid_v2, (unsigned char* uuid, CUdevice device)) {
  return with_device("cuDeviceGetUuid", device, [&](DriverState& state) {
    if (uuid == nullptr) return kInvalidValue;
    std::memset(uuid, 0, 16);
    std::memcpy(uuid, "vgpu:", 5);
    std::memcpy(uuid + 5, state.model().name.data(), std::min<size_t>(11, state.model().name.size()));
    return kSuccess;
  });
}
TANDEM_DRIVER(cuDeviceGetUuid, (unsigned char* uuid, CUdevice device)) { return cuDeviceGetUuid_v2(uuid, device); }

TANDEM_DRIVER(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device)) {
  return with_device("cuDeviceGetAttribute", device, [&](DriverState& state) {
    if (value == nullptr || attribute < 1) return kInvalidValue;
    *value = attribute_of(state.model(), attribute);
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device)) {
  return with_device("cuDeviceTotalMem", device, [&](DriverState& state) {
    if (bytes == nullptr) return kInvalidValue;
    *bytes = static_cast<size_t>(state.model().memory_bytes);
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDeviceComputeCapability, (int* major, int* minor, CUdevice device)) {
  return with_device("cuDeviceComputeCapability", device, [&](DriverState& state) {
    if (major == nullptr || minor == nullptr) return kInvalidValue;
    *major = state.model().compute_major;
    *minor = state.model().compute_minor;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDeviceGetPCIBusId, (char* id, int bytes, CUdevice device)) {
  return with_device("cuDeviceGetPCIBusId", device, [&](DriverState&) {
    if (id == nullptr || bytes < 13) return kInvalidValue;
    std::snprintf(id, static_cast<size_t>(bytes), "0000:01:00.0");
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice)) {
  return with_device("cuDeviceCanAccessPeer", device, [&](DriverState&) { return *can = 0, kSuccess; });
}

// ---- contexts ----

TANDEM_DRIVER(cuDevicePrimaryCtxRetain, (CudaContext * *context, CUdevice device)) {
  return with_device("cuDevicePrimaryCtxRetain", device, [&](DriverState& state) {
    if (context == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    ++state.primary_users;
    *context = &state.primary;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDevicePrimaryCtxRelease_v2, (CUdevice device)) {
  return with_device("cuDevicePrimaryCtxRelease", device, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (state.primary_users == 0) return kInvalidContext;
    --state.primary_users;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned* flags, int* active)) {
  return with_device("cuDevicePrimaryCtxGetState", device, [&](DriverState& state) {
    if (flags == nullptr || active == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    *flags = state.primary.flags;
    *active = state.primary_users > 0;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuDevicePrimaryCtxSetFlags_v2, (CUdevice device, unsigned flags)) {
  return with_device("cuDevicePrimaryCtxSetFlags", device,
                     [&](DriverState& state) { return state.primary.flags = flags, kSuccess; });
}

namespace {

CUresult create_context(CudaContext** context, unsigned flags, CUdevice device) {
  return with_device("cuCtxCreate", device, [&](DriverState& state) {
    if (context == nullptr) return kInvalidValue;
    auto* const made = new CudaContext{flags};
    const std::lock_guard lock(state.mutex);
    state.contexts.insert(made);
    context_stack().push_back(made);
    *context = made;
    return kSuccess;
  });
}

}  // namespace

TANDEM_DRIVER(cuCtxCreate_v2, (CudaContext * *context, unsigned flags, CUdevice device)) {
  return create_context(context, flags, device);
}
TANDEM_DRIVER(cuCtxCreate_v3, (CudaContext * *context, void*, int, unsigned flags, CUdevice device)) {
  return create_context(context, flags, device);
}
TANDEM_DRIVER(cuCtxCreate_v4, (CudaContext * *context, void*, unsigned flags, CUdevice device)) {
  return create_context(context, flags, device);
}

TANDEM_DRIVER(cuCtxDestroy_v2, (CudaContext * context)) {
  return serve("cuCtxDestroy", Needs::device, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (state.contexts.erase(context) == 0) return kInvalidContext;
    std::erase(context_stack(), context);
    delete context;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxPushCurrent_v2, (CudaContext * context)) {
  return serve("cuCtxPushCurrent", Needs::device, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (!state.holds(context)) return kInvalidContext;
    context_stack().push_back(context);
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxPopCurrent_v2, (CudaContext * *context)) {
  return serve("cuCtxPopCurrent", Needs::device, [&](DriverState&) {
    if (context_stack().empty()) return kInvalidContext;
    if (context != nullptr) *context = context_stack().back();
    context_stack().pop_back();
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxSetCurrent, (CudaContext * context)) {
  return serve("cuCtxSetCurrent", Needs::device, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (context != nullptr && !state.holds(context)) return kInvalidContext;
    if (!context_stack().empty()) context_stack().pop_back();
    if (context != nullptr) context_stack().push_back(context);
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxGetCurrent, (CudaContext * *context)) {
  return serve("cuCtxGetCurrent", Needs::device, [&](DriverState&) {
    if (context == nullptr) return kInvalidValue;
    *context = current_context();
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxGetDevice, (CUdevice * device)) {
  return serve("cuCtxGetDevice", Needs::context, [&](DriverState&) {
    if (device == nullptr) return kInvalidValue;
    *device = 0;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxGetFlags, (unsigned* flags)) {
  return serve("cuCtxGetFlags", Needs::context,
               [&](DriverState&) { return *flags = current_context()->flags, kSuccess; });
}

TANDEM_DRIVER(cuCtxGetId, (CudaContext * context, unsigned long long* id)) {
  return serve("cuCtxGetId", Needs::context, [&](DriverState&) {
    if (id == nullptr) return kInvalidValue;
    *id = reinterpret_cast<uintptr_t>(context != nullptr ? context : current_context());
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxGetApiVersion, (CudaContext*, unsigned* version)) {
  return serve("cuCtxGetApiVersion", Needs::device, [&](DriverState&) { return *version = 3020, kSuccess; });
}

TANDEM_DRIVER(cuCtxSynchronize, ()) {
  return serve("cuCtxSynchronize", Needs::context, [](DriverState&) { return kSuccess; });
}

TANDEM_DRIVER(cuCtxGetStreamPriorityRange, (int* least, int* greatest)) {
  return serve("cuCtxGetStreamPriorityRange", Needs::context, [&](DriverState&) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return kSuccess;
  });
}

TANDEM_DRIVER(cuCtxGetLimit, (size_t * value, int limit)) {
  return serve("cuCtxGetLimit", Needs::context, [&](DriverState&) {
    if (value == nullptr || limit < 0) return kInvalidValue;
    *value = limit == 0 ? 1024 : 0;  // the stack
    return kSuccess;
  });
}
TANDEM_DRIVER(cuCtxSetLimit, (int, size_t)) {
  return serve("cuCtxSetLimit", Needs::context, [](DriverState&) { return kSuccess; });
}
TANDEM_DRIVER(cuCtxSetCacheConfig, (int)) {
  return serve("cuCtxSetCacheConfig", Needs::context, [](DriverState&) { return kSuccess; });
}
TANDEM_DRIVER(cuCtxGetCacheConfig, (int* config)) {
  return serve("cuCtxGetCacheConfig", Needs::context, [&](DriverState&) { return *config = 0, kSuccess; });
}
TANDEM_DRIVER(cuProfilerStart, ()) {
  return serve("cuProfilerStart", Needs::context, [](DriverState&) { return kSuccess; });
}
TANDEM_DRIVER(cuProfilerStop, ()) {
  return serve("cuProfilerStop", Needs::context, [](DriverState&) { return kSuccess; });
}

}  // namespace tandem::vgpu::driver
