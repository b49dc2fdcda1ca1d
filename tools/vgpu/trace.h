// What one block of a job's kernel does, recorded in a run of its own.
#pragma once

#include <string>

#include "vgpu/job.h"
#include "vgpu/trace/timeline.h"

namespace tandem::tool {

struct Trace {
  vgpu::Timeline timeline;  // of the last launch of the job's kernel()
  int64_t blocks = 0;       // that it had
  uint32_t cluster = 1;     // blocks of a cluster
  Status status;
};

Trace trace_of(Job& job, const std::string& device, vgpu::Options options, int32_t block);

}  // namespace tandem::tool
