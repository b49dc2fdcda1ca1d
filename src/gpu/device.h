// What Tandem asks of a GPU: memory, streams, modules, tensor maps, launches. Implemented by the CUDA driver (driver/)
// and by whatever else executes the same kernels.
//
// Every function may be called from any thread, whatever is current there, and leaves that as it was. Work is put on
// the caller's stream and errors of earlier work may surface in any later call, as CUDA has it. Addresses of device
// memory are void*, as in a tandem_tensor; the host does not read through them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace tandem::gpu {

using Stream = void*;                 // a CUstream, ours or the caller's; nullptr: the device's default stream
using Event = struct EventHandle*;    // made by Device::create_event
using Kernel = struct KernelHandle*;  // found in a Module, lives as long as that

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

// What load() takes: a cubin, or the text that it would be made from, with the lines of the source in it.
enum class Image : uint8_t { machine_code, ptx };

struct Properties {
  std::string name;
  std::string opened_as;  // "cuda:0", "vgpu:h200": the whole name that opens it
  int32_t compute_major = 0, compute_minor = 0;
  Image image = Image::machine_code;
  int32_t sm_count = 0;
  int32_t clock_khz = 0;
  int32_t memory_clock_khz = 0;
  int32_t memory_bus_bits = 0;
  int32_t max_dynamic_smem_bytes = 0;  // per block, once a kernel has asked for it
  int32_t driver_version = 0;          // 1000 * major + 10 * minor: 13000 is 13.0; 0: there is no driver
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;

  // What kernels are compiled for: "sm_90a". From Hopper on with all of the chip's own instructions.
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

// How the bulk copy engine sees a tensor. The values are those of the CUDA driver's enumerations.
// The last three are sixteen numbers of 4 or 6 bits, packed in global memory; in shared memory sixteen of them take 8
// or 16 bytes, the rest of which is padding. Sizes and boxes count single numbers.
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

// Dimension 0 is the contiguous one.
struct TensorMapSpec {
  void* address = nullptr;  // a multiple of 16
  TensorType type = TensorType::bf16;
  int32_t rank = 0;                            // 1..5
  uint64_t dims[kMaxTensorRank] = {};          // in elements
  uint64_t byte_strides[kMaxTensorRank] = {};  // of each dimension, multiples of 16; [0] is not read
  uint32_t box[kMaxTensorRank] = {};           // what one copy moves, in elements: 1..256
  uint32_t element_strides[kMaxTensorRank] = {1, 1, 1, 1, 1};
  Swizzle swizzle = Swizzle::none;
  L2Promotion l2_promotion = L2Promotion::none;
  OobFill oob_fill = OobFill::zero;

  bool operator==(const TensorMapSpec&) const = default;
};

// Opaque; passed to a kernel as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Memory that a kernel may touch, by the name that messages use for it.
struct NamedBuffer {
  const char* name = "";
  void* address = nullptr;
  size_t bytes = 0;
  bool writable = false;
  bool initialised = true;  // false: the kernel is to write before it reads
};

struct Launch {
  Kernel kernel = nullptr;
  Dim3 grid, block;
  Dim3 cluster;  // blocks per cluster
  uint32_t dynamic_smem_bytes = 0;
  bool cooperative = false;       // all blocks run at once and may wait for each other
  bool overlap_previous = false;  // may start before the stream's previous kernel ends; the kernel waits where it must
  void** args = nullptr;          // the address of each parameter
  Stream stream = nullptr;
  std::span<const NamedBuffer> buffers;  // all of it, where the device wants to know
};

// Code on a device. Keeps what it needs of the device alive; no launch of its kernels may be under way when it dies.
class Module {
 public:
  virtual ~Module() = default;
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // dynamic_smem_bytes: the most that a launch will ask for.
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

  // Memory. Pinned memory is the host's, and copies from and to it run beside the host.
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
  virtual Status wait(Stream stream, Event event) = 0;  // what comes later on stream waits; the host does not
  virtual Status synchronize_event(Event event) = 0;
  virtual Status elapsed_ms(Event start, Event stop, float* milliseconds) = 0;

  // Kernels. image: of the kind and for the architecture that the properties name.
  virtual Status load(std::span<const std::byte> image, std::unique_ptr<Module>* module) = 0;
  // Whether launches are to say what memory they may touch: for devices that watch every access.
  virtual bool wants_buffers() const { return false; }
  // These two are on the way of every call: on real GPUs they neither allocate nor lock.
  virtual Status encode(const TensorMapSpec& spec, TensorMap* map) = 0;
  virtual Status launch(const Launch& launch) = 0;
};

}  // namespace tandem::gpu
