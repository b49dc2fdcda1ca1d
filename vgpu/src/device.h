// The virtual GPU as a gpu::Device: "vgpu:h200" or another model of vgpu/models. The device's memory is the host's. The
// CPU executes the PTX of its kernels. A kernel that breaks a rule fails its launch with a sentence.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "gpu/device.h"
#include "vgpu/src/machine/machine.h"
#include "vgpu/src/observer/finding.h"

namespace tandem::vgpu {

// A launch that has ended.
struct Outcome {
  const Program& program;
  const RunOptions& run;
  std::span<const Finding> findings;  // findings of the checker
  double seconds = 0;
};

struct Options {
  RunOptions run = {};
  int32_t sm_count = 0;  // another number than the model has
  bool check = true;
  bool letter = true;  // false: findings by the letter are omitted
  // Creates an observer of a launch in place of the checker, such as a trace or a timing model. May return null.
  std::function<std::shared_ptr<Observer>(const LaunchDescription&, const Model&)> observe = {};
  // Receives every launch. Without this function, findings are printed to standard error.
  std::function<void(const Outcome&)> report = {};
};

// Reads TANDEM_VGPU_SCHEDULE, TANDEM_VGPU_CHECK, TANDEM_VGPU_LETTER, TANDEM_VGPU_THREADS and
// TANDEM_VGPU_MAX_INSTRUCTIONS. The values at the first call count.
Status options_from_environment(Options* options);

// Looks up the model by a name for which gpu::is_virtual() holds. "vgpu" is "vgpu:h200".
Status find_model(std::string_view device, const Model** model);

// A launch executes its kernel on the calling thread and the threads of the options, so that streams and events need no
// order. Launches should name their buffers (wants_buffers). Other launches may access all memory of this device.
Status open(std::string_view name, std::unique_ptr<gpu::Device>* device);  // options_from_environment()
Status open(std::string_view name, Options options, std::unique_ptr<gpu::Device>* device);

// Makes memory that the program has allocated accessible to kernels, until free() is called with its address.
void adopt(gpu::Device& device, void* address, size_t bytes);

// The program of a kernel of such a device.
const Program& program_of(gpu::Kernel kernel);

// All findings of a launch as text; "" without findings.
std::string text_of(const Outcome& outcome);

}  // namespace tandem::vgpu
