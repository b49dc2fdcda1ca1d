// What one block of a job's kernel does, or all of its cluster, recorded in a run of its own.
#pragma once

#include <string>

#include "cli/vgpu/job.h"
#include "vgpu/src/trace/timeline.h"

namespace tandem::tool {

struct Trace {
  vgpu::Timeline timeline;  // of the last launch of the job's kernel()
  int64_t blocks = 0;       // that it had
  int32_t cluster = 1;      // blocks of a cluster
  Status status;
};

enum class Traced { block, cluster };
Trace trace_of(Job& job, const std::string& device, vgpu::Options options, int32_t block,
               Traced traced = Traced::block);

}  // namespace tandem::tool
