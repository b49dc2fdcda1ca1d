#include "cli/vgpu/trace.h"

#include <algorithm>

#include "vgpu/src/trace/recorder.h"

namespace tandem::tool {

Trace trace_of(Job& job, const std::string& device, vgpu::Options options, int32_t block, Traced traced) {
  Trace trace;
  std::shared_ptr<vgpu::Recorder> recorder;
  const std::string kernel = job.kernel();
  options.observe = [&](const vgpu::LaunchDescription& launch,
                        const vgpu::Model& model) -> std::shared_ptr<vgpu::Observer> {
    recorder = nullptr;
    if (!kernel.empty() && launch.program->function().name != kernel) return nullptr;
    trace.blocks = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    const auto asked_for = static_cast<int32_t>(launch.cluster.x);
    trace.cluster = std::max({1, asked_for, launch.program->function().required_cluster[0]});
    const int32_t blocks = traced == Traced::cluster ? trace.cluster : 1;
    return recorder = vgpu::Recorder::create(launch, block / blocks * blocks, {.products = model.products}, blocks);
  };
  options.report = [&](const vgpu::Outcome&) {
    if (recorder) trace.timeline = recorder->timeline();
  };
  trace.status = job.run(device, options);
  return trace;
}

}  // namespace tandem::tool
