// Runs a kernel: PTX decoded into a program, executed warp by warp on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
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

// When asynchronous operations complete: a choice that the hardware makes anew each time.
enum class Completion : uint8_t { early, late, random };

struct Schedule {
  uint64_t seed = 0;  // of the order of warps, of fragments of a warp, and of random completion; 0: plain round robin
  Completion completion = Completion::early;
  // The n-th of a list that begins early, late and goes on at random.
  static Schedule nth(int n);
  std::string text() const;  // "3": what --schedule takes to repeat it
};

struct RunOptions {
  Schedule schedule;
  int32_t threads = 0;            // of the host; 0: all cores
  uint64_t max_instructions = 0;  // of warps, per block; 0: no bound. A kernel that runs on is a finding (deadlock).
  // Of the order in which clusters begin, and of how many a thread of the host runs side by side, in turns of any
  // length: which block is given which work by a counter or by cluster launch control. 0: in order, and the next one
  // only when those that have begun end or wait for it.
  uint64_t placement = 0;
};

// Global memory that a launch may touch, with the name that findings use for it.
struct Buffer {
  std::string name;
  void* address = nullptr;
  size_t bytes = 0;
  bool writable = true;
  bool initialised = true;  // false: reads before writes are a finding
};

// Decoded once per kernel, read by any number of runs at once.
class Program {
 public:
  virtual ~Program() = default;
  // module stays alive as long as the program. Refuses, by name and line, what it cannot execute on this model.
  static Status decode(std::shared_ptr<const ptx::Module> module, std::string_view entry, const Model& model,
                       std::unique_ptr<const Program>* program);

  virtual const ptx::Module& module() const = 0;
  virtual const ptx::Function& function() const = 0;
  // Of a decoded instruction: the PTX instruction it comes from, for names and lines.
  virtual const ptx::Instruction& source(int32_t instruction) const = 0;
  virtual int32_t parameter_bytes() const = 0;
  virtual int32_t parameter_offset(int index) const = 0;  // of the index-th parameter in the parameter block
  virtual int32_t static_shared_bytes() const = 0;
  virtual int32_t registers_needed() const = 0;                 // an estimate: how many 32-bit registers live at once
  virtual std::vector<Buffer> variables() const { return {}; }  // of the module, in global and constant memory
};

struct LaunchDescription {
  const Program* program = nullptr;
  gpu::Dim3 grid, block, cluster;
  uint32_t dynamic_shared_bytes = 0;
  std::span<const std::byte> parameters;
  bool cooperative = false;  // blocks may wait for each other: the grid has a workspace in global memory
};

// Runs the grid to its end. observer: may be null (nothing is watched). A finding after which the kernel cannot go on
// (deadlock, trap, an access outside every window) ends the run: the status says so with the finding's sentence. What
// else the machine itself finds is the observer's to hear, and ends nothing. Memory is accessed where it is: a wild
// address is caught when the observer has the buffers (Checker), and crashes the process otherwise, so the checker is
// on by default.
Status run(const LaunchDescription& launch, const Model& model, const RunOptions& options, Observer* observer);

}  // namespace tandem::vgpu
