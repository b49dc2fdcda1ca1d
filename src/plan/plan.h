// What a GPU does for a call: which kernels, launched in which order, and the memory between them. A pure function of
// the problem and the device's properties, without allocation, as it is made anew for every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/fixed_vector.h"
#include "base/status.h"
#include "gpu/device.h"
#include "plan/backward_tiling.h"
#include "plan/kernel.h"
#include "plan/tile.h"
#include "problem/problem.h"

namespace tandem::mods {
struct Program;
}

namespace tandem::plan {

class Arguments;
class Pass;

struct Kernel {
  Configuration configuration;
  Unit unit;
  uint64_t id;                                                    // of these and of what is printed for it
  const mods::Program *score_mod = nullptr, *mask_mod = nullptr;  // the problem's
};

Kernel kernel_of(const Problem& problem, const Configuration& configuration, Unit unit = Unit::main);
std::string name_of(const Kernel& kernel);
std::string translation_unit(const Kernel& kernel);

// Blocks of a cluster are the kernel's own affair: they are compiled into it.
struct Launch {
  uint8_t kernel = 0;  // of Plan::kernels
  uint8_t entry = 0;   // of entries_of(configuration, unit)
  uint32_t grid = 1, block = 1;
  uint32_t shared_bytes = 0;
  bool overlap_previous = false;  // may start while the stream's previous kernel still runs (programmatic launch)
};

// A part of the workspace, whose offsets count from its first multiple of kWorkspaceAlignment.
inline constexpr size_t kWorkspaceAlignment = 16;
struct Region {
  const char* name;  // "workspace.counter"
  size_t offset, bytes;
  int written_by;  // the launch that gives it its first contents; kFilled: a fill does
};
inline constexpr int kFilled = -1;

struct Fill {
  size_t offset, bytes;  // with zeros
};

// Launches [begin, end) of a plan are made so many times, one after the other.
struct Repeat {
  size_t begin = 0, end = 0;
  int64_t times = 1;
};

inline constexpr size_t kMostKernels = 4;
struct Plan {
  const Pass* pass = nullptr;
  FixedVector<Kernel, kMostKernels> kernels;
  FixedVector<Fill, 2> fills;        // before the launches
  FixedVector<Launch, 10> launches;  // in this order on one stream
  Repeat repeat;
  FixedVector<Region, 12> regions;
  size_t workspace_bytes = 0;  // 0: none is needed

  ForwardTiling forward;    // a forward's own: read by its Pass and by what explains it
  BackwardTiling backward;  // a backward's
};

// One pass of attention on GPUs. Another pass is another such class, in a file of its own.
class Pass {
 public:
  // Ok, or the first reason for which a GPU does not serve the call, where there are kernels for that GPU, this device.
  virtual Status check(const Problem& problem, const gpu::Properties& device) const = 0;
  virtual void plan(const Problem& problem, const gpu::Properties& device, Plan* plan) const = 0;

  // Parameters of the plan's kernels in a call. workspace: aligned.
  virtual void bind(const Problem& problem, const Plan& plan, std::byte* workspace, Arguments* arguments) const = 0;
  // The tensors that a launch touches, for devices that watch every access.
  virtual std::vector<gpu::NamedBuffer> tensors_of(const Problem& problem, const Plan& plan, size_t launch) const = 0;
  // How work is cut and ordered, for TANDEM_LOG: "132 blocks for 512 tiles, ...".
  virtual std::string summary(const Plan& plan) const = 0;

 protected:
  ~Pass() = default;  // passes are constants
};

const Pass* pass_of(tandem_pass pass);

// Ok, or the first reason for which this device does not serve the call. Where data pointers are set they count too.
Status check(const Problem& problem, const gpu::Properties& device);

// For a problem that check() accepts and that has something to write.
Plan make_plan(const Problem& problem, const gpu::Properties& device);

}  // namespace tandem::plan
