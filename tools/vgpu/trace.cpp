#include "vgpu/trace.h"

#include "vgpu/trace/recorder.h"

namespace tandem::tool {

Trace trace_of(Job& job, const std::string& device, vgpu::Options options, int32_t block) {
  Trace trace;
  std::shared_ptr<vgpu::Recorder> recorder;
  options.observe = [&](const vgpu::LaunchDescription& launch, const vgpu::Model& model) {
    trace.blocks = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    return recorder = vgpu::Recorder::create(launch, block, {.products = model.products});
  };
  options.report = [&](const vgpu::Outcome&) { trace.timeline = recorder->timeline(); };
  trace.status = job.run(device, options);
  return trace;
}

}  // namespace tandem::tool
