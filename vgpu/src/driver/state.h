// State of the library that replaces the CUDA driver: one virtual device for the process, and the objects that programs
// have created on it. Work is executed when it is submitted, by the calling thread and the device's host threads.
#pragma once

#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/text.h"
#include "gpu/device.h"
#include "vgpu/src/device.h"
#include "vgpu/src/driver/cuda.h"
#include "vgpu/src/driver/graph.h"
#include "vgpu/src/machine/address.h"
#include "vgpu/src/ptx/module.h"

namespace tandem::vgpu::driver {

struct CudaModule;

// Limits of an SM, and the system's share of each block's shared memory. The limits are the same on all models.
inline constexpr int kThreadsPerSm = 2048, kBlocksPerSm = 32, kReservedSharedBytes = machine::kReservedShared;

inline bool is_error(const Finding& finding) { return grade_of(finding.rule) == Grade::error; }

// CUfunction and CUkernel.
struct CudaFunction {
  CudaModule* module = nullptr;
  gpu::Kernel kernel = nullptr;
  std::string name;
  gpu::KernelAttributes attributes;
  int32_t max_dynamic_bytes = 0;  // kMaxDynamicSharedSizeBytes
  int32_t carveout = -1, cluster_policy = 0, non_portable_cluster = 0;
  int32_t cluster[3] = {0, 0, 0};  // kRequiredClusterWidth, ...: as set; else the kernel's own

  const Program& program() const { return program_of(kernel); }
};

// CUmodule and CUlibrary.
struct CudaModule {
  std::unique_ptr<gpu::Module> code;
  std::shared_ptr<const ptx::Module> text;
  std::map<std::string, std::unique_ptr<CudaFunction>, std::less<>> functions;
};

struct CudaContext {
  unsigned flags = 0;
};

struct Stream {
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  std::shared_ptr<Capture> capture = {};  // null: work is executed when it is submitted
};

// Memory that a program has allocated or registered.
struct Memory {
  enum class Kind : uint8_t { device, host, managed };
  Kind kind = Kind::device;
  size_t bytes = 0;
  uint64_t id = 0;
  bool is_registered = false;  // the program allocated it: cuMemHostRegister
};

// Values of a kernel's parameters, and the address of each.
using ParameterBlock = std::vector<std::byte>;
std::shared_ptr<ParameterBlock> keep_parameters(const Program& program, void* const* parameters);
std::vector<void*> addresses_of(const Program& program, ParameterBlock& block);

class DriverState {
 public:
  // The state of the process, created at the first call and never destroyed.
  static DriverState& get();

  // Implements cuInit. Prints once why no device is available.
  CUresult initialise();
  bool is_initialised() const { return device_ != nullptr; }
  gpu::Device& device() { return *device_; }
  const Model& model() const { return *model_; }

  // Guards the members below. The mutex is not locked while a kernel runs.
  std::recursive_mutex mutex;
  CudaContext primary;
  int primary_users = 0;
  std::set<const CudaContext*> contexts;  // made by cuCtxCreate
  std::map<const void*, std::unique_ptr<CudaModule>> modules;
  std::set<const CudaFunction*> functions;
  std::set<const Stream*> streams;
  std::set<const void*> events;
  std::map<CUdeviceptr, Memory> memory;
  uint64_t next_id = 1;
  CUresult failure = kSuccess;  // result of a failed kernel; every later call returns it

  bool holds(const CudaContext* context) const { return context == &primary || contexts.contains(context); }
  // The allocation around an address, or end().
  std::map<CUdeviceptr, Memory>::iterator around(CUdeviceptr address);

  // Prints the new findings of each launch, and records the result that a GPU would return.
  void report(const Outcome& outcome);
  CUresult result_of_last_launch();  // the last launch of the calling thread

 private:
  DriverState();

  std::unique_ptr<gpu::Device> device_;
  const Model* model_ = nullptr;
  bool tried_ = false;
};

// Contexts of this thread, the current one last.
std::vector<CudaContext*>& context_stack();
CudaContext* current_context();

// Prints "tandem vgpu: cuMemAlloc_v2: <sentence>" to standard error.
void say(const char* function, const std::string& sentence);
// Prints the same, and returns the function's result.
CUresult refuse(const char* function, CUresult result, const std::string& sentence);
// Converts a device's status: out of memory, or `otherwise`.
CUresult result_of(const char* function, const Status& status, CUresult otherwise = kInvalidValue);

enum class Needs : uint8_t { nothing, device, context };

// Wraps every function of the interface: refuses calls before cuInit, and catches exceptions.
template <class Body>
CUresult serve(const char* name, Needs needs, Body&& body) noexcept {
  try {
    DriverState& state = DriverState::get();
    if (needs != Needs::nothing && !state.is_initialised()) return kNotInitialized;
    if (needs == Needs::context) {
      if (current_context() == nullptr) return kInvalidContext;
      if (state.failure != kSuccess) return state.failure;
    }
    return body(state);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (const std::exception& error) {
    say(name, error.what());
    return kUnknown;
  }
}

// A function that the library exports.
#define TANDEM_DRIVER(name, parameters) extern "C" [[gnu::visibility("default")]] CUresult name parameters
// The same under the name for code compiled with a default stream per thread. Streams order nothing here.
#define TANDEM_DRIVER_ALIAS(alias, name)                                                   \
  __asm__(".globl " #alias "\n.type " #alias ", @function\n.set " #alias ", " #name "\n"); \
  static_assert(true)

}  // namespace tandem::vgpu::driver
