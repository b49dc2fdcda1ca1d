// A GPU's work for a call: its kernels, their launches in order, and the workspace. A plan is a pure function of the
// problem and the device's properties. Planning does not allocate, because every call does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/fixed_vector.h"
#include "base/status.h"
#include "gpu/device.h"
#include "plan/backward_schedule.h"
#include "plan/forward_kernel.h"
#include "plan/kernel.h"
#include "plan/tuning.h"
#include "problem/problem.h"

namespace tandem::score_mod {
struct Program;
}

namespace tandem::plan {

class Arguments;
class Pass;

struct PlannedKernel {
  Configuration configuration;
  Unit unit;
  uint64_t id;  // id of the configuration and its printed functions
  const score_mod::Program *score_mod = nullptr, *mask_mod = nullptr;  // modifications of the problem
};

PlannedKernel kernel_of(const Problem& problem, const Configuration& configuration, Unit unit = Unit::main);
std::string name_of(const PlannedKernel& kernel);
std::string translation_unit(const PlannedKernel& kernel);

// A launch omits the cluster's size, because the kernel has it as an attribute.
struct PlannedLaunch {
  uint8_t kernel = 0;  // index into Plan::kernels
  EntryId entry = EntryId::main;
  uint32_t grid = 1, block = 1;
  uint32_t shared_bytes = 0;
  // True if the launch may start while the stream's previous kernel still runs (programmatic launch).
  bool overlap_previous = false;
};

// A part of the workspace. Offsets count from the first multiple of kWorkspaceAlignment.
inline constexpr size_t kWorkspaceAlignment = 16;
struct Region {
  const char* name;  // "workspace.counter"
  size_t offset, bytes;
  int first_writer;  // first launch that writes it; kMemset: a memset does
};
inline constexpr int kMemset = -1;

struct Fill {
  size_t offset, bytes;  // filled with zeros
};

// Launches [begin, end) of a plan are repeated `times` times.
struct LaunchLoop {
  size_t begin = 0, end = 0;
  int64_t times = 1;
};

inline constexpr size_t kMaxKernels = 4;
struct Plan {
  const Pass* pass = nullptr;
  FixedVector<PlannedKernel, kMaxKernels> kernels;
  FixedVector<Fill, 2> fills;               // before the launches
  FixedVector<PlannedLaunch, 10> launches;  // in this order on one stream
  LaunchLoop repeat;
  FixedVector<Region, 12> regions;
  size_t workspace_bytes = 0;  // 0: none needed

  ForwardSchedule forward;    // forward only: read by ForwardPass and explain
  BackwardSchedule backward;  // backward only
};

// One pass of attention on GPUs. A new pass is a new class in a separate file.
class Pass {
 public:
  // Returns ok, or the first reason why a GPU does not serve the call. If GPUs have kernels for the call, this device's
  // limits count.
  virtual Status check(const Problem& problem, const gpu::Properties& device, const Tuning& tuning) const = 0;
  virtual void plan(const Problem& problem, const gpu::Properties& device, const Tuning& tuning, Plan* plan) const = 0;

  // Fills the parameters of the plan's kernels. workspace: aligned.
  virtual void bind(const Problem& problem, const Plan& plan, std::byte* workspace, Arguments* arguments) const = 0;
  // Returns the tensors that a launch accesses, for devices that check every access.
  virtual std::vector<gpu::NamedBuffer> tensors_of(const Problem& problem, const Plan& plan, size_t launch) const = 0;
  // Describes the tiles and their order for TANDEM_LOG, such as "132 blocks for 512 tiles, ...".
  virtual std::string summary(const Plan& plan) const = 0;

 protected:
  ~Pass() = default;  // passes are constants and never deleted
};

const Pass* pass_of(tandem_pass pass);

// Returns ok, or the first reason why this device does not serve the call. Data pointers that are set are checked too.
Status check(const Problem& problem, const gpu::Properties& device, const Tuning& tuning = kTuning);

// Returns false if no launch on the device may begin before the previous one has ended.
bool overlaps_launches(const gpu::Properties& device, const Tuning& tuning);

// Requires a problem that check() accepts and that has an output.
Plan make_plan(const Problem& problem, const gpu::Properties& device, const Tuning& tuning = kTuning);

}  // namespace tandem::plan
