// The GPU operations that Tandem needs: memory, streams, modules, tensor maps, launches. The CUDA driver (driver/) and
// the virtual GPU implement them.
//
// Every function may be called from any thread and preserves the thread's current context. Work is added to the
// caller's stream. As in CUDA, an error of earlier work may surface in any later call. Addresses of device memory are
// void*, as in a tandem_tensor, and the host does not read through them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace tandem::gpu {

using Stream = void*;                 // a CUstream; nullptr: the device's default stream
using Event = struct EventHandle*;    // created by Device::create_event()
using Kernel = struct KernelHandle*;  // belongs to a Module and is valid as long as the Module

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

// The format that load() takes: a cubin, or PTX with line information.
enum class Image : uint8_t { machine_code, ptx };

struct Properties {
  std::string name;
  std::string opened_as;  // full name of the device: "cuda:0", "vgpu:h200"
  int32_t compute_major = 0, compute_minor = 0;
  Image image = Image::machine_code;
  int32_t sm_count = 0;
  int32_t clock_khz = 0;
  int32_t memory_clock_khz = 0;
  int32_t memory_bus_bits = 0;
  int32_t max_dynamic_smem_bytes = 0;  // per block, for kernels that request dynamic memory
  int32_t driver_version = 0;          // 1000 * major + 10 * minor: 13000 is 13.0; 0: no driver
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;

  // The architecture that kernels are compiled for: "sm_90a". From Hopper on the name includes architecture-specific
  // instructions.
  std::string arch() const {
    return "sm_" + std::to_string(10 * compute_major + compute_minor) + (compute_major >= 9 ? "a" : "");
  }
};

struct KernelAttributes {
  int32_t registers = 0;          // per thread
  int32_t local_bytes = 0;        // per thread: spilled registers and stack
  int32_t static_smem_bytes = 0;  // per block
  int32_t max_threads = 0;        // per block
};

// The element types of the bulk copy engine, with the values of the CUDA driver's enumerations. The last three types
// have units of 16 numbers of 4 or 6 bits. These types are packed in global memory and padded to 8 or 16 bytes in
// shared memory. Sizes and boxes count single numbers.
enum class TensorType : int32_t {
  u8,
  u16,
  u32,
  s32,
  u64,
  s64,
  f16,
  f32,
  f64,
  bf16,
  f32_ftz,
  tf32,
  tf32_ftz,
  u4_align8,
  u4_align16,
  u6_align16,
};
enum class Swizzle : int32_t { none, b32, b64, b128, b128_atom_32b, b128_atom_32b_flip_8b, b128_atom_64b };
enum class L2Promotion : int32_t { none, b64, b128, b256 };
enum class OobFill : int32_t { zero, nan };

inline constexpr int kMaxTensorRank = 5;

// Dimension 0 is contiguous.
struct TensorMapSpec {
  void* address = nullptr;  // a multiple of 16
  TensorType type = TensorType::bf16;
  int32_t rank = 0;                            // 1..5
  uint64_t dims[kMaxTensorRank] = {};          // in elements
  uint64_t byte_strides[kMaxTensorRank] = {};  // multiples of 16; [0] is not read
  uint32_t box[kMaxTensorRank] = {};           // elements of one copy: 1..256
  uint32_t element_strides[kMaxTensorRank] = {1, 1, 1, 1, 1};
  Swizzle swizzle = Swizzle::none;
  L2Promotion l2_promotion = L2Promotion::none;
  OobFill oob_fill = OobFill::zero;

  bool operator==(const TensorMapSpec&) const = default;
};

// An opaque parameter of a kernel, passed as a __grid_constant__.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Memory that a kernel may access, and its name in messages.
struct NamedBuffer {
  const char* name = "";
  void* address = nullptr;
  size_t bytes = 0;
  bool writable = false;
  bool initialised = true;  // false: the kernel must write before it reads
};

struct Launch {
  Kernel kernel = nullptr;
  Dim3 grid, block;
  Dim3 cluster;  // blocks per cluster
  uint32_t dynamic_smem_bytes = 0;
  bool cooperative = false;       // all blocks run at once and may wait for each other
  bool overlap_previous = false;  // may start before the previous kernel on the stream ends
  void** args = nullptr;          // the address of each parameter
  Stream stream = nullptr;
  std::span<const NamedBuffer> buffers;  // all memory of the launch, if wants_buffers()
};

// Code on a device. The code owns references to the device, which stays open. The kernels must have ended before the
// Module is destroyed.
class Module {
 public:
  virtual ~Module() = default;
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // dynamic_smem_bytes: the maximum over all launches.
  virtual Status find(const char* name, int32_t dynamic_smem_bytes, Kernel* kernel) = 0;
  virtual Status attributes(Kernel kernel, KernelAttributes* attributes) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual const Properties& properties() const = 0;

  // Pinned memory belongs to the host, and copies from and to it are asynchronous.
  virtual Status allocate(size_t bytes, void** address) = 0;
  virtual Status free(void* address) = 0;
  virtual Status allocate_pinned(size_t bytes, void** address) = 0;
  virtual Status free_pinned(void* address) = 0;
  virtual Status copy_to_device(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual Status copy_to_host(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual Status copy_on_device(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual Status fill(void* to, unsigned char value, size_t bytes, Stream stream) = 0;

  // Streams and events.
  virtual Status create_stream(Stream* stream) = 0;  // does not wait for the default stream
  virtual Status destroy_stream(Stream stream) = 0;
  virtual Status synchronize(Stream stream) = 0;
  virtual Status is_capturing(Stream stream, bool* capturing) = 0;
  virtual Status create_event(Event* event) = 0;
  virtual Status destroy_event(Event event) = 0;
  virtual Status record(Event event, Stream stream) = 0;
  virtual Status wait(Stream stream, Event event) = 0;  // later work on stream waits; the host does not
  virtual Status synchronize_event(Event event) = 0;
  virtual Status elapsed_ms(Event start, Event stop, float* milliseconds) = 0;

  // image: machine code or PTX of the architecture that the properties name.
  virtual Status load(std::span<const std::byte> image, std::unique_ptr<Module>* module) = 0;
  // Returns true if launches must name the memory that they may access, because the device checks every access.
  virtual bool wants_buffers() const { return false; }
  // Every call uses encode() and launch(). On real GPUs these functions neither allocate nor lock.
  virtual Status encode(const TensorMapSpec& spec, TensorMap* map) = 0;
  virtual Status launch(const Launch& launch) = 0;
};

}  // namespace tandem::gpu
