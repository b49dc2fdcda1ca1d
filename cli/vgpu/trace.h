// Records the actions of one block of a job's kernel, or of its whole cluster, in a separate run.
#pragma once

#include <string>

#include "cli/vgpu/job.h"
#include "vgpu/src/trace/timeline.h"

namespace tandem::tool {

struct Trace {
  vgpu::Timeline timeline;  // last launch of the job's kernel()
  int64_t blocks = 0;       // number in the grid
  int32_t cluster = 1;      // blocks per cluster
  Status status;
};

enum class Traced { block, cluster };
Trace trace_of(Job& job, const std::string& device, vgpu::Options options, int32_t block,
               Traced traced = Traced::block);

}  // namespace tandem::tool
