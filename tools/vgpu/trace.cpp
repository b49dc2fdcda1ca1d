#include "vgpu/trace.h"

#include <algorithm>

#include "vgpu/trace/recorder.h"

namespace tandem::tool {

Trace trace_of(Job& job, const std::string& device, vgpu::Options options, int32_t block) {
  Trace trace;
  std::shared_ptr<vgpu::Recorder> recorder;
  const std::string kernel = job.kernel();
  options.observe = [&](const vgpu::LaunchDescription& launch,
                        const vgpu::Model& model) -> std::shared_ptr<vgpu::Observer> {
    recorder = nullptr;
    if (!kernel.empty() && launch.program->function().name != kernel) return nullptr;
    trace.blocks = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    const auto compiled_into = static_cast<uint32_t>(launch.program->function().required_cluster[0]);
    trace.cluster = std::max({1u, launch.cluster.x, compiled_into});
    return recorder = vgpu::Recorder::create(launch, block, {.products = model.products});
  };
  options.report = [&](const vgpu::Outcome&) {
    if (recorder) trace.timeline = recorder->timeline();
  };
  trace.status = job.run(device, options);
  return trace;
}

}  // namespace tandem::tool
