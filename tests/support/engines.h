// The engines that the judge can be asked about.
#pragma once

#include <string>

#include "support/check_accuracy.h"

namespace tandem::test {

struct NamedEngine {
  Engine run;
  Supports supports;
  std::string flags = "";  // of tandem_fuzz, which choose it
};

// "cpu", "oracle" (the oracle itself, in the dtypes of the problem), "cuda", "cuda:N" or "vgpu:MODEL" (see gpu.h),
// which runs every call under so many schedules. Throws std::invalid_argument for others, std::runtime_error for a GPU
// that is not there.
NamedEngine engine_named(const std::string& device, int schedules = 1);

// The CPU engine on a number of threads, with a workspace of exactly the bytes it asks for, poisoned and guarded.
NamedEngine cpu_engine(int threads);

}  // namespace tandem::test
