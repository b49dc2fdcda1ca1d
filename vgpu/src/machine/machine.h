// Runs a kernel: PTX is decoded to a program, which the CPU executes warp by warp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "gpu/device.h"
#include "vgpu/src/machine/model.h"
#include "vgpu/src/observer/observer.h"
#include "vgpu/src/ptx/module.h"

namespace tandem::vgpu {

// The time at which asynchronous operations complete. Hardware chooses this time at each execution.
enum class Completion : uint8_t { early, late, random };

struct Schedule {
  uint64_t seed = 0;  // order of warps, random completion; 0: round robin
  Completion completion = Completion::early;
  // Returns the n-th schedule. The first two complete operations early and late; later schedules are random.
  static Schedule nth(int n);
  std::string text() const;  // "3": what --schedule takes to repeat it
};

// A run that takes long. The warp is one that executes, and place is its instruction.
struct LongRun {
  std::string kernel, place;
  double seconds = 0;
  uint64_t instructions = 0;
  int32_t block = 0, warp = 0;

  std::string text() const;  // one sentence
};

struct RunOptions {
  Schedule schedule;
  int32_t threads = 0;  // host threads; 0: all cores
  // Limit of warp instructions per block; 0: none. A quarter of it limits instructions without any store, barrier, copy
  // or exit. Instructions that wait while other clusters proceed do not count.
  uint64_t max_instructions = kMaxInstructions;
  // Seeds the order in which clusters begin, and how many of them a host thread interleaves. The seed decides which
  // block receives which work from a counter or cluster launch control. 0: in order, and the next cluster begins only
  // when earlier ones end or wait for it.
  uint64_t placement = 0;
  // Receives a run after this time, and again whenever the time has doubled.
  std::function<void(const LongRun&)> on_long_run = {};
  double long_run_seconds = 10;

  static constexpr uint64_t kMaxInstructions = 400'000'000;
};

// Global memory that a launch may touch, with the name that findings use for it.
struct Buffer {
  std::string name;
  void* address = nullptr;
  size_t bytes = 0;
  bool writable = true;
  bool initialised = true;  // false: reads before writes are a finding
};

// A program is decoded once per kernel and read by any number of runs at once.
class Program {
 public:
  virtual ~Program() = default;
  // The module stays alive as long as the program. Refuses PTX that the machine cannot execute on this model, with name
  // and line.
  static Status decode(std::shared_ptr<const ptx::Module> module, std::string_view entry, const Model& model,
                       std::unique_ptr<const Program>* program);

  virtual const ptx::Module& module() const = 0;
  virtual const ptx::Function& function() const = 0;
  // The PTX instruction of a decoded instruction, for names and lines.
  virtual const ptx::Instruction& source(int32_t instruction) const = 0;
  virtual int32_t parameter_bytes() const = 0;
  virtual int32_t parameter_offset(int index) const = 0;  // offset of a parameter in the parameter block
  virtual int32_t static_shared_bytes() const = 0;
  virtual int32_t registers_needed() const = 0;                 // an estimate: how many 32-bit registers live at once
  virtual std::vector<Buffer> variables() const { return {}; }  // variables of the module in global and constant memory
};

struct LaunchDescription {
  const Program* program = nullptr;
  gpu::Dim3 grid, block, cluster;
  uint32_t dynamic_shared_bytes = 0;
  std::span<const std::byte> parameters;
  bool cooperative = false;  // blocks may wait for each other
};

// Runs the grid to its end. observer: may be null. A fatal finding (deadlock, trap, an access outside every window)
// ends the run, and the status holds its sentence. The observer receives the machine's other findings. Without the
// buffers of an observer (Checker) an invalid address crashes the process.
Status run(const LaunchDescription& launch, const Model& model, const RunOptions& options, Observer* observer);

}  // namespace tandem::vgpu
